"""Traces of models: the operations that `torch.export` records, and the arguments of the recorded call."""

import functools
import gc
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from colossalai.auto_parallel.trace import quiet_attempt
from colossalai.autochunk._rules import has_effects

_METADATA = "_assert_tensor_metadata"  # checks of dtypes; the arguments are compared instead


@dataclass(frozen=True)
class CallSignature:
    """Arguments that a model was traced with; calls have the same shapes, dtypes, and other values.

    Attributes:
        signature: Signature of the model's `forward`.
        leaves: Description of each tensor, and of each other value, by its path in the bound arguments.
        autocast: Dtypes of the surrounding autocast, by type of device.
    """

    signature: inspect.Signature
    leaves: Mapping[str, str]
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
        return cls(signature, _leaves(arguments), _autocast())

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
        found = _leaves(bound.arguments)
        for path in [*self.leaves, *found]:
            expected, passed = self.leaves.get(path, "nothing"), found.get(path, "nothing")
            if expected != passed:
                name = path.replace("'", "").strip("[]").replace("][", ".")
                raise ValueError(
                    f"this model was chunked for {name} = {expected}, but the call passes {passed}: call "
                    "autochunk with such arguments"
                )
        if (autocast := _autocast()) != self.autocast:
            raise ValueError(
                f"this model was chunked under autocast to {self.autocast or 'nothing'}, but is called under "
                f"{autocast or 'none'}: call autochunk in the same context"
            )
        return bound.args, bound.kwargs


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


def _leaves(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of each leaf of bound arguments, by its path."""
    found, _ = tree_flatten_with_path(dict(arguments))
    return {keystr(path): _described(leaf) for path, leaf in found}


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return f"{leaf!r:.80}"


@dataclass(frozen=True)
class GraphTrace:
    """Operations of a call of a model.

    Attributes:
        module: The operations, with the parameters of the model.
        functions: Names of the model's own autograd functions, whose backward the trace lacks. None: unknown,
            since the model writes into arguments or parameters.
    """

    module: fx.GraphModule
    functions: tuple[str, ...] | None


def trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphTrace:
    """Return the operations of a call of a model, without a run.

    Raises:
        ValueError: `model` cannot be exported.
    """
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
    return GraphTrace(module, None if functions is None else tuple(functions))


def _export(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
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
            return torch.export.export(model, tuple(args), dict(kwargs), strict=False)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export, because of a {type(error).__name__}: "
            f"{reason}; change the arguments (use_cache=False for a model that returns a cache), call the "
            "model once before (if its forward creates buffers), or chunk the part of the model that has the "
            "large activations"
        ) from error


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


@contextmanager
def _all_differentiable(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Let all parameters require a gradient within the block, and yield arguments that do.

    Every autograd function of the model is then seen, also those of parameters that are frozen now.
    """

    def differentiable(tensor: Tensor) -> Tensor:
        can_be = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_() if can_be else tensor

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
