"""Records of the cuts of activations, which layers leave on their outputs and read from their inputs.

[Note: records of activations]
A layer records the cut of its output on it.

- An output with a graph carries the record in the `metadata` of its node, which torch has for such notes.
  A layer finds the nearest records from its input through the graph, a few nodes away. A collective ends the
  search, and so does `detach`: code that moves slices itself, or detaches the graph, calls `mark_cut`.
- An output without a graph (`no_grad`, frozen layers) carries it as a `RecordedTensor`, a subclass that
  passes it on to the results of operations, until the next layer removes it.

The shapes of slices reveal a wrong cut in all modes but "3d", where both cuts have slices of one shape. So
only there records are compared, and subclasses made; in the others dropouts read from them which ranks draw
the same. An activation without a record is, in 3d, assumed to be the input of a model. It takes no
communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.nn.layer.tensor_parallel._scheme import LINEAR_SCHEMES, Cut, first_cut

_KEY = "colossalai.cut"
_MOVERS = "colossalai.communication"
_WITHOUT_VALUES = {
    *(Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.rand_like, torch.randn_like),
}
"""Operations that take nothing of a tensor but its type."""


@dataclass(frozen=True, slots=True)
class Record:
    """Cut of an activation, and the layer that recorded it."""

    layer: str
    cut: Cut


def _look_alike(mode: str | None) -> bool:
    """Whether slices of differently cut activations of a mode can have the same shape."""
    first = first_cut(mode)
    others = [scheme.x for scheme in LINEAR_SCHEMES[mode] if scheme.x != first]
    return any(bool(other.features) == bool(first.features) for other in others)


ALIKE = frozenset(mode for mode in LINEAR_SCHEMES if _look_alike(mode))
"""The modes in which the shape of a slice does not determine the cut of the activation."""

_PLAIN = frozenset(mode for mode, schemes in LINEAR_SCHEMES.items() if schemes == LINEAR_SCHEMES[None])


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """Expected cut of the input of a layer.

    Attributes:
        cut: The cut.
        behind: The layer built before, if the order of construction decides; None if the user gave the cut.
    """

    cut: Cut
    behind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Cuts of the activation before and behind a layer.

    Attributes:
        mode: The tensor mode.
        layer: The layer, for messages.
        entry: Cut of its input, and its origin.
        output_cut: Cut of its output.
        compares: Whether the records of an input are compared with `entry`: its shape does not show the cut.
        record: The record on an output; None in a mode in which nothing is cut.
    """

    mode: str | None
    layer: str
    entry: RecordEntry
    output_cut: Cut
    compares: bool = field(init=False)
    record: Record | None = field(init=False)

    def __post_init__(self) -> None:
        """Derive the rest."""
        object.__setattr__(self, "compares", self.mode in ALIKE)
        record = None if self.mode in _PLAIN else Record(self.layer, self.output_cut)
        object.__setattr__(self, "record", record)

    def enter(self, x: Tensor) -> Tensor:
        """Return an input, a plain tensor again, if it is cut as the layer was built for.

        A layer needs to call this where the mode `compares`, or where `x` is a `RecordedTensor`.

        Raises:
            ValueError: `x` is cut otherwise; the message names the layers.
        """
        if torch.compiler.is_compiling():
            return x
        if not self.compares:
            return _plain(x)
        wanted, found = self.entry.cut, _records_of(x)
        for record in found:
            if not _may_become(record.cut, wanted):
                self._refuse(f"comes from {record.layer}, cut as {record.cut}")
        is_by_order = self.entry.behind is not None
        if not found and is_by_order and wanted != first_cut(self.mode) and _has_values(x):
            self._refuse("comes from no layer, as the input of a model does (mark_cut says otherwise)")
        return _plain(x)

    def leave(self, y: Tensor) -> Tensor:
        """Return an output with a record of how it is cut."""
        if self.record is None or torch.compiler.is_compiling():
            return y
        node: Any = y.grad_fn  # torch's stubs declare its `metadata` as a method
        if node is not None:
            node.metadata[_KEY] = self.record
            return y
        return _recorded(y, (self.record,)) if self.compares and _has_values(y) else y

    def hint(self) -> str:
        """Return the hint in a message about an input of a wrong shape."""
        return "" if self.entry.behind is None else f"; it was built behind {self.entry.behind}: {REMEDY}"

    def _refuse(self, what: str) -> None:
        why = "" if self.entry.behind is None else f", as it was built behind {self.entry.behind}"
        raise ValueError(
            f"{self.layer} takes an input cut as {self.entry.cut}{why}, but its input {what}: {REMEDY}"
        )


REMEDY = (
    "a layer is taken to be applied to the one built before it, unless it is told: build it with "
    "after=that_layer, or with input_cut=other.input_cut if it takes the same input as another one"
)


def mark_cut(y: Tensor, cut: Cut) -> Tensor:
    """Record the cut of an activation whose slices were moved by other means than layers of `colossalai.nn`.

    Args:
        y: The activation, a slice.
        cut: Its cut.

    Returns:
        The activation, to be used instead.

    Raises:
        ValueError: The axes of `cut` are not those of one tensor mode.
    """
    own = y.view_as(y)  # the node of `y` may have a record of its own
    marked = Passage(mode=_mode_of(cut), layer="mark_cut", entry=RecordEntry(cut=cut), output_cut=cut)
    return marked.leave(_plain(own))


def _mode_of(cut: Cut) -> str | None:
    """Return a mode that has the axes of a cut; for a whole activation one in which records are compared."""
    axes = {*cut.batch, *cut.features}
    for mode in sorted(LINEAR_SCHEMES, key=lambda mode: mode not in ALIKE):
        if axes <= {*LINEAR_SCHEMES[mode][-1].x.batch, *LINEAR_SCHEMES[mode][-1].x.features}:
            return mode
    raise ValueError(f"mark_cut got {cut}, whose axes are those of no tensor mode")


def require_cut(x: Tensor, cut: Cut, *, by: str) -> Tensor:
    """Return an activation, a plain tensor again, if it has no record of another cut.

    Raises:
        ValueError: `x` has a record of another cut; the message names the layer and `by`.
    """
    if torch.compiler.is_compiling():
        return x
    for record in _records_of(x):
        if not _may_become(record.cut, cut):
            raise ValueError(
                f"{by} takes an input cut as {cut}, and got the output of {record.layer}, cut as "
                f"{record.cut}: build it right after that layer, or pass cut=layer.output_cut"
            )
    return _plain(x)


def recorded_cut(x: Tensor) -> Cut | None:
    """Return how an activation is cut, if there is a record: the finest one of those that it comes from."""
    if torch.compiler.is_compiling():
        return None
    finest = None
    for record in _records_of(x):
        if finest is None or len(record.cut.batch + record.cut.features) > len(
            finest.batch + finest.features
        ):
            finest = record.cut
    return finest


class RecordedTensor(Tensor):
    """An activation without a graph that carries records; see [Note: records of activations]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and pass the records on to its results."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _WITHOUT_VALUES or not isinstance(result, Tensor | tuple | list):
            return result
        carriers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RecordedTensor)]
        records = tuple(dict.fromkeys(record for carrier in carriers for record in _records_of(carrier)))
        return tree_map_only(Tensor, lambda made: _handed_on(made, records), result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)


def _handed_on(made: Tensor, records: tuple[Record, ...]) -> Tensor:
    return _recorded(made, records) if type(made) is Tensor else made


def _recorded(y: Tensor, records: tuple[Record, ...]) -> Tensor:
    carrier = y.as_subclass(RecordedTensor)
    carrier.__dict__["records"] = records
    return carrier


def _plain(x: Tensor) -> Tensor:
    if not isinstance(x, RecordedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _records_of(x: Tensor) -> Sequence[Record]:
    """Return the records of an activation: those that are reached from its node before any other record."""
    if isinstance(x, RecordedTensor):
        records: tuple[Record, ...] = x.__dict__["records"]
        return records
    found: list[Record] = []
    waiting: list[Any] = [x.grad_fn]
    seen: set[Any] = {None}
    for node in waiting:  # it grows: breadth first, as the nearest records are a few nodes away
        if node in seen:
            continue
        seen.add(node)
        record = node.metadata.get(_KEY)
        if record is not None:
            found.append(record)
        elif not getattr(type(node), "_forward_cls", object).__module__.startswith(_MOVERS):
            for following, _ in node.next_functions:
                waiting.append(following)
    return found


def _may_become(cut: Cut, wanted: Cut) -> bool:
    """Whether it can be cut as wanted without communication, as a whole activation can."""
    return cut.batch in ((), wanted.batch) and cut.features in ((), wanted.features)


def _has_values(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta
