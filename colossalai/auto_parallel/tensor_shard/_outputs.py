"""Outputs of the whole batch from the outputs of its parts.

[Note: outputs of parts]
A model is traced with the whole batch and with a rank's part. Dimensions that differ count samples, and so do
numbers that differ in that ratio. A tensor with such a dimension holds "samples". Without one it is the same
on all ranks ("same"), or reduces samples: by a mean ("mean") or a sum ("sum"). A linear function of a mean or
a sum is again a mean or a sum; a sum divided by the number of samples is a mean. The rest (a maximum, the
root of a mean, a mean over the samples selected by a mask) cannot be computed from the values of the parts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.auto_parallel.trace._trace import InputSlot, ModelTrace, Operation

_ADVICE = (
    "let the model return tensors with the samples in dimension 0, or a mean or a sum over all samples, or "
    "take dataloader_option='distributed', by which outputs are those of a rank's part"
)
_OTHER = "other"
_VIEWS = frozenset(
    ("alias", "detach", "expand", "flatten", "permute", "reshape", "select", "slice", "split", "squeeze")
)
_MORE_VIEWS = frozenset(("t", "transpose", "unbind", "unsafe_split", "unsqueeze", "view", "_unsafe_view"))
_COPIES = frozenset(("clone", "contiguous", "lift_fresh", "lift_fresh_copy", "to", "_to_copy"))
_MOVES = _VIEWS | _MORE_VIEWS | _COPIES
"""Operations whose results consist of the elements of their operand."""
_JOINS = frozenset(("cat", "stack"))
_LINEAR = _MOVES | _JOINS | {"mean", "neg", "sum"}
_PADS = frozenset(("constant_pad_nd", "pad"))
_MEAN, _SUM = 1, 2  # `reduction` of losses in ATen
_LOSSES = frozenset(("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"))
_OF_LABELS = frozenset(("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_forward", "nll_loss_nd"))
"""Losses whose mean divides by the number of labels that are not ignored, or by their weights."""
_IGNORED = -100  # the default of torch


@dataclass(frozen=True)
class WholeOutputs:
    """Kinds of the outputs of a model whose batch is shared by ranks.

    Attributes:
        kinds: Kind of each output tensor: "samples", "mean", "sum" or "same".
        is_number: For each of them, whether it has no dimensions.
        ignored: Label ignored by a mean of cross entropies, by the name of the argument with labels.
    """

    kinds: tuple[str, ...]
    is_number: tuple[bool, ...]
    ignored: Mapping[str, int]

    def as_list(self) -> list[Any]:
        """Return plain values, for `from_list`."""
        return [list(self.kinds), list(self.is_number), dict(self.ignored)]

    @staticmethod
    def from_list(values: Sequence[Any]) -> "WholeOutputs":
        """Return the object of the values of `as_list`."""
        kinds, is_number, ignored = values
        return WholeOutputs(tuple(kinds), tuple(is_number), ignored)


def whole_outputs(whole: ModelTrace, part: ModelTrace, num_parts: int) -> WholeOutputs:
    """Return the kinds of the outputs, from which the outputs of the whole batch follow.

    Args:
        whole: The trace with the whole batch.
        part: The trace with a part of it.
        num_parts: Number of parts.

    Raises:
        ValueError: An output of the whole batch cannot be computed from those of the parts.
    """
    reader = _Reader(whole, part, num_parts)
    kinds = tuple(map(reader.kind_of_output, range(len(whole.outputs))))
    ignored = dict(
        pair for name in whole.outputs for pair in reader.ignored_labels(name) if reader.kinds[name] == "mean"
    )
    return WholeOutputs(kinds, tuple(not whole.tensors[name].shape for name in whole.outputs), ignored)


class _Reader:
    """Finds the kind of every tensor, see [Note: outputs of parts].

    Attributes:
        kinds: Kinds by the names of tensors.
    """

    def __init__(self, whole: ModelTrace, part: ModelTrace, num_parts: int) -> None:
        shapes = [[(each.target, len(each.outputs)) for each in trace.operations] for trace in (whole, part)]
        if shapes[0] != shapes[1] or len(whole.tensors) != len(part.tensors):
            raise ValueError(
                "the model computes other operations on a part of the batch than on the whole, so that its "
                f"outputs cannot be put together: {_ADVICE}"
            )
        self.kinds: dict[str, str] = {}
        self._whole, self._part, self._num_parts = whole, part, num_parts
        self._names = dict(zip(whole.tensors, part.tensors, strict=True))
        self._reasons: dict[str, Operation] = {}
        self._on_storage: defaultdict[str, list[str]] = defaultdict(list)
        for name in whole.outside:
            self._set(name, "samples" if self._is_scaled(name) else "same")
        for operation, other in zip(whole.operations, part.operations, strict=True):
            self._add(operation, other)

    def kind_of_output(self, index: int) -> str:
        """Return the kind of an output.

        Raises:
            ValueError: The output of the whole batch cannot be computed from those of the parts.
        """
        name = self._whole.outputs[index]
        shape, kind = self._whole.tensors[name].shape, self.kinds[name]
        if kind == "samples":
            others = self._part.tensors[self._names[name]].shape
            if shape[0] == self._num_parts * others[0] and shape[1:] == others[1:]:
                return kind
            raise ValueError(
                f"output {index} of the model, of shape {shape}, does not have the samples in dimension 0: "
                f"{_ADVICE}"
            )
        if kind == _OTHER:
            operation = self._reasons[name]
            raise ValueError(
                f"output {index} of the model, of shape {shape}, is not a mean or a sum over samples, "
                f"because of {operation.target} of {operation.module or 'the model itself'}: the output of "
                f"the whole batch cannot be computed from those of {self._num_parts} parts. "
                f"{_ADVICE.capitalize()}"
            )
        return kind

    def ignored_labels(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the arguments with labels of the means in a tensor, with their ignored label."""
        pending, seen = [name], set[str]()
        while pending:
            operation = self._whole.producers.get(pending.pop())
            if operation is None or operation.name in seen:
                continue
            seen.add(operation.name)
            if _base(operation) in _OF_LABELS:
                source = self._labels(operation)
                if source in self._whole.inputs:
                    yield source, int(operation.argument("ignore_index", _IGNORED))
            elif self.kinds[operation.name] != "samples":
                pending += operation.inputs

    def _add(self, operation: Operation, other: Operation) -> None:
        """Find the kinds of the outputs of an operation; `other` is the same operation on a part."""
        kinds = [self._kind(operation, other, self._is_scaled(name)) for name in operation.outputs]
        cause = next((self._reasons[name] for name in operation.inputs if name in self._reasons), operation)
        for name, kind in zip(operation.outputs, kinds, strict=True):
            self._set(name, kind)
            changed = [name]
            if operation.target.split(".")[1].endswith("_"):  # in place: the views of it are changed, too
                changed = self._on_storage[self._whole.storage_of(name)]
                self.kinds |= dict.fromkeys(changed, kind)
            if kind == _OTHER:
                self._reasons |= dict.fromkeys(changed, cause)

    def _set(self, name: str, kind: str) -> None:
        self.kinds[name] = kind
        self._on_storage[self._whole.storage_of(name)].append(name)

    def _kind(self, operation: Operation, other: Operation, is_scaled: bool) -> str:
        kinds = {self.kinds[name] for name in operation.inputs}
        if _OTHER in kinds:
            return _OTHER
        if is_scaled:
            return "samples" if kinds <= {"same", "samples"} else _OTHER
        if kinds <= {"same"}:
            return "same" if operation.scalars == other.scalars else _OTHER
        if "samples" in kinds:
            return self._reduced(operation) if kinds <= {"same", "samples"} else _OTHER
        kinds -= {"same"}
        return self._combined(operation, other, kinds.pop()) if len(kinds) == 1 else _OTHER

    def _reduced(self, operation: Operation) -> str:
        """Return the kind of the result of an operation on samples."""
        base = _base(operation)
        if base in ("mean", "sum"):
            return base
        if base not in _LOSSES | _OF_LABELS and not base.endswith("_loss"):
            return _OTHER
        reduction = operation.argument("reduction", _MEAN)
        if reduction != _MEAN:
            return "sum" if reduction == _SUM else _OTHER
        if base in _OF_LABELS and (operation.argument("weight") is not None or not self._labels(operation)):
            return _OTHER
        return "mean"

    def _combined(self, operation: Operation, other: Operation, kind: str) -> str:
        """Return the kind of the result of an operation on means or sums, and values equal on all ranks."""
        base, slots = _base(operation), list(_slots([value for _, value in operation.arguments]))
        varying = [each for each in slots if self.kinds[operation.inputs[each]] == kind]
        ratio = _ratio(operation.scalars, other.scalars)
        if base in ("mul", "div"):
            if len(varying) > 1 or (base == "div" and varying != slots[:1]):
                return _OTHER
            if ratio == 1:
                return kind
            changed = {("sum", "div"): "mean", ("mean", "mul"): "sum"}.get((kind, base), _OTHER)
            return changed if ratio == self._num_parts else _OTHER
        if ratio != 1:
            return _OTHER
        if base in ("add", "sub", "rsub") or base in _JOINS:
            # A term that is the same on all ranks would be added once by each of them.
            is_alone = len(varying) == len(slots) and (len(slots) > 1 or base in _JOINS)
            return kind if kind == "mean" or is_alone else _OTHER
        return kind if base in _LINEAR else _OTHER

    def _labels(self, operation: Operation) -> str | None:
        """Return the argument of the model with the labels of a loss. None: they are computed.

        For probabilities instead of labels, return the tensor itself.
        """
        slot = operation.argument("target")
        assert isinstance(slot, InputSlot), "a loss of labels has them"
        name = operation.inputs[slot.index]
        if self._whole.tensors[name].dtype.is_floating_point:  # probabilities, none of which is ignored
            return name
        while (made_by := self._whole.producers.get(name)) is not None:
            if _base(made_by) not in _MOVES | _PADS:
                return None
            name = made_by.inputs[0]
        return name if name in self._whole.inputs else None

    def _is_scaled(self, name: str) -> bool:
        return self._whole.tensors[name].shape != self._part.tensors[self._names[name]].shape


def _base(operation: Operation) -> str:
    """Return the name of an operator without package, overload and the mark of in-place operations."""
    return operation.target.split(".")[1].removesuffix("_")


def _slots(values: Iterable[Any]) -> Iterator[int]:
    """Yield the indices of the inputs of an operation among its arguments, in order."""
    for value in values:
        if isinstance(value, InputSlot):
            yield value.index
        elif isinstance(value, tuple):
            yield from _slots(value)


def _ratio(whole: Sequence[Any], part: Sequence[Any]) -> float:
    """Return the ratio of the numbers of an operation on the whole and on a part; 0: no common ratio."""
    ratios = {
        first / second if isinstance(first, int | float) and isinstance(second, int | float) and second else 0
        for first, second in zip(whole, part, strict=True)
        if first != second
    }
    return ratios.pop() if len(ratios) == 1 else float(not ratios)
