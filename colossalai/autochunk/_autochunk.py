"""`autochunk`: trace, profile, choice of regions, rewritten module."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from colossalai.autochunk._flow import MOST_OPERATIONS, follow
from colossalai.autochunk._loop import ChunkLoop
from colossalai.autochunk._plan import ChunkPlan, ChunkRegion, common_module, digest_of, parsed_bytes
from colossalai.autochunk._profile import GraphProfile, GraphProfiler
from colossalai.autochunk._rewrite import GraphRewriter, loop_name
from colossalai.autochunk._rules import has_effects, shape_of
from colossalai.autochunk._search import RegionChoice, RegionSearch
from colossalai.autochunk._trace import CallSignature, flat_inputs, module_of, trace
from colossalai.runtime.memory import bytes_text

_MOST_REPEATS = 20

_Chunked = tuple[fx.Graph, Mapping[str, ChunkLoop]]
"""A rewritten graph and its loops."""


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
        plan: A plan of the same model and shapes, instead of a budget.

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
    if plan is not None and not isinstance(plan, ChunkPlan):
        raise ValueError(f"plan={plan!r:.80} is not a ChunkPlan: read a file with ChunkPlan.load")
    if memory_ratio is not None and not _is_fraction(memory_ratio):
        raise ValueError(f"memory_ratio={memory_ratio!r} must be above 0 and at most 1")
    budget = None if memory_budget is None else parsed_bytes(memory_budget)
    signature = CallSignature.of(model, *_arguments(example_inputs))
    args, kwargs = signature.arranged(*_arguments(example_inputs))
    traced = trace(model, args, kwargs)
    job = _Job(type(model).__name__, traced.module, flat_inputs(args, kwargs))
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


class _Job:
    """The model of one call of `autochunk`.

    Args:
        model: Name of its class.
        traced: Its trace.
        inputs: Flat arguments of the trace.
    """

    def __init__(self, model: str, traced: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._model = model
        self._profiler = GraphProfiler(traced, inputs)
        self._profile = self._profiler.profile(traced.graph)
        self._rewriter = GraphRewriter(traced.graph, self._profile)
        self._digest = digest_of(traced.graph)

    @property
    def unchunked_peak(self) -> int:
        """Peak without chunks."""
        return self._profile.peak

    def search(self, budget: int) -> tuple[_Chunked, ChunkPlan]:
        """Return the chunked model of the least estimated time within a budget.

        Raises:
            ValueError: No plan fits into `budget`.
        """
        search = RegionSearch(self._profile)
        for _ in range(_MOST_REPEATS):
            fastest = search.fastest(budget)
            if fastest is None:
                break
            chunked, result = self._rewrite(fastest)
            if result.peak <= budget:
                return chunked, self._plan(fastest, result, budget)
            _correct(search, fastest, result, budget)
        # The excess was measured for larger chunks than those of one element.
        smallest, regions, chunked, result = self._smallest()
        if result.peak <= budget:
            return chunked, self._plan(regions, result, budget)
        raise self._refusal(budget, smallest, result)

    def apply(self, plan: ChunkPlan) -> tuple[_Chunked, ChunkPlan]:
        """Return the chunked model of a plan.

        Raises:
            ValueError: The plan belongs to another trace.
        """
        if plan.digest != self._digest:
            raise ValueError(
                f"the plan is of a {plan.model} with other operations or shapes than this {self._model}: "
                "call autochunk with a budget"
            )
        regions = [self._choice_of(each, f"region {number}") for number, each in enumerate(plan.regions)]
        for number, (one, other) in enumerate(pairwise(regions)):
            if other.first <= one.last:
                raise ValueError(f"regions {number} and {number + 1} of the plan overlap or are out of order")
        chunked, result = self._rewrite(regions)
        if result.peak > plan.memory_budget:
            raise ValueError(
                f"the plan has a peak of {bytes_text(result.peak)}, more than its budget of "
                f"{bytes_text(plan.memory_budget)}: make the chunks smaller again, or plan anew"
            )
        peaks = _peaks(result, len(regions))
        updated = tuple(replace(each, peak=peak) for each, peak in zip(plan.regions, peaks, strict=True))
        return chunked, replace(plan, peak=result.peak, regions=updated)

    def _choice_of(self, region: ChunkRegion, name: str) -> RegionChoice:
        """Return the positions of a region of a plan.

        Raises:
            ValueError: The trace has no such region, as after a change by hand.
        """
        positions = {node.name: position for node, position in self._profile.positions.items()}
        if unknown := [each for each in (region.first, region.last, *region.dims) if each not in positions]:
            raise ValueError(
                f"{name} of the plan names {unknown[0]!r}, which is not an operation of the model"
            )
        first, last = positions[region.first], positions[region.last]
        nodes = self._profile.nodes[first : last + 1]
        fixed = [
            each
            for each in nodes
            if has_effects(each) and positions[each.name] not in self._profile.own_writes
        ]
        if not nodes or last - first >= MOST_OPERATIONS or fixed:
            raise ValueError(
                f"{name} of the plan, {region.first} to {region.last}, is not a range of at most "
                f"{MOST_OPERATIONS} operations without random numbers, collectives and changed arguments"
            )
        choices = {positions[each]: dim for each, dim in region.dims.items()}
        for position, dim in choices.items():
            shape = shape_of(self._profile.nodes[position])
            is_known = first <= position <= last and 0 <= dim < len(shape)
            if not (is_known and shape[dim] == region.extent and 1 <= region.size <= region.extent):
                raise ValueError(
                    f"{name} of the plan cuts {self._profile.nodes[position].name} of shape {shape} along "
                    f"dimension {dim} in chunks of {region.size} of {region.extent}: it must be in the "
                    "region, and the extent one of its shape"
                )
        walk = follow(self._profile, first, last, choices) if last in choices else None
        if walk is None or last not in walk.cuts or not (walk.is_valid and walk.is_complete):
            raise ValueError(f"{name} of the plan cannot be cut along that dimension of {region.last}")
        return RegionChoice(first, last, choices, region.size)

    def _rewrite(self, regions: Sequence[RegionChoice]) -> tuple[_Chunked, GraphProfile]:
        graph, loops = self._rewriter.rewrite(regions)
        return (graph, loops), self._profiler.profile(graph, loops)

    def _plan(self, regions: Sequence[RegionChoice], result: GraphProfile, budget: int) -> ChunkPlan:
        base = sum(self._profile.seconds)
        peaks = _peaks(result, len(regions))
        return ChunkPlan(
            model=self._model,
            digest=self._digest,
            memory_budget=budget,
            peak=result.peak,
            unchunked_peak=self._profile.peak,
            slowdown=round(1 + sum(each.seconds for each in regions) / max(base, 1e-9), 4),
            regions=tuple(self._region(each, peak) for each, peak in zip(regions, peaks, strict=True)),
        )

    def _region(self, region: RegionChoice, peak: int) -> ChunkRegion:
        nodes = self._profile.nodes[region.first : region.last + 1]
        last = self._profile.nodes[region.last]
        return ChunkRegion(
            module=common_module([module_of(each) for each in nodes]),
            first=nodes[0].name,
            last=last.name,
            dims={self._profile.nodes[each].name: dim for each, dim in sorted(region.choices.items())},
            extent=int(last.meta["val"].shape[region.choices[region.last]]),
            size=region.size,
            peak=peak,
            unchunked_peak=int(self._profile.live[region.first : region.last + 1].max()),
        )

    def _smallest(self) -> tuple[int, Sequence[RegionChoice], _Chunked, GraphProfile]:
        """Return the smallest possible budget, with regions, graph and profile."""
        search = RegionSearch(self._profile)
        found: list[tuple[int, Sequence[RegionChoice], _Chunked, GraphProfile]] = []
        for _ in range(_MOST_REPEATS):
            regions, estimate = search.smallest()
            if found and estimate >= min(each[0] for each in found):
                break
            chunked, result = self._rewrite(regions)
            found.append((max(estimate, result.peak), regions, chunked, result))
            _correct(search, regions, result, estimate)
        return min(found, key=lambda each: each[0])

    def _refusal(self, budget: int, smallest: int, result: GraphProfile) -> ValueError:
        """Return the error for a budget that no plan keeps.

        Args:
            budget: The budget.
            smallest: The smallest possible one.
            result: The profile of its plan.
        """
        largest = result.largest_at(int(result.live.argmax()))
        named = largest.node
        if named.op == "call_module":  # the output of a loop has the name of the operation
            named = max(named.users, key=lambda each: each.meta["val"].nbytes)
        value = named.meta["val"]
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        module = module_of(named)
        where = f" in {module}" if module else ""
        return ValueError(
            f"no plan for {self._model} fits into {bytes_text(budget)} ({budget} bytes): the smallest "
            f"possible budget is {bytes_text(smallest)} ({smallest} bytes), and without chunks the peak is "
            f"{bytes_text(self._profile.peak)}; the largest tensor there is {named.name}{shape}"
            f"{where}, {bytes_text(largest.size)}"
        )


def _peaks(result: GraphProfile, num_regions: int) -> list[int]:
    """Return the live bytes during each region of a rewritten graph."""
    targets = {str(node.target): at for at, node in enumerate(result.nodes) if node.op == "call_module"}
    return [int(result.live[targets[loop_name(number)]]) for number in range(num_regions)]


def _correct(
    search: RegionSearch, regions: Sequence[RegionChoice], result: GraphProfile, budget: int
) -> None:
    """Correct the estimates of the regions that are beyond the budget."""
    names = {loop_name(number): region for number, region in enumerate(regions)}
    corrected: set[Any] = set()  # repeated blocks have one estimate
    hoisted = 0  # bytes beyond the budget during the operations that run before the next loop
    for node, live in zip(result.nodes, result.live, strict=True):
        region = names.get(str(node.target)) if node.op == "call_module" else None
        if region is None:
            hoisted = max(hoisted, int(live) - budget)
            continue
        missing = int(live) - region.estimate if live > budget else 0
        if max(missing, hoisted) > 0 and region.key not in corrected:
            corrected.add(region.key)
            search.correct(region, max(missing, hoisted))
        hoisted = 0
    if hoisted > 0 and regions[-1].key not in corrected:
        search.correct(regions[-1], hoisted)
