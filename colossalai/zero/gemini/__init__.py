"""Gemini: ZeRO stage 3 in chunks of parameters, which are gathered where they are used.

For users: `GeminiDDP`, `ZeroDDP`, `ZeroOptimizer`, `GeminiAdamOptimizer`, `ChunkManager`, `GeminiManager`,
`ColoInitContext`, `get_static_torch_model`, `search_chunk_configuration`, `record_timeline` with what it
finds (`Iteration`, `Moment`, `Phase`). The rest is for the package: what a chunk holds (`ChunkLayout`), how
parameters are packed (`Packing`, `ChunkGroup`), which sizes are tried (`ChunkSizes`), and the data method
(`InChunks`) and its documented options (`GeminiOptions`).

What moves chunks (`InChunks`) and its doors come when they are asked for: most jobs have no chunks, and
`import colossalai` is to be quick.
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._lazy import find_name
from colossalai.zero._init_context import ColoInitContext as ColoInitContext
from colossalai.zero.gemini._options import GeminiOptions as GeminiOptions
from colossalai.zero.gemini._options import gemini_of_config as gemini_of_config
from colossalai.zero.gemini._packing import ChunkLayout as ChunkLayout
from colossalai.zero.gemini._packing import Packing as Packing
from colossalai.zero.gemini._packing import pack as pack
from colossalai.zero.gemini._search import ChunkGroup as ChunkGroup
from colossalai.zero.gemini._search import ChunkSizes as ChunkSizes
from colossalai.zero.gemini._search import ParameterKind as ParameterKind
from colossalai.zero.gemini._search import log_search as log_search
from colossalai.zero.gemini._search import search as search
from colossalai.zero.gemini._search import search_chunk_configuration as search_chunk_configuration
from colossalai.zero.gemini._search import search_groups as search_groups

if TYPE_CHECKING:
    from colossalai.zero.gemini._method import InChunks as InChunks
    from colossalai.zero.gemini._timeline import Iteration as Iteration
    from colossalai.zero.gemini._timeline import Moment as Moment
    from colossalai.zero.gemini._timeline import Phase as Phase
    from colossalai.zero.gemini._timeline import record_timeline as record_timeline
    from colossalai.zero.gemini._wrappers import GeminiAdamOptimizer as GeminiAdamOptimizer
    from colossalai.zero.gemini._wrappers import GeminiDDP as GeminiDDP
    from colossalai.zero.gemini._wrappers import ZeroDDP as ZeroDDP
    from colossalai.zero.gemini._wrappers import ZeroOptimizer as ZeroOptimizer
    from colossalai.zero.gemini._wrappers import get_static_torch_model as get_static_torch_model
    from colossalai.zero.gemini.chunk._chunk_manager import ChunkManager as ChunkManager
    from colossalai.zero.gemini.chunk._chunk_manager import GeminiManager as GeminiManager
    from colossalai.zero.gemini.planning import PLACEMENT_POLICIES as PLACEMENT_POLICIES
    from colossalai.zero.gemini.planning import SmallBudgetError as SmallBudgetError
else:
    _HOMES = {
        "InChunks": "colossalai.zero.gemini._method",
        "Iteration": "colossalai.zero.gemini._timeline",
        "Moment": "colossalai.zero.gemini._timeline",
        "Phase": "colossalai.zero.gemini._timeline",
        "record_timeline": "colossalai.zero.gemini._timeline",
        "GeminiAdamOptimizer": "colossalai.zero.gemini._wrappers",
        "GeminiDDP": "colossalai.zero.gemini._wrappers",
        "ZeroDDP": "colossalai.zero.gemini._wrappers",
        "ZeroOptimizer": "colossalai.zero.gemini._wrappers",
        "get_static_torch_model": "colossalai.zero.gemini._wrappers",
        "PLACEMENT_POLICIES": "colossalai.zero.gemini.planning",
        "SmallBudgetError": "colossalai.zero.gemini.planning",
        "ChunkManager": "colossalai.zero.gemini.chunk._chunk_manager",
        "GeminiManager": "colossalai.zero.gemini.chunk._chunk_manager",
    }
    __getattr__ = partial(find_name, __name__, _HOMES)  # PEP 562
