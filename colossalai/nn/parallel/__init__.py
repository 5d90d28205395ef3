"""Data parallelism: ways to keep replicas equal, or to share one model among them."""

from colossalai.nn.parallel._bucketed import Bucketed as Bucketed
from colossalai.nn.parallel._buckets import adopt_grad as adopt_grad
from colossalai.nn.parallel._data_method import DataMethod as DataMethod
from colossalai.nn.parallel._data_method import broadcast_floating_buffers as broadcast_floating_buffers
from colossalai.nn.parallel._data_method import broadcast_from_first as broadcast_from_first
from colossalai.nn.parallel._ddp import Replicated as Replicated
from colossalai.nn.parallel._ddp import Unsynchronized as Unsynchronized
from colossalai.nn.parallel._fsdp import FullySharded as FullySharded
