"""Microbatches: a batch cut along the dimension of its samples, which `batch_dim` names for each tensor.

`merge_outputs` puts the outputs of microbatches together again.

A batch is a tensor, or tuples, lists, dicts and dataclasses of tensors and other things. Without `batch_dim`
every tensor with dimensions is cut along dim 0; see [Note: ambiguous guesses].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

import torch

from colossalai.tensor import Node, nodes_of, parts_of, rebuilt, with_leaves

BatchDim = int | Mapping[str, int | None]
OUTPUT = "output"
"""The name in `batch_dim` of the model's output."""
_ROOT = "batch"
_EQUAL_CONSTANTS = (bool, int, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class BatchTensor:
    """A tensor of a batch, and its dimension of samples.

    Attributes:
        place: Its path in the batch, as `batch_dim` can name it.
        name: The innermost key or field on that path, the path itself if there is none.
        tensor: The tensor.
        dim: The dimension of the samples; None: every microbatch gets the whole tensor.
        is_guess: Whether `batch_dim` does not name it.
    """

    place: str
    name: str
    tensor: torch.Tensor
    dim: int | None
    is_guess: bool


@dataclass(frozen=True, eq=False)
class Microbatches:
    """A batch in parts.

    Attributes:
        parts: The microbatches.
        sizes: The number of samples of each.
        tensors: The tensors of the whole batch, in order.
    """

    parts: list[Any]
    sizes: list[int]
    tensors: list[BatchTensor]


def check_batch_dim(batch_dim: BatchDim | None) -> None:
    """Check the values of an argument `batch_dim`; its names are compared with each batch.

    Raises:
        ValueError: `batch_dim` is neither a dimension, counted from the front, nor a mapping to such.
    """
    named = isinstance(batch_dim, Mapping)
    for name, dim in batch_dim.items() if isinstance(batch_dim, Mapping) else [("", batch_dim)]:
        is_dim = isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0
        if not isinstance(name, str) or not (is_dim or (dim is None and name != OUTPUT)):
            where = f"batch_dim[{name!r}]" if named else "batch_dim"
            raise ValueError(
                f"{where} is {dim!r}; batch_dim is the dimension of the samples, at least 0, or a mapping "
                "from names of inputs to it, with None for an input that every microbatch gets whole"
            )


def output_dim_of(batch_dim: BatchDim | None, *, is_needed: bool) -> int:
    """Return the dimension of the samples in the model's output.

    Args:
        batch_dim: The argument.
        is_needed: Whether outputs will be put together.

    Raises:
        ValueError: `batch_dim` cuts inputs along another dimension than 0, outputs are needed, and it has no
            entry for them.
    """
    if not isinstance(batch_dim, Mapping):
        return batch_dim or 0
    if is_needed and OUTPUT not in batch_dim and any(batch_dim.values()):
        raise ValueError(
            f"batch_dim is {dict(batch_dim)}, and outputs of microbatches are to be put together: name the "
            f"dimension of their samples, too, with an entry {OUTPUT!r}; or turn outputs off "
            "(return_output_label=False, return_outputs=False)"
        )
    return batch_dim.get(OUTPUT) or 0


def num_samples_in(batch: Any, batch_dim: BatchDim | None = None) -> int:
    """Return the number of samples of a batch.

    Raises:
        ValueError: `batch` has no tensor that can be cut, its tensors differ in their number of samples, or
            `batch_dim` does not fit it.
    """
    return _num_samples(batch, _tensors_in(nodes_of(batch), batch_dim))


def split_batch(batch: Any, num_microbatches: int, batch_dim: BatchDim | None = None) -> list[Any]:
    """Cut a batch into microbatches of equal size; the last one may be smaller.

    Args:
        batch: A tensor, or nested tuples, lists and dicts; other objects, and tensors without dimensions, go
            to every microbatch.
        num_microbatches: The most parts; they have ceil(samples / num_microbatches) samples.
        batch_dim: The dimension of the samples, or a mapping; see `PipelineOptions`.

    Returns:
        The microbatches; fewer than `num_microbatches` if fewer hold all samples.

    Raises:
        ValueError: `num_microbatches` is below 1 or exceeds the samples of `batch`, its tensors differ in
            their number of samples, or `batch_dim` does not fit it.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    num_samples = num_samples_in(batch, batch_dim)
    if num_samples < num_microbatches:
        raise ValueError(
            f"a batch of {num_samples} samples cannot be cut into {num_microbatches} microbatches: "
            "take a larger batch or fewer microbatches"
        )
    return cut_batch(batch, num_microbatches, batch_dim).parts


def cut_batch(batch: Any, num_microbatches: int, batch_dim: BatchDim | None = None) -> Microbatches:
    """Cut a batch as `split_batch` does; one with fewer samples has as many microbatches as samples.

    Raises:
        ValueError: `batch` has no samples, its tensors differ in their number of samples, or `batch_dim` does
            not fit it.
    """
    nodes = nodes_of(batch)
    tensors = _tensors_in(nodes, batch_dim)
    num_samples = _num_samples(batch, tensors)
    if num_samples == 0:
        raise ValueError("a batch without samples cannot be cut into microbatches: leave it out")
    size = -(-num_samples // min(num_microbatches, num_samples))
    starts = range(0, num_samples, size)
    leaves = [_sliced(nodes, tensors, slice(start, start + size)) for start in starts]
    return Microbatches(
        [with_leaves(batch, iter(each)) for each in leaves],
        [min(size, num_samples - start) for start in starts],
        tensors,
    )


def microbatch_weights(microbatches: Sequence[Any]) -> list[float]:
    """Return the share of each microbatch in the samples of all.

    Weighted with these, means over the microbatches add up to the mean over the batch.
    """
    sizes = [num_samples_in(microbatch) for microbatch in microbatches]
    return [size / sum(sizes) for size in sizes]


class RepeatedTensors:
    """Search of the first batches for tensors that are cut by a guess, and seem to be about the whole batch.

    [Note: ambiguous guesses]
    The extents do not distinguish a table from samples: every tensor of an accepted batch has one entry for
    each sample. The values do. A table (class weights, a similarity matrix) is the same in every batch,
    while samples and labels change. So a tensor is reported if it had the same values in four batches, each
    of which differed from the one before in another tensor. A loop over one fixed batch reports nothing, nor
    do masks and positions whose rows are all equal, which are right either way. The comparison ends as soon
    as every tensor has changed, usually in the second batch; until then the previous batch is kept.
    """

    _NUM_CHANGES, _NUM_BATCHES = 3, 16

    def __init__(self) -> None:
        self._earlier: dict[str, tuple[torch.Tensor, int]] = {}
        self._suspects: set[str] | None = None  # None before the first batch
        self._num_changes = 0
        self._num_left = self._NUM_BATCHES

    def see(self, tensors: Sequence[BatchTensor]) -> list[BatchTensor]:
        """Compare the tensors of a batch with the previous ones; return those to report, once."""
        if self._num_left == 0:
            return []
        self._num_left -= 1
        once = {id(each.tensor): each for each in reversed(tensors)}  # a tensor can be both data and label
        guessed = {each.place: each for each in once.values() if each.is_guess and each.dim is not None}
        if self._suspects is None:
            self._suspects = set(guessed)
        else:
            same = {place for place, each in guessed.items() if self._is_as_before(place, each.tensor)}
            self._num_changes += len(same) < len(guessed)
            self._suspects &= same
        self._earlier = {place: (each.tensor, _version_of(each.tensor)) for place, each in guessed.items()}
        is_sure = self._num_changes == self._NUM_CHANGES
        if is_sure or not self._suspects or self._num_left == 0:
            self._num_left, self._earlier = 0, {}
        if not is_sure:
            return []
        found = [guessed[place] for place in guessed if place in self._suspects]
        return [each for each in found if not bool((each.tensor == each.tensor[:1]).all())]

    def _is_as_before(self, place: str, tensor: torch.Tensor) -> bool:
        if place not in self._earlier:
            return False
        earlier, version = self._earlier[place]
        if _version_of(earlier) != version:  # a buffer that has been written to since
            return False
        is_alike = (earlier.dtype, earlier.device) == (tensor.dtype, tensor.device)
        return earlier is tensor or (is_alike and torch.equal(earlier, tensor))


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_in(nodes: Sequence[Node], batch_dim: BatchDim | None) -> list[BatchTensor]:
    """Return the tensors among the nodes of a batch, in order, each with its dimension of samples."""
    named: Mapping[str, int | None] = batch_dim if isinstance(batch_dim, Mapping) else {}
    default = batch_dim if isinstance(batch_dim, int) else None
    found: list[BatchTensor] = []
    known: dict[str, None] = {}
    seen: dict[tuple[str, ...], tuple[str, str | None]] = {}  # path, and the key of `batch_dim` that applies
    for steps, value, _ in nodes:
        place = name = _ROOT
        setting = None
        if steps:
            outer, setting = seen[steps[:-1]]
            step = steps[-1]
            place = f"{outer}{step}".removeprefix(f"{_ROOT}.")  # "data" and "label", without the root
            name = step[1:] if step[0] == "." else step[2:-2] if step[1] in "'\"" else place
        setting = place if place in named else name if name in named else setting
        seen[steps] = place, setting
        known.update({name: None, place: None})
        if not isinstance(value, torch.Tensor):
            continue
        dim = named[setting] if setting is not None else default or 0
        if value.ndim == 0 and setting not in (place, name):  # a scalar in a container with a dimension
            dim = None
        if dim is not None and dim >= value.ndim:
            raise ValueError(
                f"batch_dim is {dim} for {place}, a tensor of shape {tuple(value.shape)}, which has no such "
                f"dimension: pass batch_dim={{{name!r}: ...}} with one of its dimensions, or with None if "
                "every microbatch is to get it whole"
            )
        found.append(BatchTensor(place, name, value, dim, default is None and setting is None))
    for unknown in named.keys() - known.keys() - {OUTPUT}:
        near = get_close_matches(unknown, known, n=3) or [name for name in known if name != _ROOT][:8]
        raise ValueError(
            f"batch_dim names {unknown!r}, which is not in the batch: there are {', '.join(map(repr, near))}"
        )
    return found


def _num_samples(batch: Any, tensors: Sequence[BatchTensor]) -> int:
    sizes = {each.place: each.tensor.shape[each.dim] for each in tensors if each.dim is not None}
    if not sizes:
        raise ValueError(
            f"there is no tensor to cut into microbatches in a batch of type {type(batch).__name__}"
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{place}: {size}" for place, size in sizes.items())
        dims = {each.dim for each in tensors if each.dim is not None}
        name = [each.name for each in tensors if each.dim is not None][-1]
        raise ValueError(
            "the tensors of a batch differ in their number of samples "
            f"(dim {' or '.join(map(str, sorted(dims)))}): {found}. If one is about the whole batch, or "
            f"has its samples along another dimension, name it: batch_dim={{{name!r}: None}}, or its dim"
        )
    return next(iter(sizes.values()))


def _sliced(nodes: Sequence[Node], tensors: Sequence[BatchTensor], rows: slice) -> list[Any]:
    """Return the leaves of a batch, the tensors among them cut to some samples."""
    remaining = iter(tensors)
    leaves = []
    for node in nodes:
        leaf = node.value
        if isinstance(leaf, torch.Tensor):
            dim = next(remaining).dim
            leaf = leaf if dim is None else leaf[(slice(None),) * dim + (rows,)]
        if node.is_leaf:
            leaves.append(leaf)
    return leaves


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float], dim: int = 0) -> Any:
    """Put the outputs of microbatches together.

    - Tensors with the same number of rows for each sample are concatenated along `dim`.
    - Other floating tensors with one value, and floats, are means over samples: they are averaged.
    - Constants and tensors that are equal in all microbatches are returned unchanged.

    Args:
        outputs: Nested values of one structure.
        weights: The number of samples of each microbatch.
        dim: The dimension of the samples.

    Raises:
        ValueError: `outputs` have a value of another kind.
    """
    return _merge(list(outputs), weights, dim, "output")


def _merge(values: Sequence[Any], sizes: Sequence[float], dim: int, place: str) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return _merge_tensors(values, sizes, dim, place)
    if any(type(value) is not type(first) for value in values):
        kinds = " and ".join(sorted({type(value).__name__ for value in values}))
        _refuse(place, f"is of type {kinds}")
    nested = [parts_of(value) for value in values]
    if nested[0] is not None:
        names = [[name for name, _ in parts or ()] for parts in nested]
        if any(found != names[0] for found in names):
            _refuse(place, f"has parts {names[0]} and {next(found for found in names if found != names[0])}")
        columns = zip(*([part for _, part in parts or ()] for parts in nested), strict=True)
        merged = [
            _merge(column, sizes, dim, place + name) for name, column in zip(names[0], columns, strict=True)
        ]
        return rebuilt(first, merged)
    if isinstance(first, float):
        total = sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        return first if all(value == first for value in values) else total
    if not all(
        value is first or (isinstance(first, _EQUAL_CONSTANTS) and value == first) for value in values
    ):
        _refuse(
            place, f"is {first!r}" if isinstance(first, _EQUAL_CONSTANTS) else f"is a {type(first).__name__}"
        )
    return first


def _merge_tensors(
    tensors: Sequence[torch.Tensor], sizes: Sequence[float], dim: int, place: str
) -> torch.Tensor:
    first = tensors[0]
    if all(tensor.ndim > dim for tensor in tensors):
        rows_each = first.shape[dim] / sizes[0]  # per sample
        whole = abs(rows_each - round(rows_each)) < 1e-6
        fit = (
            round(rows_each * size) == tensor.shape[dim] for tensor, size in zip(tensors, sizes, strict=True)
        )
        if whole and all(fit):
            return torch.cat(list(tensors), dim)
    if all(tensor.numel() == 1 and tensor.is_floating_point() for tensor in tensors):
        shares = [size / sum(sizes) for size in sizes]
        return torch.stack([tensor * share for tensor, share in zip(tensors, shares, strict=True)]).sum(0)
    if not all(torch.equal(tensor, first) for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        _refuse(place, f"is a {first.dtype} tensor of shape {shapes}, for {list(sizes)} samples")
    return first


def _refuse(place: str, what: str) -> NoReturn:
    raise ValueError(
        f"the outputs of microbatches cannot be put together: {place} {what}, and differs between "
        "microbatches. Return tensors with a row (or several) for each sample, floating numbers that are "
        "means over the samples, or equal values for all of them; or turn outputs off "
        "(return_output_label=False, return_outputs=False)"
    )
