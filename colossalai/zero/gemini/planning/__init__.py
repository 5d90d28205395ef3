"""Planning of the cache: traces of iterations, placement of chunks, and evictions."""

from colossalai.zero.gemini.planning._policy import PLACEMENT_POLICIES as PLACEMENT_POLICIES
from colossalai.zero.gemini.planning._policy import Home as Home
from colossalai.zero.gemini.planning._policy import ModelData as ModelData
from colossalai.zero.gemini.planning._policy import Placement as Placement
from colossalai.zero.gemini.planning._policy import PlacementPolicy as PlacementPolicy
from colossalai.zero.gemini.planning._policy import SmallBudgetError as SmallBudgetError
from colossalai.zero.gemini.planning._trace import Trace as Trace
from colossalai.zero.gemini.planning._tracer import OtherBytes as OtherBytes
from colossalai.zero.gemini.planning._tracer import Tracer as Tracer
from colossalai.zero.gemini.planning._victims import DoesNotFit as DoesNotFit
from colossalai.zero.gemini.planning._victims import Period as Period
from colossalai.zero.gemini.planning._victims import ResidencePlan as ResidencePlan
from colossalai.zero.gemini.planning._victims import plan_residence as plan_residence
