"""Traces of models: the operations that `torch.export` records, and the arguments of the recorded call."""

import functools
import gc
import inspect
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from colossalai.auto_parallel.trace import quiet_attempt
from colossalai.autochunk._calls import has_effects
from colossalai.autochunk._symbolic import SymbolicGraph, TensorDims, first_difference, name_of
from colossalai.logging import get_dist_logger

_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_SHAPE = r"\1.shape[\2]"
_METADATA = "_assert_tensor_metadata"  # checks of dtypes; the arguments are compared instead


@dataclass(frozen=True)
class CallSignature:
    """Arguments that a model was traced with; calls have the same shapes, dtypes, and other values.

    Attributes:
        signature: Signature of the model's `forward`.
        leaves: Description of each tensor, and of each other value, by its path in the bound arguments.
        lengths: Names of the dimensions that change, by the path of the leaf.
        num_positional: Number of arguments that the model is passed by position.
        autocast: Dtypes of the surrounding autocast, by type of device.
    """

    signature: inspect.Signature
    leaves: Mapping[str, str]
    lengths: Mapping[str, Mapping[int, str]]
    num_positional: int
    autocast: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "CallSignature":
        """Return the signature of a call.

        Raises:
            ValueError: `model` does not take such arguments.
        """
        signature = inspect.signature(model.forward)
        try:
            arguments = _bound(signature, args, kwargs).arguments
        except TypeError as error:
            name = type(model).__name__
            raise ValueError(f"example_inputs do not fit {name}.forward{signature}: {error}") from error
        kinds = [each.kind for each in signature.parameters.values()]
        num_positional = max(len(args), kinds.count(inspect.Parameter.POSITIONAL_ONLY))
        return cls(signature, _described_leaves(arguments, {}), {}, num_positional, _autocast())

    def with_lengths(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], lengths: Mapping[str, Mapping[int, str]]
    ) -> "CallSignature":
        """Return the signature with dimensions that change, by the path of the leaf."""
        arguments = _bound(self.signature, args, kwargs).arguments
        return replace(self, leaves=_described_leaves(arguments, lengths), lengths=lengths)

    def arranged(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with all defaults, as they are traced.

        Raises:
            TypeError: The model does not take such arguments.
            ValueError: `args` or `kwargs` differ from the traced ones in more than the values of tensors, or
                the surrounding autocast differs.
        """
        bound = _bound(self.signature, args, kwargs)
        found = _described_leaves(bound.arguments, self.lengths)
        for path in [*self.leaves, *found]:
            expected, passed = self.leaves.get(path, "nothing"), found.get(path, "nothing")
            if expected != passed:
                passed = _described_leaves(bound.arguments, {}).get(path, "nothing")
                raise ValueError(
                    f"this model was chunked for {name_of(path)} = {expected}, but the call passes {passed}: "
                    "call autochunk with such arguments"
                )
        if (autocast := _autocast()) != self.autocast:
            raise ValueError(
                f"this model was chunked under autocast to {self.autocast or 'nothing'}, but is called under "
                f"{autocast or 'none'}: call autochunk in the same context"
            )
        parameters = self.signature.parameters.values()
        has_rest = any(bound.arguments[each.name] for each in parameters if each.kind is each.VAR_POSITIONAL)
        if has_rest or len(bound.args) <= self.num_positional:
            return bound.args, bound.kwargs
        # As in the example: decorators around a `forward` can take options by name only.
        named = dict(zip(self.signature.parameters, bound.args, strict=False))
        by_name = {name: named[name] for name in list(named)[self.num_positional :]}
        return bound.args[: self.num_positional], {**by_name, **bound.kwargs}

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        arguments = dict(_bound(self.signature, args, kwargs).arguments)
        for each in self.signature.parameters.values():
            if each.kind is each.VAR_KEYWORD:
                arguments |= arguments.pop(each.name)
        return arguments

    def ordered_leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the leaves of the arguments of a call by path, in the order of the trace."""
        found, _ = tree_flatten_with_path(dict(_bound(self.signature, args, kwargs).arguments))
        by_path = {keystr(path): leaf for path, leaf in found}
        return {path: by_path[path] for path in self.leaves}


def _bound(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def _autocast() -> dict[str, torch.dtype]:
    """Return the dtypes of the surrounding autocast."""
    kinds = {"cpu"}
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        kinds.add(accelerator.type)
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _described_leaves(
    arguments: Mapping[str, Any], lengths: Mapping[str, Mapping[int, str]]
) -> dict[str, str]:
    """Return a description of each leaf of bound arguments, by its path.

    Args:
        arguments: Arguments by name.
        lengths: Names of the dimensions that change, by the path of the leaf.
    """
    found, _ = tree_flatten_with_path(dict(arguments))
    paths = {keystr(path): leaf for path, leaf in found}
    return {path: _described(leaf, lengths.get(path, {})) for path, leaf in paths.items()}


def _described(leaf: Any, lengths: Mapping[int, str]) -> str:
    if isinstance(leaf, Tensor):
        shape = [lengths.get(dim, str(extent)) for dim, extent in enumerate(leaf.shape)]
        layout = "" if leaf.layout is torch.strided else f" and {leaf.layout}"
        return f"a tensor of shape ({', '.join(shape)}{',' * (len(shape) == 1)}) and {leaf.dtype}{layout}"
    return f"{leaf!r:.80}"


@dataclass(frozen=True)
class GraphTrace:
    """Operations of a call of a model.

    Attributes:
        module: The operations, with the parameters of the model.
        functions: Names of the model's own autograd functions, whose backward the trace lacks. None: unknown,
            since the model writes into arguments or parameters.
        symbolic: The graph of the module with symbolic lengths; None if all lengths are static.
    """

    module: fx.GraphModule
    functions: tuple[str, ...] | None
    symbolic: SymbolicGraph | None = None


@torch.inference_mode(False)
def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Mapping[str, TensorDims] | None = None,
) -> GraphTrace:
    """Return the operations of a call of a model, without a run.

    Args:
        model: The model.
        args: Positional arguments.
        kwargs: Named arguments.
        dims: Dimensions that change, by the path of the leaf of the arguments; None: all lengths are static.

    Raises:
        ValueError: `model` cannot be exported.
    """
    args, kwargs = tree_map_only(Tensor, _normal_tensor, (tuple(args), dict(kwargs)))
    functions: list[str] | None = None

    def inspect_outputs(module: nn.Module, args: Any, outputs: Any) -> None:
        nonlocal functions
        functions = _autograd_functions(outputs)

    hook = model.register_forward_hook(inspect_outputs)
    try:
        with _all_differentiable(model, args, kwargs) as (trainable_args, trainable_kwargs):
            exported = _export(model, trainable_args, trainable_kwargs)
    except Exception:  # such as a write into an argument, which is not possible if it requires a gradient
        hook.remove()
        functions = None
        exported = _export(model, args, kwargs)
    finally:
        hook.remove()
        _clear_caches_of_fake_tensors()
    with quiet_attempt():
        module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _remove_unused(module.graph)
    traced = GraphTrace(module, None if functions is None else tuple(functions))
    return traced if dims is None else replace(traced, symbolic=_symbolic(model, args, kwargs, dims, traced))


def _symbolic(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Mapping[str, TensorDims],
    traced: GraphTrace,
) -> SymbolicGraph:
    """Return the graph with symbolic lengths.

    Args:
        model: The model.
        args: Positional arguments.
        kwargs: Named arguments.
        dims: Dimensions that change, by the path of the leaf of the arguments.
        traced: The trace with static lengths.

    Raises:
        ValueError: `model` cannot be exported with these lengths, or is another one then.
    """
    leaves = flat_inputs(args, kwargs)
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # each argument has its own dims
    is_differentiable = traced.functions is not None
    context = _all_differentiable(model, args, kwargs) if is_differentiable else nullcontext((args, kwargs))
    try:
        with context as (own_args, own_kwargs), _named_arguments(model, kwargs):
            exported = _export(model, own_args, own_kwargs, list(dims.values()))
    finally:
        _clear_caches_of_fake_tensors()
    with quiet_attempt():
        module = exported.module(check_guards=True)
    assert isinstance(module, fx.GraphModule)
    _remove_unused(module.graph)
    symbolic = SymbolicGraph.of(module, traced.module.graph, exported.range_constraints, dims)
    if (difference := first_difference(traced.module.graph, symbolic.at(leaves))) is not None:
        raise ValueError(
            f"{type(model).__name__} has other operations if lengths are symbols, as a model that reads the "
            "type or the text of a length, or has torch.tensor(length): call autochunk for each length, "
            f"without dynamic_shapes (the first difference is {difference})"
        )
    _check_lengths(symbolic, dims, type(model).__name__)
    return symbolic


def _check_lengths(symbolic: SymbolicGraph, dims: Mapping[str, TensorDims], name: str) -> None:
    """Warn of lengths that operations of a model fix, as `Dim.AUTO` allows.

    Raises:
        ValueError: All lengths are fixed.
    """
    names = symbolic.names
    fixed = [
        f"{name_of(path)}.shape[{dim}]"
        for path, of_tensor in dims.items()
        for dim in of_tensor
        if dim not in names.get(path, {})
    ]
    message = f"operations of {name} fix lengths of dynamic_shapes: {', '.join(fixed)}"
    if not names:
        raise ValueError(f"{message}: call autochunk without dynamic_shapes")
    if fixed:
        get_dist_logger().warning(message)


def _export(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Sequence[TensorDims] | None = None,
) -> torch.export.ExportedProgram:
    """Return the exported model.

    Raises:
        ValueError: `model` cannot be exported.
    """
    try:
        # A failing export prints the operations so far; the reason is in the error.
        with (
            quiet_attempt(),
            redirect_stderr(io.StringIO()),
            torch.inference_mode(False),
            torch.enable_grad(),
            _kept_tensors(model),
        ):
            shapes = None if dims is None else _dynamic_shapes(model, args, kwargs, dims)
            return torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        lengths = " with these lengths" if dims is not None else ""
        reason, advice = _diagnosis(str(error), has_lengths=dims is not None)
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export{lengths}, because of a "
            f"{type(error).__name__}: {reason}; {advice}"
        ) from error


def _diagnosis(message: str, *, has_lengths: bool) -> tuple[str, str]:
    """Return the reason of an error of `torch.export`, and an advice."""
    text = message.partition("\n\n")[0].strip()
    first, *others = text.splitlines() or [""]
    if not has_lengths:  # the trace with lengths is the second one
        return first, (
            "change the arguments (use_cache=False for a model that returns a cache), call the model once "
            "before (if its forward creates buffers), or chunk the part of the model that has the large "
            "activations"
        )
    _, _, fixes = text.partition("Suggested fixes:")
    details = f"Suggested: {fixes}" if fixes else " ".join(others)
    reason = " ".join(f"{first.partition(' For more information')[0]} {details}".split())
    return f"{_SIZE.sub(_SHAPE, reason):.500}", (
        "change dynamic_shapes, or give an example with lengths of 2 or more; Dim.AUTO takes the conditions "
        "from the model"
    )


@contextmanager
def _named_arguments(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Give `forward` a parameter for each of its `**kwargs`, which `torch.export` has no dimensions for."""
    signature = inspect.signature(model.forward)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    known = {each.name for each in parameters}
    others = [name for name in kwargs if name not in known]
    if not others:
        yield
        return
    forward, is_own = model.forward, "forward" in vars(model)

    def named_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    keyword_only = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    named_forward.__signature__ = signature.replace(parameters=[*parameters, *keyword_only])  # type: ignore[attr-defined]
    model.forward = named_forward
    try:
        yield
    finally:
        if is_own:
            model.forward = forward
        else:
            del model.forward


def _dynamic_shapes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Sequence[TensorDims]
) -> Any:
    """Return `torch.export`'s structure of the dimensions that change."""
    shapes = torch.export.ShapesCollection()
    for leaf, of_tensor in zip(flat_inputs(args, kwargs), dims, strict=True):
        if of_tensor:
            shapes[leaf] = dict(of_tensor)
    return shapes.dynamic_shapes(model, tuple(args), dict(kwargs))


@contextmanager
def _kept_tensors(model: nn.Module) -> Iterator[None]:
    """Restore the parameters and buffers of all modules: a forward that registers some registers fake ones.

    Raises:
        ValueError: The block has changed them.
    """
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in model.modules()]
    changed: list[str] = []
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            for now, then in ((module._parameters, parameters), (module._buffers, buffers)):
                names = [name for name in {**now, **then} if now.get(name) is not then.get(name)]
                if names:
                    changed += [f"{type(module).__name__}.{name}" for name in names]
                    now.clear()
                    now.update(then)  # type: ignore[arg-type]  # of one kind
    if changed:
        raise ValueError(f"its forward replaces {', '.join(changed)}: call the model once before autochunk")


def _clear_caches_of_fake_tensors() -> None:
    """Clear each `functools.cache` with a fake tensor, which later calls of the model would receive."""

    def refers(value: Any, depth: int) -> bool:
        if type(value) is FakeTensor:
            return True
        if depth == 0 or type(value) in (FunctionType, ModuleType, type):
            return False
        return any(refers(each, depth - 1) for each in gc.get_referents(value))

    for each in gc.get_objects():
        # `isinstance` would call properties of other objects.
        if type(each) is not functools._lru_cache_wrapper or not each.cache_info().currsize:
            continue
        # A dict of results, or the results of a cache of limited size; a result can be an object.
        if any(refers(value, 3) for value in gc.get_referents(each) if value is not each.__dict__):
            each.cache_clear()


def _remove_unused(graph: fx.Graph) -> None:
    """Remove checks of dtypes, and operations without a use or an effect."""
    for node in reversed(list(graph.nodes)):
        is_unused = node.op == "call_function" and not node.users and not has_effects(node)
        if is_unused or _METADATA in str(node.target):
            graph.erase_node(node)


def _normal_tensor(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def _all_differentiable(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Let all parameters require a gradient within the block, and yield arguments that do.

    Every autograd function of the model is then seen, also those of parameters that are frozen now.
    """

    def differentiable(tensor: Tensor) -> Tensor:
        can_be = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(can_be)

    frozen = [
        each
        for each in model.parameters()
        if not each.requires_grad and (each.is_floating_point() or each.is_complex())
    ]
    try:
        for each in frozen:
            each.requires_grad_()
        yield tree_map_only(Tensor, differentiable, (tuple(args), dict(kwargs)))
    finally:
        for each in frozen:
            each.requires_grad_(False)


def _autograd_functions(outputs: Any) -> list[str]:
    """Return the names of the autograd functions, other than torch's own, that tensors depend on."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    waiting: list[Any] = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = set()
    names: set[str] = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        name = type(function).__name__.removesuffix("Backward")
        # Custom operators stay operators of the trace, with their backward.
        if isinstance(function, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_"):
            names.add(name)
        waiting += [each for each, _ in function.next_functions]
    return sorted(names)


def module_of(node: fx.Node) -> str:
    """Return the name of the innermost module that calls an operation; "" for the model."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def flat_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of a trace's placeholders."""
    return tree_leaves((tuple(args), dict(kwargs)))
