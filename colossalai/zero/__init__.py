"""ZeRO: the states of the optimizer, and the gradients, cut over the data-parallel ranks."""

from colossalai.zero._elementwise import declare_elementwise as declare_elementwise
from colossalai.zero._elementwise import is_elementwise as is_elementwise
from colossalai.zero._replicas import ZeroReplicas as ZeroReplicas
from colossalai.zero._shards import Shards as Shards
from colossalai.zero._wrappers import LowLevelZeroOptimizer as LowLevelZeroOptimizer
from colossalai.zero._wrappers import ZeroModel as ZeroModel
from colossalai.zero._wrappers import zero_model_wrapper as zero_model_wrapper
from colossalai.zero._wrappers import zero_optim_wrapper as zero_optim_wrapper
