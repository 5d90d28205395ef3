"""Apply a plan to a model and its optimizers, in one fixed order: recompute, precision, data."""

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper, apply_precision
from colossalai.context import Axis, Mesh, ParallelContext, ParallelMode, get_seeds, set_mode
from colossalai.runtime._plan import Plan
from colossalai.runtime._recompute import apply_recompute, find_blocks
from colossalai.runtime._wrapper import ModelWrapper
from colossalai.tensor import ShardingSpec, set_spec, spec_of


def replicas_of(context: ParallelContext) -> Axis:
    """Return the ranks that hold the same parameters and see different parts of the batch.

    Those along `dp`; where sequences are cut, the ranks that share one, too.
    """
    return context.mesh.axis(("dp", "tp") if context.tensor_mode == "sequence" else "dp")


def assemble(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    mesh: Mesh,
    device: torch.device,
    replicas: Axis | None = None,
) -> tuple[ModelWrapper, OptimizerWrapper | None]:
    """Apply the methods of a plan to a model and its optimizer.

    From here on random numbers are drawn from the state of DATA, or of TENSOR where the replicas run along
    tensor axes, too: different dropout masks on different slices of the batch.

    Args:
        plan: The methods.
        model: The model; it is moved to `device` and changed in place.
        optimizer: An optimizer over its parameters, before its first step; it is changed in place where the
            parameters are replaced.
        mesh: The ranks.
        device: The device of this rank.
        replicas: The ranks over which gradients are averaged; default: those along `dp`. Each rank's loss is
            the mean over its own part of the batch, and the parts are equally large.

    Raises:
        ValueError: The model or the optimizer has been assembled before, the optimizer holds parameters that
            the model has not, or it has made steps already and the plan replaces parameters.
    """
    _check(model, optimizer)
    replicas = replicas or mesh.axis("dp")
    names = {id(param): name for name, param in model.named_parameters()}
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    model.to(device)
    blocks = find_blocks(model)
    apply_recompute(model, plan.recompute)
    computing = apply_precision(model, plan.precision, device.type)
    applied = plan.data.apply(computing, blocks=blocks, replicas=replicas, device=device)
    _keep_specs(model, specs)
    wrapped = None
    if optimizer is not None:
        _follow_replaced_params(optimizer, model, names)
        wrapped = OptimizerWrapper(
            optimizer,
            scaler=plan.precision.make_scaler(),
            group=mesh.group(tuple(mesh.axes)),
            param_names={param: name for name, param in model.named_parameters()},
        )
    in_force = ParallelMode.DATA if replicas.size == mesh.axis_size("dp") else ParallelMode.TENSOR
    if in_force in get_seeds():
        set_mode(in_force)
    return ModelWrapper(model, applied, plan.data), wrapped


def _check(model: nn.Module, optimizer: Optimizer | None) -> None:
    if isinstance(model, ModelWrapper) or isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            "this model or optimizer has been through a door already: pass the one you built yourself"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")


def _keep_specs(model: nn.Module, specs: dict[str, ShardingSpec | None]) -> None:
    """Let parameters that a method has put in the place of others carry the specs of those."""
    for name, param in model.named_parameters():
        spec = specs[name]
        if spec is not None and spec_of(param) is None:
            set_spec(param, spec)


def _follow_replaced_params(optimizer: Optimizer, model: nn.Module, names: dict[int, str]) -> None:
    """Let the optimizer hold the parameters that the model has now, where a method has replaced them."""
    now = dict(model.named_parameters())
    for number, group in enumerate(optimizer.param_groups):
        replaced = [_successor(param, names, now, number) for param in group["params"]]
        changed = any(new is not old for new, old in zip(replaced, group["params"], strict=True))
        if changed and optimizer.state:
            raise ValueError(
                "the optimizer has made steps already, but this plan replaces parameters: assemble first, "
                "then load the state of the optimizer"
            )
        group["params"] = replaced


def _successor(
    param: nn.Parameter, names: dict[int, str], now: dict[str, nn.Parameter], group: int
) -> nn.Parameter:
    if id(param) not in names:
        raise ValueError(
            f"group {group} of the optimizer holds a parameter of shape {tuple(param.shape)} that the model "
            "does not have: build the optimizer from the parameters of the model that you pass with it"
        )
    return now[names[id(param)]]
