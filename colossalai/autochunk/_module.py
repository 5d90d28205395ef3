"""The results of `autochunk`: modules for the lengths of the trace, and for lengths that change."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from colossalai.autochunk._job import ChunkedGraph, ChunkJob
from colossalai.autochunk._loop import ChunkLoop
from colossalai.autochunk._plan import ChunkPlan
from colossalai.autochunk._symbolic import SymbolicGraph
from colossalai.autochunk._trace import CallSignature

MAX_PLANS = 64


@dataclass(frozen=True)
class ChunkedCall:
    """Conditions of the calls of a chunked model.

    Attributes:
        signature: The arguments of the trace.
        functions: Names of autograd functions without which gradients would be wrong. None: unknown.
        is_training: Whether the model was in training mode.
    """

    signature: CallSignature
    functions: tuple[str, ...] | None
    is_training: bool

    def arranged(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with all defaults, as they are traced.

        Raises:
            TypeError: The model does not take such arguments.
            ValueError: The arguments differ from those of the trace in more than the values of tensors, the
                mode of `module` (`train`, `eval`) differs, or autograd would record operations whose backward
                the trace lacks.
        """
        if module.training != self.is_training:
            traced, now = ("train", "eval") if self.is_training else ("eval", "train")
            raise ValueError(
                f"this model was chunked in the mode of {traced}() and is now in that of {now}(), which has "
                f"other dropouts and normalizations: call {traced}(), or autochunk in this mode"
            )
        if torch.is_grad_enabled() and self.functions != ():
            self._refuse_gradients(module, (args, kwargs))
        return self.signature.arranged(args, kwargs)

    def _refuse_gradients(self, module: nn.Module, arguments: Any) -> None:
        """Refuse a call that needs the backward of functions that the trace lacks."""
        tensors = [
            *module.parameters(),
            *(each for each in tree_leaves(arguments) if isinstance(each, Tensor)),
        ]
        if not any(each.requires_grad for each in tensors):
            return
        if self.functions is None:
            raise ValueError(
                "the model writes into its arguments or parameters, and its chunked form has no gradients: "
                "call it under torch.no_grad()"
            )
        raise ValueError(
            f"the model has autograd functions with a backward of their own ({', '.join(self.functions)}), "
            "which a chunked model lacks: call it under torch.no_grad(), or chunk a part without them"
        )


class ChunkedModule(fx.GraphModule):
    """A traced model whose regions of large activations run chunk by chunk; made by `autochunk`.

    Parameters and buffers are the model's own, under the same names. Calls take arguments of the traced
    shapes and dtypes; other values than tensors are those of the trace.

    Args:
        root: Module with the parameters and buffers.
        chunked: The rewritten graph, and its loops.
        plan: Its plan.
        call: Conditions of its calls.
        model: The model.
    """

    def __init__(
        self, root: nn.Module, chunked: ChunkedGraph, plan: ChunkPlan, call: ChunkedCall, model: nn.Module
    ) -> None:
        graph, loops = chunked
        _drop_values(graph)
        for name, loop in loops.items():
            root.add_module(name, loop)
        super().__init__(root, graph, class_name=f"Chunked{plan.model}")
        # `meta` is copied by deepcopy, other attributes of graph modules are not.
        self.meta |= {"plan": plan, "call": call, "not_saved": _not_saved(self, model)}
        self.train(model.training)
        _leave_out_buffers(self, self.meta["not_saved"])

    @property
    def plan(self) -> ChunkPlan:
        """The plan."""
        plan: ChunkPlan = self.meta["plan"]
        return plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result.

        Raises:
            TypeError: The model does not take such arguments.
            ValueError: The arguments differ from those of the trace in more than the values of tensors, the
                mode (`train`, `eval`) differs, or autograd would record operations whose backward the trace
                lacks.
        """
        call: ChunkedCall = self.meta["call"]
        args, kwargs = call.arranged(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "ChunkedModule":
        """Return a copy with its own parameters."""
        other: Any = super().__deepcopy__(memo)
        _leave_out_buffers(other, other.meta["not_saved"])
        return other  # type: ignore[no-any-return]

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: the arguments' structure and the plan would be lost.

        Raises:
            TypeError: `self` is pickled.
        """
        _refuse_pickle()


class DynamicChunkedModule(nn.Module):
    """A chunked model for lengths that change; made by `autochunk` with `dynamic_shapes`.

    Parameters and buffers are the model's own, under the same names. The first call with new lengths plans
    for them, within the same budget; the graphs of the 64 last used lengths are kept.

    Args:
        root: Module with the parameters and buffers.
        planned: The rewritten graph for the lengths of the example, its loops, and its plan.
        call: Conditions of its calls.
        model: The model.
        symbolic: The trace.
        inputs: Leaves of the arguments of the example.
    """

    def __init__(
        self,
        root: nn.Module,
        planned: tuple[ChunkedGraph, ChunkPlan],
        call: ChunkedCall,
        model: nn.Module,
        *,
        symbolic: SymbolicGraph,
        inputs: Sequence[Any],
    ) -> None:
        super().__init__()
        (graph, loops), self._plan = planned
        _drop_values(graph)
        _drop_values(symbolic.static)
        for name, loop in loops.items():
            root.add_module(name, loop)
        # A graph module takes the attributes that its graph reads. All plans share those of the model. Loops
        # belong to one plan, whose module has them as plain attributes.
        first = fx.GraphModule(root, graph)
        for name in loops:
            del first._modules[name]
        self._parameters, self._buffers, self._modules = first._parameters, first._buffers, first._modules
        _leave_out_buffers(self, _not_saved(self, model))
        self.train(model.training)
        self._symbolic = symbolic
        self._call = call
        self._example = _layouts(inputs)
        self._planned: OrderedDict[Any, tuple[fx.GraphModule, ChunkPlan]] = OrderedDict()
        self._planned[self._example] = (self._with_state(first, loops), self._plan)

    @property
    def plan(self) -> ChunkPlan:
        """The plan for the lengths of the example."""
        return self._plan

    def plan_for(self, *args: Any, **kwargs: Any) -> ChunkPlan:
        """Return the plan for arguments of a call, without a run.

        A later call with these lengths starts at once.

        Raises:
            TypeError: The model does not take such arguments.
            ValueError: The arguments differ from those of the trace in more than the values of tensors and
                these lengths, a length is out of its range, or no plan fits into the budget.
        """
        return self._planned_for(*self._call.signature.arranged(args, kwargs))[1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result.

        Raises:
            TypeError: The model does not take such arguments.
            ValueError: The arguments differ from those of the trace in more than the values of tensors and
                these lengths, a length is out of its range, no plan fits into the budget (the message has the
                smallest one), the mode (`train`, `eval`) differs, or autograd would record operations whose
                backward the trace lacks.
        """
        args, kwargs = self._call.arranged(self, args, kwargs)
        return self._planned_for(args, kwargs)[0](*args, **kwargs)

    def _planned_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[fx.GraphModule, ChunkPlan]:
        """Return the module and the plan for the lengths of arguments."""
        inputs = list(self._call.signature.ordered_leaves(args, kwargs).values())
        layouts = _layouts(inputs)
        if layouts not in self._planned:
            # The fake tensors of the search are not those of a run that a user's mode records.
            with _disable_current_modes(), torch.inference_mode(False):
                self._planned[layouts] = self._made_for(inputs, is_example=layouts == self._example)
            if len(self._planned) > MAX_PLANS:
                self._planned.popitem(last=False)
        self._planned.move_to_end(layouts)
        return self._planned[layouts]

    def _made_for(self, inputs: Sequence[Any], *, is_example: bool) -> tuple[fx.GraphModule, ChunkPlan]:
        """Return a new module and a plan for the lengths of arguments."""
        graph = self._symbolic.static if is_example else self._symbolic.at(inputs)
        # The example keeps its plan, which can have been changed by hand.
        job = ChunkJob(self._plan.model, self, graph, inputs, inplace=self._plan.inplace)
        made = job.apply(self._plan) if is_example else job.search(self._plan.memory_budget)
        _drop_values(graph)
        (graph, loops), plan = made
        _drop_values(graph)
        targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        attributes = {name: attrgetter(name)(self) for name in targets}
        return self._with_state(fx.GraphModule({**attributes, **loops}, graph), loops), plan

    def _with_state(self, module: fx.GraphModule, loops: Mapping[str, ChunkLoop]) -> fx.GraphModule:
        """Give a module the same dicts as here: a replaced parameter or child is replaced for all lengths."""
        module._parameters, module._buffers, module._modules = (
            self._parameters,
            self._buffers,
            self._modules,
        )
        vars(module).update(loops)  # past nn.Module, which would register them in the shared dict
        return module

    def __deepcopy__(self, memo: Any) -> "DynamicChunkedModule":
        """Return a copy with its own parameters, which plans anew."""
        # The planned modules share the dicts of parameters with `self`; copies of them would have their own.
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(deepcopy({**self.__dict__, "_planned": OrderedDict()}, memo))
        return other

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: the arguments' structure and the trace would be lost.

        Raises:
            TypeError: `self` is pickled.
        """
        _refuse_pickle()


def check_names(module: nn.Module) -> None:
    """Refuse a model whose attributes have names of those of a chunked module.

    Raises:
        ValueError: A child, parameter or buffer of the model has such a name.
    """
    attributes = [*dir(fx.GraphModule({}, fx.Graph())), *dir(ChunkedModule), *dir(DynamicChunkedModule)]
    fields = {"_symbolic", "_call", "_plan", "_example", "_planned", "self"}
    reserved = {*attributes, *fields} - {*dir(nn.Module())}
    names = [*module._modules, *module._parameters, *module._buffers]
    if taken := [name for name in names if name in reserved or re.fullmatch(r"chunk_\d+", name)]:
        raise ValueError(
            f"the model has {', '.join(taken)}, the name of an attribute of a chunked module: rename it, or "
            "chunk parts of the model"
        )


def _layouts(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return shapes and strides of arguments, on which the bytes of operations depend."""
    return tuple((each.shape, each.stride()) for each in inputs if isinstance(each, Tensor))


def _drop_values(graph: fx.Graph) -> None:
    """Drop the fake tensors of a profiled graph."""
    for node in graph.nodes:
        node.meta.pop("val", None)


def _not_saved(module: nn.Module, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the buffers that the model does not save."""
    saved = model.state_dict(keep_vars=True)
    return tuple(name for name, _ in module.named_buffers() if name not in saved)


def _leave_out_buffers(module: nn.Module, names: Sequence[str]) -> None:
    """Leave buffers out of the state dict."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._non_persistent_buffers_set.add(leaf)


def _refuse_pickle() -> NoReturn:
    raise TypeError(
        "a chunked model cannot be pickled: save its state_dict() and its plan (chunked.plan.save), and "
        "call autochunk(model, inputs, plan=ChunkPlan.load(...)), with the same dynamic_shapes"
    )
