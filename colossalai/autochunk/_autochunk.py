"""`autochunk`: trace, profile, choice of regions, rewritten module."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from colossalai.autochunk._job import ChunkJob
from colossalai.autochunk._plan import ChunkPlan, parsed_bytes
from colossalai.autochunk._trace import CallSignature, flat_inputs, trace


class ChunkedModule(fx.GraphModule):
    """A traced model whose regions of large activations run chunk by chunk; made by `autochunk`.

    Parameters and buffers are the model's own, under the same names. Calls take arguments of the traced
    shapes and dtypes; other values than tensors are those of the trace.

    Args:
        module: Module with the parameters, buffers and loops.
        graph: The rewritten graph.
        plan: Its plan.
        signature: The arguments of the trace.
        functions: Names of autograd functions without which gradients would be wrong. None: unknown.
        model: The model.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        graph: fx.Graph,
        plan: ChunkPlan,
        signature: CallSignature,
        functions: tuple[str, ...] | None,
        model: nn.Module,
    ) -> None:
        super().__init__(module, graph, class_name=f"Chunked{plan.model}")
        saved = model.state_dict(keep_vars=True)
        # `meta` is copied by deepcopy, other attributes of graph modules are not.
        self.meta |= {
            "plan": plan,
            "signature": signature,
            "functions": functions,
            "is_training": model.training,
            "not_saved": tuple(name for name, _ in self.named_buffers() if name not in saved),
        }
        self.train(model.training)
        self._leave_out_buffers()

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
        if self.training != self.meta["is_training"]:
            traced, now = ("train", "eval") if self.meta["is_training"] else ("eval", "train")
            raise ValueError(
                f"this model was chunked in the mode of {traced}() and is now in that of {now}(), which has "
                f"other dropouts and normalizations: call {traced}(), or autochunk in this mode"
            )
        if torch.is_grad_enabled() and self.meta["functions"] != ():
            self._refuse_gradients((args, kwargs))
        signature: CallSignature = self.meta["signature"]
        args, kwargs = signature.arranged(args, kwargs)
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "ChunkedModule":
        """Return a copy with its own parameters."""
        other: Any = super().__deepcopy__(memo)
        other._leave_out_buffers()
        return other  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        """Refuse to be pickled: the arguments' structure and the plan would be lost.

        Raises:
            TypeError: `self` is pickled.
        """
        raise TypeError(
            "a chunked model cannot be pickled: save its state_dict() and its plan (chunked.plan.save), and "
            "call autochunk(model, inputs, plan=ChunkPlan.load(...))"
        )

    def _leave_out_buffers(self) -> None:
        """Leave the buffers that the model does not save out of the state dict."""
        for name in self.meta["not_saved"]:
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner)._non_persistent_buffers_set.add(leaf)

    def _refuse_gradients(self, arguments: Any) -> None:
        """Refuse a call that needs the backward of functions that the trace lacks."""
        tensors = [*self.parameters(), *(each for each in tree_leaves(arguments) if isinstance(each, Tensor))]
        if not any(each.requires_grad for each in tensors):
            return
        functions: tuple[str, ...] | None = self.meta["functions"]
        if functions is None:
            raise ValueError(
                "the model writes into its arguments or parameters, and its chunked form has no gradients: "
                "call it under torch.no_grad()"
            )
        raise ValueError(
            f"the model has autograd functions with a backward of their own ({', '.join(functions)}), which "
            "a chunked model lacks: call it under torch.no_grad(), or chunk a part without them"
        )


def autochunk(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    memory_budget: int | float | str | None = None,
    *,
    memory_ratio: float | None = None,
    plan: ChunkPlan | None = None,
    inplace: bool = False,
) -> ChunkedModule:
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

    Raises:
        ValueError: The model cannot be traced, no plan fits into the budget (the message has the smallest
            one), `plan` belongs to another model or other shapes, or an argument is wrong.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"autochunk takes an eager torch.nn.Module, not {model!r:.80}")
    if isinstance(model, ChunkedModule):
        raise ValueError("the model is the result of autochunk already: pass the original model")
    if sum(each is not None for each in (memory_budget, memory_ratio, plan)) != 1:
        raise ValueError("autochunk takes exactly one of memory_budget, memory_ratio and plan")
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace={inplace!r:.80} must be True or False")
    if plan is not None:
        _check_plan(plan, inplace=inplace)
    if memory_ratio is not None and not _is_fraction(memory_ratio):
        raise ValueError(f"memory_ratio={memory_ratio!r} must be above 0 and at most 1")
    budget = None if memory_budget is None else parsed_bytes(memory_budget)
    signature = CallSignature.of(model, *_arguments(example_inputs))
    args, kwargs = signature.arranged(*_arguments(example_inputs))
    traced = trace(model, args, kwargs)
    inplace = inplace if plan is None else plan.inplace
    job = ChunkJob(type(model).__name__, traced.module, flat_inputs(args, kwargs), inplace=inplace)
    if plan is not None:
        chunked, made = job.apply(plan)
    else:
        chunked, made = job.search(budget or max(1, int(job.unchunked_peak * (memory_ratio or 1))))
    graph, loops = chunked
    for node in graph.nodes:
        node.meta.pop("val", None)  # fake tensors
    for name, loop in loops.items():
        traced.module.add_module(name, loop)
    return ChunkedModule(traced.module, graph, made, signature, traced.functions, model)


def _check_plan(plan: Any, *, inplace: bool) -> None:
    """Raise an error for a plan that is not one, or that has no outputs in place although they are wanted.

    Raises:
        ValueError: `plan` is not a plan, or `inplace` is True and the plan's is not.
    """
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
