"""Cutting of any model by the execution order of its layers, which the user gives by name.

```python
pipelinable = PipelinableContext()
with pipelinable:
    model = resnet50()
pipelinable.to_layer_list(["conv1", ..., "avgpool", (lambda x: torch.flatten(x, 1), "behind"), "fc"])
model = pipelinable.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal, Self

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from colossalai.logging import get_dist_logger
from colossalai.pipeline.stages._chunks import as_model
from colossalai.pipeline.stages._layer_list import LayerChain, LayerStep, parts_by
from colossalai.pipeline.stages._partition import Part

Entry = str | tuple[Callable[..., Any], Literal["front", "behind"]]

SPLIT_NODE = "SPLIT_NODE"
_POLICIES = ("balanced", "uniform", "customized")


@dataclass(frozen=True)
class _Order:
    """Layers in the order of execution, and the cuts of the user.

    Attributes:
        steps: The layers.
        cuts: Indices of layers, each the first one of a part.
    """

    steps: tuple[LayerStep, ...]
    cuts: tuple[int, ...]


class PipelinableContext:
    """Context that records the model built inside it, and cuts it.

    To build without memory, enter a `LazyInitContext` around it and materialize the part.

    Args:
        policy: "balanced" cuts by the parameters of the layers, "uniform" by their number, "customized" where
            the order of execution holds "SPLIT_NODE".

    Raises:
        ValueError: `policy` is unknown.
    """

    def __init__(self, policy: str = "balanced") -> None:
        if policy not in _POLICIES:
            raise ValueError(f"policy={policy!r}; it must be one of {_POLICIES}")
        self.policy = policy
        self._parents: dict[nn.Module, None] = {}
        self._children: set[nn.Module] = set()
        self._handle: RemovableHandle | None = None
        self._order: _Order | None = None

    def __enter__(self) -> Self:
        self._handle = register_module_module_registration_hook(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def layers_count(self) -> int:
        """Number of the layers that are divided among the stages.

        Raises:
            ValueError: No model or several were built in the context.
        """
        return len(self._current_order().steps)

    @property
    def funcs_count(self) -> int:
        """Number of the functions between the layers.

        Raises:
            ValueError: No model or several were built in the context.
        """
        return sum(len(step.front) + len(step.behind) for step in self._current_order().steps)

    def to_layer_list(self, exec_seq: Sequence[Entry] | None = None) -> None:
        """Set the order in which the layers of the model run.

        Args:
            exec_seq: Names of modules inside the model, and functions between them: `(function, "behind")`
                is applied to the output of the layer before it in the list, on the same stage; `(function,
                "front")` to the input of the layer after it. By default the children of the model in the
                order of registration, with stacks expanded.

        Raises:
            ValueError: No model or several were built in the context, `exec_seq` has a name that is not one
                of its modules, a function without a layer, or a layer with parameters twice.
        """
        model = self._model()
        self._order = _read(model, list(exec_seq) if exec_seq is not None else _in_registration_order(model))
        self._parents.clear()
        self._children.clear()
        covered = {id(param) for step in self._order.steps for param in step.module.parameters()}
        left_out = [name for name, param in model.named_parameters() if id(param) not in covered]
        if left_out:
            get_dist_logger().warning(f"no layer of the pipeline holds these parameters: {left_out}")

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> nn.Module:
        """Return the part of the model for a rank; parameters keep their names.

        Args:
            num_chunks: Number of chunks on each rank; several are returned as a `ChunkList`.
            pipeline_size: Number of pipeline ranks.
            rank: The pipeline rank.

        Raises:
            ValueError: The model has fewer layers than parts, or the order of execution has another number of
                parts.
        """
        if self._order is None:
            self.to_layer_list()
        assert self._order is not None, "to_layer_list has just set it"
        steps = self._order.steps
        parts = self._parts(self._order, num_chunks=num_chunks, size=pipeline_size)[rank]
        return as_model([LayerChain(steps[start:end]) for start, end in parts])

    def _current_order(self) -> _Order:
        """Return the order of execution that was set, or the default of `partition`."""
        if self._order is not None:
            return self._order
        model = self._model()
        return _read(model, _in_registration_order(model))

    def _parts(self, order: _Order, *, num_chunks: int, size: int) -> list[list[Part]]:
        if self.policy != "customized":
            modules = [step.module for step in order.steps]
            return parts_by(self.policy, modules, num_chunks=num_chunks, size=size)
        bounds = [0, *order.cuts, len(order.steps)]
        if len(bounds) - 1 != size * num_chunks:
            raise ValueError(
                f"{len(order.cuts)} {SPLIT_NODE!r} in exec_seq make {len(bounds) - 1} parts; {size} pipeline "
                f"ranks x {num_chunks} chunks need {size * num_chunks}"
            )
        parts = list(pairwise(bounds))
        return [[parts[part] for part in range(rank, len(parts), size)] for rank in range(size)]

    def _record(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Record a child of a module; torch calls this for every registration inside the context."""
        self._parents[parent] = None
        if child is not None:
            self._children.add(child)

    def _model(self) -> nn.Module:
        roots = [module for module in self._parents if module not in self._children]
        if len(roots) != 1:
            raise ValueError(
                f"{len(roots)} models were built inside the context "
                f"({[type(root).__name__ for root in roots]}): build one, with layers in it"
            )
        return roots[0]


def _read(model: nn.Module, entries: Sequence[Entry]) -> _Order:
    steps: list[LayerStep] = []
    cuts: list[int] = []
    waiting: list[Callable[..., Any]] = []
    for entry in entries:
        if entry == SPLIT_NODE:
            cuts.append(len(steps))
        elif isinstance(entry, str):
            steps.append(LayerStep(entry, _named(model, entry), tuple(waiting)))
            waiting = []
        else:
            function, place = entry
            if place not in ("front", "behind"):
                raise ValueError(f"a function is placed at {place!r}; it must be 'front' or 'behind'")
            if place == "front":
                waiting.append(function)
            elif not steps or waiting or cuts[-1:] == [len(steps)]:
                raise ValueError('a function placed "behind" follows the layer that it belongs to')
            else:
                steps[-1] = steps[-1].followed_by(function)
    if waiting or not steps:
        raise ValueError('exec_seq needs a layer, also after the last function placed "front"')
    _check_once(steps)
    return _Order(tuple(steps), tuple(cuts))


def _check_once(steps: Sequence[LayerStep]) -> None:
    names = [step.name for step in steps if next(step.module.parameters(), None) is not None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"exec_seq names {twice} twice, with parameters: a stage holds its own layers only")


def _named(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        near = get_close_matches(name, modules, n=3) or [child for child, _ in model.named_children()]
        raise ValueError(f"exec_seq names {name!r}, which is not a module of the model; there are {near}")
    return modules[name]


def _in_registration_order(module: nn.Module, prefix: str = "") -> list[Entry]:
    """Return the names of the children, with the children of a plain stack instead of the stack."""
    names: list[Entry] = []
    for name, child in module.named_children():
        is_stack = isinstance(child, nn.ModuleList) or type(child) is nn.Sequential
        names += _in_registration_order(child, f"{prefix}{name}.") if is_stack else [prefix + name]
    return names
