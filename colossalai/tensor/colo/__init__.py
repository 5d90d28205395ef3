"""ColoTensor: tensor parallelism of existing models by annotation of their parameters."""

from colossalai.tensor.colo._cut import as_memory as as_memory
from colossalai.tensor.colo._cut import cut_of as cut_of
from colossalai.tensor.colo._process_group import ProcessGroup as ProcessGroup
from colossalai.tensor.colo._specs import ColoTensorSpec as ColoTensorSpec
from colossalai.tensor.colo._specs import ComputePattern as ComputePattern
from colossalai.tensor.colo._specs import ComputeSpec as ComputeSpec
from colossalai.tensor.colo._specs import DistSpec as DistSpec
from colossalai.tensor.colo._specs import ReplicaSpec as ReplicaSpec
from colossalai.tensor.colo._specs import ShardSpec as ShardSpec
from colossalai.tensor.colo._tensor import ColoParameter as ColoParameter
from colossalai.tensor.colo._tensor import ColoTensor as ColoTensor
from colossalai.tensor.colo._tensor import DistSpecManager as DistSpecManager
from colossalai.tensor.colo._tensor import as_colo_parameter as as_colo_parameter
from colossalai.tensor.colo._tensor import as_plain_parameter as as_plain_parameter
from colossalai.tensor.colo._tensor import follow_cut as follow_cut
from colossalai.tensor.colo._tensor import memory_scope as memory_scope
from colossalai.tensor.colo._tensor import process_group_of as process_group_of
