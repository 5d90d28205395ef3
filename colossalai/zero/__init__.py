"""ZeRO: optimizer states, gradients, and with Gemini parameters, cut over the data-parallel ranks.

Gemini and the wrappers of models are imported at their first use (see `colossalai.zero.gemini`).
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.zero._elementwise import declare_elementwise as declare_elementwise
from colossalai.zero._elementwise import is_elementwise as is_elementwise
from colossalai.zero._elementwise import refuse_cut_parameters as refuse_cut_parameters
from colossalai.zero._init_context import ColoInitContext as ColoInitContext
from colossalai.zero._init_context import post_process_colo_init_ctx as post_process_colo_init_ctx
from colossalai.zero._low_level import PRECISIONS as PRECISIONS
from colossalai.zero._low_level import LowLevelZeroOptimizer as LowLevelZeroOptimizer
from colossalai.zero._low_level import defaults_of as defaults_of
from colossalai.zero._low_level import scaler_of as scaler_of
from colossalai.zero._model import ZeroModel as ZeroModel
from colossalai.zero._model import check_device as check_device
from colossalai.zero._replicas import ZeroReplicas as ZeroReplicas
from colossalai.zero._shards import Shards as Shards

if TYPE_CHECKING:
    from colossalai.compat._gemini_wrappers import GeminiAdamOptimizer as GeminiAdamOptimizer
    from colossalai.compat._gemini_wrappers import GeminiDDP as GeminiDDP
    from colossalai.compat._gemini_wrappers import ZeroDDP as ZeroDDP
    from colossalai.compat._gemini_wrappers import ZeroOptimizer as ZeroOptimizer
    from colossalai.compat._zero_wrappers import zero_model_wrapper as zero_model_wrapper
    from colossalai.compat._zero_wrappers import zero_optim_wrapper as zero_optim_wrapper
else:
    __getattr__ = partial(find_name, __name__, NAMES[__name__])  # PEP 562
