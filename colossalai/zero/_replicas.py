"""ZeRO stages 1 and 2 as a way of data parallelism (1910.02054).

Every rank holds all parameters; of the optimizer's states (stage 1), and of the gradients, too (stage 2), it
holds a slice. Per rank, with Psi parameters on n ranks, bytes p, g and s per element of parameters, gradients
and optimizer states (masters included):

    stage 1: (p + g + s / n) Psi        stage 2: (p + (g + s) / n) Psi

Each step sends (n-1)/n of the gradients and (n-1)/n of the parameters, and one byte for each parameter.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import Masters
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import (
    AppliedDataMethod,
    ArrivingParams,
    DataMethod,
    broadcast_floating_buffers,
    broadcast_from_first,
    call_on_grad,
    refuse_sparse_gradients,
)
from colossalai.zero._elementwise import is_elementwise, refuse_cut_parameters
from colossalai.zero._layout import FlatBucket, deal_out, lay_out
from colossalai.zero._reducer import ShardedReducer
from colossalai.zero._shards import Shards
from colossalai.zero._weights import WholeWeights


@dataclass(frozen=True, kw_only=True)
class ZeroReplicas(DataMethod):
    """Every rank updates its slice of the parameters and gets the others' slices back.

    Gradients are averaged in flat buckets while the backward runs. A parameter that has a gradient on no
    replica stays as it is.

    Attributes:
        stage: 1: optimizer states are cut; 2: gradients, too.
        bucket_cap_mb: Size of a bucket of gradients in MB (1024 * 1024 bytes).
        overlap: Average during the backward; False: at its end.
        cpu_offload: Keep optimizer states, and the slices they belong to, in host memory.
        communication_dtype: The dtype in which gradients are sent; None: their own.
        broadcast_buffers: Give all replicas the floating buffers of the first one before each step.
    """

    stage: int = 1
    bucket_cap_mb: float = 25.0
    overlap: bool = True
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ValueError(
                f"stage is {self.stage!r}; it must be 1 or 2. TorchDDPPlugin cuts nothing, TorchFSDPPlugin "
                "parameters, too (stage 3)"
            )
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be above 0")
        dtype = self.communication_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"communication_dtype is {dtype!r}; it must be a floating one such as torch.bfloat16, or None"
            )

    @property
    def name_in_pairs(self) -> str:
        """See the base class."""
        return f"ZeRO {self.stage}"

    @property
    def cuts_gradients(self) -> bool:
        """See the base class."""
        return self.stage == 2

    def allows_float32_grads(self, replicas: Axis) -> bool:
        """See the base class: they have the size of the parameters, as the memory formulas assume."""
        return False

    def check(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        blocks: list[nn.Module],
        replicas: Axis,
    ) -> None:
        """See the base class."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        held = {param for group in groups for param in group["params"]}
        refuse_sparse_gradients(module, "which ZeRO does not average", held=held)

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class; the children of an `nn.ModuleList` are its parts."""
        broadcast_from_first(module, replicas)  # parameters and buffers, before masters are made of them
        return _Cut(module, self, replicas)


@final
class _Cut(AppliedDataMethod):
    """A module whose optimizers, which come later, are cut over the replicas.

    Args:
        module: The module itself.
        options: The options.
        replicas: The replicas.
    """

    shards_gradients: ClassVar[bool] = True

    def __init__(self, module: nn.Module, options: ZeroReplicas, replicas: Axis) -> None:
        super().__init__(module)
        self._options = options
        self._replicas = replicas
        self._parts = list(module) if isinstance(module, nn.ModuleList) else [module]
        self._reducers: list[ShardedReducer] = []  # one for each optimizer
        self._held: set[nn.Parameter] = set()  # by the optimizers that have been cut
        for param in module.parameters():
            if param.requires_grad and replicas.size > 1:
                call_on_grad(param, _refuse_alone, self)  # until a reducer takes it

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """See the base class; with stage 2 every backward synchronizes, or slices could not add up."""
        for reducer in self._reducers:
            reducer.set_sync(enabled, part=part)

    def finish(self) -> None:
        """Wait until all gradients are averaged; see [Note: rounds] of the reducer."""
        for reducer in self._reducers:
            reducer.finish()

    def optimizer_params(
        self, optimizer: Optimizer, masters: Masters, *, late: Collection[nn.Parameter] = ()
    ) -> Shards:
        """Cut an optimizer over the replicas; parameters that no optimizer holds are not averaged.

        Masters are given up to their slices here.
        """
        options, replicas = self._options, self._replicas
        if options.cpu_offload and all(param.device.type == "cpu" for param in self.module.parameters()):
            get_dist_logger().log_once("cpu_offload has no effect: the model is in host memory", ranks=[0])
        if replicas.size > 1:
            refuse_own_clipping(optimizer)
        refuse_cut_parameters(optimizer)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        refuse_shared(self._held & held)
        own, shared = _trainable(self._parts, held, late)
        owners = {}
        if not is_elementwise(optimizer):
            owners = deal_out([*(param for params in own for param in params), *shared], replicas)

        def buckets_of(params: list[nn.Parameter]) -> list[FlatBucket]:
            cap_bytes = int(options.bucket_cap_mb * 2**20)
            return lay_out(params, replicas, cap_bytes=cap_bytes, owners=owners)

        with torch.no_grad():
            reducer = ShardedReducer(
                [buckets_of(params) for params in own],
                buckets_of(shared),
                replicas,
                stage=options.stage,
                overlap=options.overlap,
                dtype=options.communication_dtype,
            )
            self._reducers.append(reducer)
            self._held |= held
            return Shards(
                optimizer,
                reducer,
                replicas,
                weights_of=lambda bucket: [WholeWeights(bucket, masters.master_of)],
                offload=options.cpu_offload,
                reducers=self._reducers,
                before_step=(
                    partial(broadcast_floating_buffers, self.module, replicas)
                    if options.broadcast_buffers and replicas.size > 1
                    else None
                ),
            )


def _refuse_alone(find_cut: "weakref.ref[_Cut]", param: torch.Tensor) -> None:
    """Refuse a gradient before there is an optimizer: each rank would train by itself.

    Raises:
        ValueError: No optimizer has been cut.
    """
    cut = find_cut()
    if cut is not None and not cut._reducers:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a gradient, and its model was boosted under "
            "ZeRO without an optimizer: gradients are averaged for the optimizer, so give it to "
            "booster.boost(model, optimizer) or colossalai.initialize(model, optimizer). For a model "
            "that is not trained, such as a teacher, use torch.no_grad() or model.requires_grad_(False)"
        )


def refuse_own_clipping(optimizer: Optimizer) -> None:
    """Refuse an optimizer that clips by a norm of its own, which would be one of slices.

    Raises:
        ValueError: `optimizer` has a `max_grad_norm`.
    """
    bound = getattr(optimizer, "max_grad_norm", None)
    if bound:
        raise ValueError(
            f"{type(optimizer).__name__} clips to max_grad_norm={bound} by the norm of the gradients that a "
            "rank holds, which are slices: build it with max_grad_norm=0, and give the bound to the plugin "
            "(max_norm) or to the config (clip_grad_norm)"
        )


def refuse_shared(params: Collection[nn.Parameter]) -> None:
    """Refuse parameters that a second optimizer of a model has as well.

    Raises:
        ValueError: `params` has some.
    """
    if (twice := next(iter(params), None)) is not None:
        raise ValueError(
            f"a parameter of shape {tuple(twice.shape)} is in two optimizers of one model: its slice has "
            "one master and one gradient, so give each optimizer parameters of its own"
        )


def _trainable(
    parts: list[nn.Module], held: Collection[nn.Parameter], late: Collection[nn.Parameter]
) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """Return the parameters of each part alone, and those late or in several; the last first."""
    late = set(late)
    params_of = [list(_held(part, held)) for part in parts]
    num_parts: dict[nn.Parameter, int] = {}
    for params in params_of:
        for param in params:
            num_parts[param] = num_parts.get(param, 0) + 1
    alone = {param for param, number in num_parts.items() if number == 1 and param not in late}
    own = [[param for param in reversed(params) if param in alone] for params in params_of]
    return own, [param for param in reversed(num_parts) if param not in alone]


def _held(part: nn.Module, held: Collection[nn.Parameter]) -> Iterator[nn.Parameter]:
    return (param for param in part.parameters() if param.requires_grad and param in held)
