"""Gemini: ZeRO stage 3 in chunks of parameters, which are gathered where they are used.

For users: `GeminiDDP`, `ZeroDDP`, `ZeroOptimizer`, `GeminiAdamOptimizer`, `ChunkManager`, `GeminiManager`,
`ColoInitContext`, `get_static_torch_model`, `search_chunk_configuration`, `record_timeline` and its
results (`Iteration`, `Moment`, `Phase`). The rest is for the package: the layout of a chunk (`ChunkLayout`),
the packing of parameters (`Packing`, `ChunkGroup`), the candidate sizes (`ChunkSizes`), the data method
(`Gemini`) and its documented options (`GeminiOptions`).

`Gemini` and the wrappers are imported on first access: most jobs have no chunks, and `import colossalai` has
to be quick.
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.zero._init_context import ColoInitContext as ColoInitContext
from colossalai.zero.gemini._options import GeminiOptions as GeminiOptions
from colossalai.zero.gemini._options import gemini_of_config as gemini_of_config
from colossalai.zero.gemini._packing import ChunkLayout as ChunkLayout
from colossalai.zero.gemini._packing import Packing as Packing
from colossalai.zero.gemini._packing import pack as pack
from colossalai.zero.gemini._search import DEFAULT_INTERVAL as DEFAULT_INTERVAL
from colossalai.zero.gemini._search import MB as MB
from colossalai.zero.gemini._search import ChunkGroup as ChunkGroup
from colossalai.zero.gemini._search import ChunkSizes as ChunkSizes
from colossalai.zero.gemini._search import ParameterKind as ParameterKind
from colossalai.zero.gemini._search import log_search as log_search
from colossalai.zero.gemini._search import search as search
from colossalai.zero.gemini._search import search_chunk_configuration as search_chunk_configuration
from colossalai.zero.gemini._search import search_groups as search_groups

if TYPE_CHECKING:
    from colossalai.compat._gemini_wrappers import GeminiAdamOptimizer as GeminiAdamOptimizer
    from colossalai.compat._gemini_wrappers import GeminiDDP as GeminiDDP
    from colossalai.compat._gemini_wrappers import ZeroDDP as ZeroDDP
    from colossalai.compat._gemini_wrappers import ZeroOptimizer as ZeroOptimizer
    from colossalai.compat._gemini_wrappers import get_static_torch_model as get_static_torch_model
    from colossalai.compat.chunk import ChunkManager as ChunkManager
    from colossalai.compat.chunk import GeminiManager as GeminiManager
    from colossalai.zero.gemini._hooks import handle_of as handle_of
    from colossalai.zero.gemini._method import Gemini as Gemini
    from colossalai.zero.gemini._state_dict import ordinary_copy as ordinary_copy
    from colossalai.zero.gemini._timeline import Iteration as Iteration
    from colossalai.zero.gemini._timeline import Moment as Moment
    from colossalai.zero.gemini._timeline import Phase as Phase
    from colossalai.zero.gemini._timeline import record_timeline as record_timeline
    from colossalai.zero.gemini.planning import PLACEMENT_POLICIES as PLACEMENT_POLICIES
    from colossalai.zero.gemini.planning import SmallBudgetError as SmallBudgetError
else:
    _HOMES = {
        **NAMES[__name__],
        "handle_of": "colossalai.zero.gemini._hooks",
        "ordinary_copy": "colossalai.zero.gemini._state_dict",
        "Gemini": "colossalai.zero.gemini._method",
        "Iteration": "colossalai.zero.gemini._timeline",
        "Moment": "colossalai.zero.gemini._timeline",
        "Phase": "colossalai.zero.gemini._timeline",
        "record_timeline": "colossalai.zero.gemini._timeline",
        "PLACEMENT_POLICIES": "colossalai.zero.gemini.planning",
        "SmallBudgetError": "colossalai.zero.gemini.planning",
    }
    __getattr__ = partial(find_name, __name__, _HOMES)  # PEP 562
