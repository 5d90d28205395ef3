"""Checks of a model and its optimizers before a plan is applied to them."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.context import Layout, Mesh
from colossalai.nn.parallel import check_row_caches
from colossalai.pipeline import has_full_names
from colossalai.runtime._plan import Plan
from colossalai.runtime._wrapper import ModelWrapper
from colossalai.runtime.methods import refuse_compiled
from colossalai.tensor import built_for, row_cache_of, spec_of


def check_given(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh) -> Layout:
    """Check the arguments of `assemble`, and return the layout of the ranks.

    Raises:
        ValueError: `model` or an optimizer has been assembled before or is of another type, two optimizers
            share a parameter, a cached table cannot be trained by the plan or by an optimizer, the plan was
            made for another model, or the mesh or the layers of the model belong to another plan.
    """
    _check_types(model, optimizers)
    layout = layout_of(plan, mesh)
    _check_cached_tables(plan, model, optimizers, mesh)
    if plan.made_for is not None:
        refuse_other_model(plan.made_for, model, is_part=has_full_names(model))
    check_built_for(plan, model, mesh)
    return layout


def layout_of(plan: Plan, mesh: Mesh) -> Layout:
    """Return the layout of a plan; a plan without one accepts any mesh, and only `dp` counts.

    Raises:
        ValueError: The axes of `mesh` are not those of the plan.
    """
    if plan.layout is None:
        return Layout()
    layout = plan.layout.over(mesh.world_size)
    if layout.axes() != mesh.axes:
        raise ValueError(
            f"the plan lays {mesh.world_size} ranks out as {layout.axes()}, and the mesh has {mesh.axes}: "
            "pass the mesh of the plan"
        )
    return layout


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, under all their names."""
    return {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}


def refuse_other_model(
    made_for: Mapping[str, tuple[int, ...]], model: nn.Module, *, is_part: bool = False
) -> None:
    """Refuse a model whose parameters differ in name or shape from those of the plan's model.

    Args:
        made_for: The result of `parameter_shapes` for the plan's model.
        model: The model.
        is_part: Whether it is this rank's part of a model, with some of the names.

    Raises:
        ValueError: `model` has other names or shapes; the message has the first differences.
    """
    own = parameter_shapes(model)
    names = own if is_part else dict.fromkeys((*made_for, *own))
    different = [
        f"{name} is {own.get(name, 'not there')}, and {made_for.get(name, 'not there')} in the plan"
        for name in names
        if own.get(name) != made_for.get(name)
    ]
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"this {type(model).__name__} is not the model that the plan was made for: "
            f"{'; '.join(different[:3])}{more}: make a plan for it, by make_plan or colossalai plan"
        )


def check_built_for(plan: Plan, module: nn.Module, mesh: Mesh) -> None:
    """Refuse a model, or a loss, whose layers were built for another mesh than the plan's.

    Layers of `colossalai.nn` record the tensor mode in force when they were built, and the mesh over which
    their parameters are cut. Modules of torch alone can be built at any time.

    Raises:
        ValueError: A layer of `module` was built for another layout or mesh, or a tensor mode that is not the
            plan's; the message names it.
    """
    layout = plan.layout
    if layout is None:
        return
    elsewhere = [
        *(
            f"{name or 'it'}, a {type(part).__name__}, was built for {field} {extent!r}, and the plan has "
            f"{getattr(layout, field)!r}"
            for name, part, extents in built_for(module)
            for field, extent in extents.items()
            if extent != getattr(layout, field) and (field != "mode" or layout.tensor > 1)
            # A layer without a mode is a plain one, which `cuts` can cut.
            if not (field == "mode" and extent is None and plan.cuts is not None)
        ),
        *(
            f"{name} was built over the axes {spec.mesh.axes}, and the plan has {mesh.axes}"
            for name, param in module.named_parameters()
            if (spec := spec_of(param)) is not None and spec.axes and spec.mesh.axes != mesh.axes
        ),
    ]
    if elsewhere:
        raise ValueError(
            f"{type(module).__name__}: {elsewhere[0]}: "
            "lay the mesh out before layers of colossalai.nn are built, by Booster(plugin=...) or "
            "plugin.configure()"
        )


def _check_types(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if isinstance(model, ModelWrapper) or any(isinstance(each, OptimizerWrapper) for each in optimizers):
        raise ValueError(
            "this model or optimizer was boosted or initialized before: pass the one you built yourself"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    refuse_compiled(model)
    held: set[nn.Parameter] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
            )
        own = {param for group in optimizer.param_groups for param in group["params"]}
        if (twice := next(iter(held & own), None)) is not None:
            raise ValueError(
                f"a parameter of shape {tuple(twice.shape)} is in two optimizers: its gradient is unscaled "
                "and clipped with the step of one, so give each optimizer parameters of its own"
            )
        held |= own


def _check_cached_tables(plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh) -> None:
    """Check that the plan can train the cached tables of a model.

    Raises:
        ValueError: The plan has a pipeline, the tables are divided among other ranks, or an optimizer does
            not change rows separately.
    """
    for name, param in model.named_parameters():
        if plan.pipeline is not None and (cache := row_cache_of(param)) is not None:
            raise ValueError(
                f"{name} is the cache of {cache.name}: cached tables and pipelines cannot be combined, since "
                "a microbatch of the ids of all ranks has other samples than one of a rank's own batch: "
                "leave the pipeline out"
            )
    check_row_caches(model, optimizers, mesh.axis(mesh.batch_axes))
