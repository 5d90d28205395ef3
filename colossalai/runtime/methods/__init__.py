"""The methods of a plan, each with its options: checked, applied and finished by `assemble` in one order."""

from colossalai.runtime.methods._assembly import Assembly as Assembly
from colossalai.runtime.methods._assembly import PlanMethod as PlanMethod
from colossalai.runtime.methods._compile import CompiledBlocks as CompiledBlocks
from colossalai.runtime.methods._compile import refuse_compiled as refuse_compiled
from colossalai.runtime.methods._modules import BatchNorms as BatchNorms
from colossalai.runtime.methods._modules import FusedLoss as FusedLoss
from colossalai.runtime.methods._modules import Recomputation as Recomputation
from colossalai.runtime.methods._sharding import ModelShards as ModelShards
from colossalai.runtime.methods._sharding import UserShards as UserShards
from colossalai.runtime.methods._stages import PipelineStages as PipelineStages
from colossalai.runtime.methods._stages import TiedWeights as TiedWeights
from colossalai.runtime.methods._training import ComputePrecision as ComputePrecision
from colossalai.runtime.methods._training import DataParallelism as DataParallelism
from colossalai.runtime.methods._training import MovedParams as MovedParams
from colossalai.runtime.methods._training import ParamValues as ParamValues
from colossalai.runtime.methods._training import WrappedOptimizers as WrappedOptimizers
