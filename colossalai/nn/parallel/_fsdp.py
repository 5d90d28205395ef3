"""Fully sharded data parallelism: torch's FSDP2 (`fully_shard`), which is ZeRO stage 3 (1910.02054)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop

from colossalai.context import Axis
from colossalai.nn.parallel._arriving import ArrivingParams
from colossalai.nn.parallel._buckets import has_users_hooks
from colossalai.nn.parallel._data_method import (
    AppliedDataMethod,
    DataMethod,
    broadcast_from_first,
    refuse_sparse_gradients,
)
from colossalai.tensor import (
    GradientSync,
    ParameterHolder,
    gradient_sync,
    nested_tensors,
    row_cache_of,
    set_output_dtype,
)

_LISTS_OF_MODULES = (nn.ModuleList, nn.ModuleDict)  # which are not called themselves
_LISTS_OF_PARAMS = (nn.ParameterList, nn.ParameterDict, ParameterHolder)  # which are not called
_STAGE_1 = "LowLevelZeroPlugin (in a config, zero=dict(stage=1))"
_TENSORS_ONLY = (Adafactor, LBFGS, Muon, Rprop)
_TENSORS_ONLY_ELSEWHERE = ("transformers.optimization.Adafactor",)
"""Optimizers whose step fails on DTensors, in torch 2.13 and transformers 5.23."""


@dataclass(frozen=True, kw_only=True)
class FullySharded(DataMethod):
    """Every rank holds a slice of each parameter, of its gradient and of its optimizer states.

    Attributes:
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again in
            the backward; False keeps them, for more memory and less communication.
        cpu_offload: Keep the slices in host memory.
        param_dtype: Gather parameters and compute in this dtype; None: as they are.
        reduce_dtype: Average gradients in this dtype; None: as they are.
    """

    shards_parameters: ClassVar[bool] = True

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """See the base class."""
        return "FSDP"

    @property
    def name_in_pairs(self) -> str:
        """See the base class."""
        return "ZeRO 3"

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class; the parameters of `module` become DTensors over the replicas."""
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        broadcast_from_first(module, replicas)
        if self.param_dtype is not None:
            set_output_dtype(module, self.param_dtype)
        options: dict[str, Any] = {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
        }
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=arriving.device.type != "cpu")
        meshes: dict[Axis, DeviceMesh] = {}
        for part, sync in _parts(module, blocks, replicas).items():
            axis = sync.axis
            if axis not in meshes:
                # One dimension, along any mesh axes: two would mean shards in one, copies in the other.
                names = (axis.name or "alone",)
                meshes[axis] = DeviceMesh.from_group(axis.group, arriving.device.type, mesh_dim_names=names)
            fully_shard(part, mesh=meshes[axis], **options)
            if axis.size != sync.divisor:
                # FSDP divides by the size of its mesh. (Its `set_gradient_divide_factor` needs an operation
                # that gloo has not, and divides twice by it on one rank.)
                cast(FSDPModule, part).set_all_reduce_hook(partial(_scale, factor=axis.size / sync.divisor))
        for part in module.modules():
            if any(True for _ in part.parameters(recurse=False)):
                # After the hooks of FSDP, which gather.
                part.register_forward_pre_hook(partial(_refuse_shards, DTensor))
                part.register_load_state_dict_pre_hook(_shard_state)
        for name, param in module.named_parameters():
            param.register_hook = partial(_refuse_hook, name)  # type: ignore[method-assign]
        # Before the hook of FSDP, so that a backward that is refused has not begun for FSDP.
        module.register_forward_hook(_watch_outputs, prepend=True)
        return _Sharded(module)

    def check(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        blocks: list[nn.Module],
        replicas: Axis,
    ) -> None:
        """See the base class."""
        for optimizer in optimizers:
            _refuse_optimizer(optimizer)
        owners: dict[nn.Parameter, tuple[str, str]] = {}  # name and part of each parameter
        dtypes: dict[str, dict[torch.dtype, str]] = {}  # the dtypes of each part, and a parameter of each
        for part, name, param in _members(module, blocks, replicas):
            first, owner = owners.setdefault(param, (name, part))
            if owner != part:
                raise ValueError(
                    f"{first} and {name} are one parameter, in two parts of the model that FSDP shards one "
                    f"by one ({owner} and {part}): use {_STAGE_1}, which takes tied weights anywhere"
                )
            if not param.is_contiguous():
                raise ValueError(
                    f"the parameter {name} is not contiguous, which FSDP does not shard: put "
                    "nn.Parameter(param.detach().contiguous()) in its place before you build the optimizer"
                )
            if param.requires_grad:
                _refuse_complex_or_hooked(name, param)
                dtypes.setdefault(part, {}).setdefault(param.dtype, name)
        for part, found in dtypes.items():
            if len(found) > 1:
                written = " and ".join(f"{name} in {dtype}" for dtype, name in found.items())
                raise ValueError(
                    f"{part} has parameters of several dtypes ({written}), which FSDP cannot shard together: "
                    f"convert the model to one dtype, or use {_STAGE_1}"
                )
        refuse_sparse_gradients(module, "which FSDP does not average")


@final
class _Sharded(AppliedDataMethod):
    """A module that gathers its parameters where they are used; its gradients are scattered slices."""

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """See the base class; without synchronization a rank holds the whole gradient until the next one."""
        from torch.distributed.fsdp import FSDPModule

        cast(FSDPModule, self.module).set_requires_gradient_sync(enabled)

    def gathered(self, params: Collection[nn.Parameter] | None = None) -> AbstractContextManager[None]:
        """See the base class.

        Raises:
            ValueError: The parameters are DTensors, as FSDP has made them.
        """
        raise ValueError(
            "FSDP keeps parameters as DTensors, which can be read and written as they are: "
            "param.full_tensor() gives all values of one, on all ranks"
        )


def _refuse_shards(kind: type, part: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse the call of a module whose parameters are not gathered.

    Raises:
        ValueError: A parameter of `part` is of the class `kind` (DTensor), and an input is another tensor.
    """
    is_sharded = any(isinstance(param, kind) for param in part._parameters.values())
    if is_sharded and any(isinstance(each, torch.Tensor) and not isinstance(each, kind) for each in inputs):
        raise ValueError(
            f"{type(part).__name__} was called outside of the forward of the boosted model, in which FSDP "
            "gathers parameters: call the model itself, or declare the method that calls it, as in "
            "model.register_forward_method('compute_loss') of the boosted model, and call that on it"
        )


def _refuse_complex_or_hooked(name: str, param: nn.Parameter) -> None:
    """Refuse a trained parameter that would be updated wrongly, or whose hooks would never run.

    Raises:
        ValueError: `param` is complex, or the user has registered a hook of its gradient.
    """
    if param.is_complex():
        raise ValueError(
            f"the parameter {name} is {param.dtype}: optimizers view complex numbers as pairs of real ones, "
            f"which torch does wrongly for the slices that FSDP holds: use {_STAGE_1}"
        )
    if has_users_hooks(param):
        raise ValueError(
            f"the parameter {name} has a hook of its gradient, which FSDP never calls, as it puts another "
            f"parameter in place of this one: use {_STAGE_1}, or call register_post_accumulate_grad_hook on "
            "the parameters of the boosted model (it gets this rank's slice of the average)"
        )


def _refuse_hook(name: str, hook: Callable[..., Any]) -> None:
    """Replace `register_hook` of a parameter.

    Raises:
        ValueError: `register_hook` of a parameter is called.
    """
    raise ValueError(
        f"register_hook of the parameter {name}: FSDP never calls such a hook, as its backward reaches a "
        f"gathered copy of the parameter: use {_STAGE_1}, or register_post_accumulate_grad_hook, which gets "
        "this rank's slice of the average"
    )


def _watch_outputs(module: nn.Module, inputs: Any, output: Any) -> None:
    for tensor in nested_tensors(output):
        # The backward of `torch.func.grad` always has a graph, which ends with the call.
        if tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor.register_hook(_refuse_graph_of_grads)


def _refuse_graph_of_grads(grad: torch.Tensor) -> None:
    """Refuse a backward whose gradients have a graph, before FSDP's part of it begins.

    Raises:
        ValueError: The backward has `create_graph=True`.
    """
    if torch.is_grad_enabled():  # with `create_graph`
        raise ValueError(
            "a backward with create_graph=True through a model that FSDP shards: the second backward would "
            f"need parameters that FSDP has freed. For a gradient penalty use {_STAGE_1}"
        )


def _shard_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Replace whole tensors in a state dict by this rank's slices; no communication."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, param in module._parameters.items():
        given = state.get(prefix + name)
        if (
            not isinstance(param, DTensor)
            or not isinstance(given, torch.Tensor)
            or isinstance(given, DTensor)
        ):
            continue
        if given.shape == param.shape:  # else torch reports it
            # From this rank's own copy, as in one process.
            state[prefix + name] = distribute_tensor(
                given.detach(), param.device_mesh, param.placements, src_data_rank=None
            )


def _scale(grads: torch.Tensor, *, factor: float) -> None:
    grads.mul_(factor)


def _parts(module: nn.Module, blocks: list[nn.Module], replicas: Axis) -> dict[nn.Module, GradientSync]:
    """Return the modules that are sharded as one, inner ones first, and how the gradients of each are summed.

    Parts are the blocks, and the rest of the model. A part is sharded over one set of ranks. So a module all
    of whose parameters are shared by other ranks than the replicas (experts, with LoRA on them) is a part,
    too. If only its own are so, its children are parts of their own.

    Raises:
        ValueError: The parameters of one module itself are partly cut over data-parallel ranks and partly
            not.
    """
    everywhere = GradientSync(replicas, replicas.size)
    apart: dict[nn.Module, GradientSync] = {}
    whole: set[nn.Module] = set()
    for name, part in module.named_modules():  # outer ones first
        if part in whole or isinstance(part, _LISTS_OF_PARAMS):
            continue
        of_all = {gradient_sync(param, replicas) for param in part.parameters()}
        if len(of_all) == 1 and of_all != {everywhere} and not isinstance(part, _LISTS_OF_MODULES):
            apart[part] = of_all.pop()
            whole.update(part.modules())
            continue
        own = [*part.parameters(recurse=False), *_listed(part)]
        syncs = {gradient_sync(param, replicas) for param in own}
        if len(syncs) > 1:
            raise ValueError(
                f"{name or 'the model'} has parameters of its own that different ranks share: some of its "
                f"{len(own)} are cut over data-parallel ranks and some are not, which FSDP cannot shard "
                f"together. Put the former into a module of their own, or use {_STAGE_1}"
            )
        if syncs and syncs != {everywhere}:
            apart[part] = syncs.pop()
    inner = {called for part in apart if part not in whole for called in _called(part)}
    chosen = {module, *blocks, *apart, *inner}
    return {part: apart.get(part, everywhere) for part in reversed(list(module.modules())) if part in chosen}


def _listed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the lists of a module hold for it."""
    for child in module.children():
        if isinstance(child, _LISTS_OF_PARAMS):
            yield from child.parameters(recurse=False)
            yield from _listed(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that a module calls, and that have parameters."""
    for child in module.children():
        if isinstance(child, _LISTS_OF_MODULES):
            yield from _called(child)
        elif not isinstance(child, _LISTS_OF_PARAMS) and any(True for _ in child.parameters()):
            yield child


def _members(
    module: nn.Module, blocks: list[nn.Module], replicas: Axis
) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Return every name of every parameter: the part that FSDP shards it with, the name, the parameter."""
    parts = _parts(module, blocks, replicas)
    names = [name for name, part in module.named_modules() if part in parts and part is not module]
    rest = "the model outside of its blocks" if blocks else "the model"
    for name, param in module.named_parameters(remove_duplicate=False):
        around = [part for part in names if name.startswith(f"{part}.")]
        yield max(around, key=len, default=rest), name, param


def _refuse_optimizer(optimizer: Optimizer) -> None:
    bases = [f"{base.__module__}.{base.__qualname__}" for base in type(optimizer).__mro__]
    if isinstance(optimizer, _TENSORS_ONLY) or not set(bases).isdisjoint(_TENSORS_ONLY_ELSEWHERE):
        instead = "TorchDDPPlugin" if isinstance(optimizer, LBFGS) else _STAGE_1
        raise ValueError(
            f"{type(optimizer).__name__} cannot update the slices of parameters that FSDP holds: use "
            f"{instead}, or an optimizer such as AdamW"
        )
    if any(row_cache_of(param) is None for param in optimizer.state):
        raise ValueError(
            f"{type(optimizer).__name__} has made steps already, or has states before its first step, as "
            "Adagrad does, and FSDP replaces the parameters that the states belong to: boost the optimizer "
            f"before its first step and load its states then, or use {_STAGE_1}"
        )
