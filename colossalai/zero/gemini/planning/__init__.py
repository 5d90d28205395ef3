"""Plans of the cache: the trace of an iteration, the tiers of chunks, and their eviction."""

from colossalai.zero.gemini.planning._eviction import DoesNotFit as DoesNotFit
from colossalai.zero.gemini.planning._eviction import EvictionPlan as EvictionPlan
from colossalai.zero.gemini.planning._eviction import Period as Period
from colossalai.zero.gemini.planning._eviction import plan_evictions as plan_evictions
from colossalai.zero.gemini.planning._policy import PLACEMENT_POLICIES as PLACEMENT_POLICIES
from colossalai.zero.gemini.planning._policy import Home as Home
from colossalai.zero.gemini.planning._policy import ModelData as ModelData
from colossalai.zero.gemini.planning._policy import Placement as Placement
from colossalai.zero.gemini.planning._policy import PlacementPolicy as PlacementPolicy
from colossalai.zero.gemini.planning._policy import SmallBudgetError as SmallBudgetError
from colossalai.zero.gemini.planning._trace import Trace as Trace
from colossalai.zero.gemini.planning._tracer import OtherBytes as OtherBytes
from colossalai.zero.gemini.planning._tracer import Tracer as Tracer
