"""Data parallelism: ways to keep replicas equal, or to share one model among them.

The wrappers of ZeRO, which stands on this package, come when they are asked for.
"""

from functools import partial
from typing import TYPE_CHECKING

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
from colossalai.nn.parallel._data_method import params_called as params_called
from colossalai.nn.parallel._data_method import refuse_sparse_gradients as refuse_sparse_gradients
from colossalai.nn.parallel._ddp import Replicated as Replicated
from colossalai.nn.parallel._ddp import Unsynchronized as Unsynchronized
from colossalai.nn.parallel._fsdp import FullySharded as FullySharded

if TYPE_CHECKING:
    from colossalai.zero import GeminiDDP as GeminiDDP
    from colossalai.zero import ZeroDDP as ZeroDDP
    from colossalai.zero import zero_model_wrapper as zero_model_wrapper
    from colossalai.zero import zero_optim_wrapper as zero_optim_wrapper
else:
    _HOMES = dict.fromkeys(
        ("GeminiDDP", "ZeroDDP", "zero_model_wrapper", "zero_optim_wrapper"), "colossalai.zero"
    )
    __getattr__ = partial(find_name, __name__, _HOMES)
