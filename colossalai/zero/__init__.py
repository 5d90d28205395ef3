"""ZeRO: optimizer states, gradients, and with Gemini parameters, cut over the data-parallel ranks."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.zero._elementwise import declare_elementwise as declare_elementwise
from colossalai.zero._elementwise import is_elementwise as is_elementwise
from colossalai.zero._init_context import ColoInitContext as ColoInitContext
from colossalai.zero._init_context import post_process_colo_init_ctx as post_process_colo_init_ctx
from colossalai.zero._low_level import LowLevelZeroOptimizer as LowLevelZeroOptimizer
from colossalai.zero._model import ZeroModel as ZeroModel
from colossalai.zero._replicas import ZeroReplicas as ZeroReplicas
from colossalai.zero._shards import Shards as Shards
from colossalai.zero._wrappers import zero_model_wrapper as zero_model_wrapper
from colossalai.zero._wrappers import zero_optim_wrapper as zero_optim_wrapper
from colossalai.zero.gemini import GeminiAdamOptimizer as GeminiAdamOptimizer
from colossalai.zero.gemini import GeminiDDP as GeminiDDP
from colossalai.zero.gemini import ZeroDDP as ZeroDDP
from colossalai.zero.gemini import ZeroOptimizer as ZeroOptimizer

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
