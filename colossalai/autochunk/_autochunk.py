"""`autochunk`: trace, profile, choice of regions, rewritten module."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from colossalai.autochunk._job import ChunkJob
from colossalai.autochunk._module import ChunkedCall, ChunkedModule, DynamicChunkedModule, check_names
from colossalai.autochunk._plan import ChunkPlan, parsed_bytes
from colossalai.autochunk._symbolic import dynamic_dims
from colossalai.autochunk._trace import CallSignature, flat_inputs, trace

Examples = Tensor | Sequence[Any] | Mapping[str, Any]


@overload
def autochunk(
    model: nn.Module,
    example_inputs: Examples,
    memory_budget: int | float | str | None = None,
    *,
    memory_ratio: float | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
    dynamic_shapes: None = None,
) -> ChunkedModule: ...


@overload
def autochunk(
    model: nn.Module,
    example_inputs: Examples,
    memory_budget: int | float | str | None = None,
    *,
    memory_ratio: float | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any],
) -> DynamicChunkedModule: ...


def autochunk(
    model: nn.Module,
    example_inputs: Examples,
    memory_budget: int | float | str | None = None,
    *,
    memory_ratio: float | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
) -> ChunkedModule | DynamicChunkedModule:
    """Return a module that computes the same with less memory for activations.

    The model is traced without being run. Source: AutoChunk (https://arxiv.org/abs/2401.10652).

    Args:
        model: The model, in training or evaluation mode, of any device and dtype.
        example_inputs: Arguments of its calls: a tensor, a sequence of positional arguments, or a mapping of
            arguments by name. The values of tensors are not used.
        memory_budget: Largest allowed number of live bytes of activations (results of operations, outputs
            included; no parameters, buffers or arguments), a number or a text such as "2 GB". It holds where
            autograd saves nothing: under `torch.no_grad()` and in the forward of recomputed modules.
        memory_ratio: The budget as a fraction of the peak without chunks, instead of `memory_budget`.
        plan: A plan of the same model and shapes, instead of a budget; it has its own `inplace`.
        inplace: Whether a region's output can take the memory of an input that no operation reads later, of
            the same shape and cut. Arguments and parameters do not change. With gradients enabled, outputs
            are new tensors, beyond the budget.
        dynamic_shapes: Lengths that change, as `torch.export.export` takes them, such as
            `{"input_ids": {1: torch.export.Dim("seq", max=4096)}}`; an argument without an entry is static.
            The budget in bytes is the same for all lengths. Lengths are 2 or more.

    Raises:
        ValueError: The model cannot be traced (with these `dynamic_shapes`), no plan fits into the budget
            (the message has the smallest one), `plan` belongs to another model or other shapes, or an
            argument is wrong.
    """
    _check_model(model)
    if sum(each is not None for each in (memory_budget, memory_ratio, plan)) != 1:
        raise ValueError("autochunk takes exactly one of memory_budget, memory_ratio and plan")
    _check_options(memory_ratio, plan, inplace)
    budget = None if memory_budget is None else parsed_bytes(memory_budget)
    signature = CallSignature.of(model, *_arguments(example_inputs))
    args, kwargs = signature.arranged(*_arguments(example_inputs))
    dims = None
    if dynamic_shapes is not None:
        found = dynamic_dims(signature.named(args, kwargs), dynamic_shapes)
        dims = dict(zip(signature.ordered_leaves(args, kwargs), found, strict=True))
    traced = trace(model, args, kwargs, dims)
    inplace = inplace if plan is None else plan.inplace
    inputs = flat_inputs(args, kwargs)
    job = ChunkJob(type(model).__name__, traced.module, traced.module.graph, inputs, inplace=inplace)
    if plan is not None:
        chunked, made = job.apply(plan)
    else:
        chunked, made = job.search(budget or max(1, int(job.unchunked_peak * (memory_ratio or 1))))
    call = ChunkedCall(signature, traced.functions, model.training)
    if traced.symbolic is None:
        return ChunkedModule(traced.module, chunked, made, call, model)
    call = replace(call, signature=signature.with_lengths(args, kwargs, traced.symbolic.names))
    return DynamicChunkedModule(
        traced.module, (chunked, made), call, model, symbolic=traced.symbolic, inputs=inputs
    )


def _check_model(model: Any) -> None:
    """Refuse a model that is not an eager one.

    Raises:
        ValueError: `model` is not a module, is a chunked one, or has names of those of a chunked one.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"autochunk takes an eager torch.nn.Module, not {model!r:.80}")
    if isinstance(model, ChunkedModule | DynamicChunkedModule):
        raise ValueError("the model is the result of autochunk already: pass the original model")
    check_names(model)
    for name, each in model.named_modules():
        if isinstance(each, DynamicChunkedModule):
            raise ValueError(f"{name} of the model is a result of autochunk already: pass the original model")


def _check_options(memory_ratio: Any, plan: Any, inplace: Any) -> None:
    """Refuse options of other types or values.

    Raises:
        ValueError: An option is wrong, or `inplace` is True and the plan's is not.
    """
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace={inplace!r:.80} must be True or False")
    if memory_ratio is not None and not _is_fraction(memory_ratio):
        raise ValueError(f"memory_ratio={memory_ratio!r} must be above 0 and at most 1")
    if plan is None:
        return
    if not isinstance(plan, ChunkPlan):
        raise ValueError(f"plan={plan!r:.80} is not a ChunkPlan: read a file with ChunkPlan.load")
    if inplace and not plan.inplace:
        raise ValueError("the plan was made without inplace=True: leave inplace out, or plan anew")


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise ValueError(
        f"example_inputs is of type {type(example_inputs).__name__}; it must be a tensor, a sequence of "
        "positional arguments, or a mapping of arguments by name"
    )
