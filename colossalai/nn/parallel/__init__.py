"""Data parallelism: ways to keep replicas equal, or to share one model among them.

The documented names of ZeRO's wrappers are aliases (`NAMES` of `colossalai._aliases`).
"""

from typing import Any

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.nn.parallel._applied_model import AppliedModel as AppliedModel
from colossalai.nn.parallel._applied_model import updates_after_step as updates_after_step
from colossalai.nn.parallel._arriving import ArrivingParams as ArrivingParams
from colossalai.nn.parallel._bucketed import Bucketed as Bucketed
from colossalai.nn.parallel._buckets import EarlierMeans as EarlierMeans
from colossalai.nn.parallel._buckets import call_on_grad as call_on_grad
from colossalai.nn.parallel._buckets import remove_owners as remove_owners
from colossalai.nn.parallel._buckets import sparse_gradient as sparse_gradient
from colossalai.nn.parallel._data_method import AppliedDataMethod as AppliedDataMethod
from colossalai.nn.parallel._data_method import DataMethod as DataMethod
from colossalai.nn.parallel._data_method import broadcast_floating_buffers as broadcast_floating_buffers
from colossalai.nn.parallel._data_method import broadcast_from_first as broadcast_from_first
from colossalai.nn.parallel._data_method import check_row_caches as check_row_caches
from colossalai.nn.parallel._data_method import params_called as params_called
from colossalai.nn.parallel._data_method import refuse_sparse_gradients as refuse_sparse_gradients
from colossalai.nn.parallel._ddp import Replicated as Replicated
from colossalai.nn.parallel._ddp import Unsynchronized as Unsynchronized
from colossalai.nn.parallel._fsdp import FullySharded as FullySharded


def __getattr__(name: str) -> Any:
    """Import an alias at its first access (PEP 562)."""
    return find_name(__name__, NAMES[__name__], name)
