"""The methods of a plan, each with its options: checked, applied and finished by `assemble` in one order."""

from colossalai.runtime.methods._assembly import Assembly as Assembly
from colossalai.runtime.methods._assembly import PlanMethod as PlanMethod
from colossalai.runtime.methods._compile import CompiledBlocks as CompiledBlocks
from colossalai.runtime.methods._compile import refuse_compiled as refuse_compiled
from colossalai.runtime.methods._data_parallel import ComputePrecision as ComputePrecision
from colossalai.runtime.methods._data_parallel import DataParallelism as DataParallelism
from colossalai.runtime.methods._fused_loss import FusedLoss as FusedLoss
from colossalai.runtime.methods._optimizers import WrappedOptimizers as WrappedOptimizers
from colossalai.runtime.methods._params import BatchNorms as BatchNorms
from colossalai.runtime.methods._params import MovedParams as MovedParams
from colossalai.runtime.methods._params import ParamValues as ParamValues
from colossalai.runtime.methods._params import Recomputation as Recomputation
from colossalai.runtime.methods._sharding import ModelShards as ModelShards
from colossalai.runtime.methods._stages import PipelineStages as PipelineStages
from colossalai.runtime.methods._stages import TiedWeights as TiedWeights
from colossalai.runtime.methods._user_shards import UserShards as UserShards
