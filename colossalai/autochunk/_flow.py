"""Regions of operations through which one dimension passes independently.

[Note: the walk of a region]
A region is a range of consecutive operations. Its chunk dimension is chosen at its last operation and
followed upwards by the rules, one operation at a time. An operation is chunked if the later ones of the
region need one and the same part of its result. It is *hoisted* if they need the whole result or two
different parts, or if it has no rule for its cut: it runs once before the loop, and its inputs are needed
whole. A *free* operation is read only by code after the region; it is cut along a dimension of the same
extent. So each range has a valid answer, and the memory and time of a longer range follow from those of a
shorter one.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, fx

from colossalai.autochunk._calls import can_be_view, has_effects, input_nodes, shape_of
from colossalai.autochunk._profile import GraphProfile
from colossalai.autochunk._rules import ChunkCut, input_cuts

MOST_OPERATIONS = 128
"""Length of the longest region that the search considers."""

_MOST_WALKS = 4


class Walk:
    """The walk of a region, see [Note: the walk of a region].

    Args:
        profile: The profile of the graph.
        last: Position of the last operation.

    Attributes:
        extent: Extent of the chunk dimension; 0 before the first choice.
        cuts: Cut of the result of each chunked operation, by its position.
        outputs: Cut of each output, by its position.
        hoisted: Positions of the operations that run before the loop.
        choices: Dimension of each operation that the walk has not determined, by its position.
        fixed: Bytes that do not depend on the chunk size: whole outputs and hoisted tensors.
        inner: Bytes of the largest live set within the region if one chunk has all elements.
        reread: Bytes that each chunk reads again.
        moved: Bytes of outputs and of strided inputs, which are copied.
        highest_root: Position of the earliest operation that makes the storage of an output. Before it, an
            output would be a copy of a view.
        is_valid: Whether each operation that writes into a tensor is chunked.
    """

    def __init__(self, profile: GraphProfile, last: int) -> None:
        self.last = last
        self.extent = 0
        self.cuts: dict[int, ChunkCut] = {}
        self.outputs: dict[int, ChunkCut] = {}
        self.hoisted: list[int] = []
        self.choices: dict[int, int] = {}
        self.fixed = self.inner = self.reread = self.moved = 0
        self.highest_root = last
        self.is_valid = True
        self._written: set[int] = set()  # positions of operations that make a tensor that is written into
        self._profile = profile
        self._needs: dict[int, set[ChunkCut | None]] = {}
        self._live = np.zeros(MOST_OPERATIONS, dtype=np.int64)  # by distance from the last operation

    def copy(self) -> "Walk":
        """Return an independent walk of the same state."""
        other = object.__new__(Walk)
        vars(other).update(vars(self))
        for name in ("cuts", "outputs", "hoisted", "choices", "_live", "_written"):
            setattr(other, name, getattr(self, name).copy())
        other._needs = {position: set(needs) for position, needs in self._needs.items()}
        return other

    @property
    def is_complete(self) -> bool:
        """Whether the walk can end here: the tensors that are written into are made in the region."""
        return not self._written

    @property
    def is_open(self) -> bool:
        """Whether an earlier operation has a part to compute."""
        return any(cut is not None for needs in self._needs.values() for cut in needs)

    def is_free(self, position: int) -> bool:
        """Return whether no chunked operation reads the result of the next operation."""
        return position not in self._needs

    def free_dims(self, position: int) -> list[int]:
        """Return the dimensions that an operation can be cut along, as it is a free one."""
        node = self._profile.nodes[position]
        if not isinstance(node.meta["val"], Tensor):
            return []
        found = [
            dim
            for dim, extent in enumerate(shape_of(node))
            if extent > 1
            and extent == (self.extent or extent)
            and input_cuts(node, ChunkCut(dim)) is not None
        ]
        seed = self.choices.get(self.last)
        return sorted(found, key=lambda dim: dim != seed)

    def visit(self, position: int, dim: int | None = None) -> bool:
        """Add the operation before the first one so far, and return whether it is chunked.

        Args:
            position: Its position.
            dim: The dimension along which a free one is cut. None: it is hoisted.
        """
        node = self._profile.nodes[position]
        needs = self._needs.pop(position, set())
        # All later operations of the region have been visited, so these are all needs.
        if dim is not None and not needs:
            self.extent = self.extent or shape_of(node)[dim]
            self.choices[position] = dim
            needs = {ChunkCut(dim)}
        is_output = self._is_output(node)
        cut = needs.pop() if len(needs) == 1 else None
        cuts = None
        if cut is not None and not (is_output and not self._can_be_output(position)):
            cuts = input_cuts(node, cut)
        if cut is None or cuts is None:
            # A write into a whole tensor could precede reads of chunks.
            self.is_valid &= position not in self._profile.own_writes
            self._hoist(position, node)
            return False
        self._written.discard(position)
        if (written := self._profile.own_writes.get(position)) is not None:
            self._written.add(self._profile.storages[written].first)
        self.cuts[position] = cut
        if is_output:
            self.outputs[position] = cut
            self.fixed += node.meta["val"].nbytes
            self.moved += node.meta["val"].nbytes
            roots = [self._profile.storages[number].first for number in self._profile.of_node[position]]
            self.highest_root = min([self.highest_root, *roots])
        for source, part in zip(input_nodes(node), cuts, strict=True):
            self._need(source, part)
        self._add_live(position)
        return True

    def _is_output(self, node: fx.Node) -> bool:
        positions = self._profile.positions
        return any(positions.get(user, self.last + 1) > self.last for user in node.users)

    def _can_be_output(self, position: int) -> bool:
        """Return whether the result of an operation can be a new tensor.

        It cannot if it is a view of a tensor of before, or if code after the region writes into its storage,
        which other tensors can have, too, or into a copy of it that could be a view of the new tensor.
        """
        numbers = self._profile.of_node[position]
        is_tensor = isinstance(self._profile.nodes[position].meta["val"], Tensor)
        is_final = all(at <= self.last for number in numbers for at in self._profile.writes.get(number, ()))
        is_final = is_final and self._profile.copied_and_written.isdisjoint(numbers)
        return is_tensor and bool(numbers) and is_final

    def replaceable(self) -> dict[int, int]:
        """Return inputs whose memory an output can take: their positions, by the output's position.

        No operation after the region reads such an input, those of a chunk read only the part of it that the
        output's part of the same chunk takes, and no other input of the region has its storage.
        """
        found: dict[int, int] = {}
        cuts = set(self.outputs.values())
        for position, needs in self._needs.items():
            numbers = self._profile.of_node[position]
            if len(needs) > 1 or needs.isdisjoint(cuts) or len(numbers) != 1:
                continue
            storage = self._profile.storages[numbers[0]]
            # In a call with other strides than the trace, it can be a view of another tensor.
            if can_be_view(storage.node) or self._profile.layouts[position] is None:
                continue
            if storage.last > self.last or storage.size != self._profile.nodes[position].meta["val"].nbytes:
                continue
            if sum(numbers[0] in self._profile.of_node[other] for other in self._needs) > 1:
                continue
            for output, cut in self.outputs.items():
                is_alike = self._profile.layouts[output] == self._profile.layouts[position]
                if output not in found and cut in needs and is_alike:
                    found[output] = position
                    break
        return found

    def settle(self) -> None:
        """Hoist elements of tuples that are not chunked."""
        for position in list(self.cuts):
            node = self._profile.nodes[position]
            if node.target is not operator.getitem:
                continue
            if self._profile.positions.get(node.all_input_nodes[0]) not in self.cuts:
                del self.cuts[position]
                self.outputs.pop(position, None)
                self.hoisted.append(position)

    def _need(self, source: fx.Node, part: ChunkCut | None) -> None:
        position = self._profile.positions.get(source)
        if position is not None:
            self._needs.setdefault(position, set()).add(part)
        if part is None and isinstance(source.meta["val"], Tensor):
            self.reread += source.meta["val"].nbytes

    def _hoist(self, position: int, node: fx.Node) -> None:
        self.hoisted.append(position)
        for source in node.all_input_nodes:
            if (before := self._profile.positions.get(source)) is not None:
                self._needs.setdefault(before, set()).add(None)
        self.fixed += sum(size for size, _ in self._made(position))

    def _made(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield size and last position of each storage that an operation makes."""
        for number in self._profile.of_node[position]:
            storage = self._profile.storages[number]
            if storage.first == position:
                yield storage.size, storage.last

    def _add_live(self, position: int) -> None:
        """Add the storages that a chunked operation makes; those of outputs live to the end of the chunk."""
        place = self.last - position
        # `_live` is by distance from the last operation, so a lifetime ends at the smaller index.
        for size, last in self._made(position):
            self._live[max(0, self.last - last) : place + 1] += size
        self._live[place] += self._profile.temporary[position]
        self.inner = max(self.inner, int(self._live[: place + 1].max()))


def follow(profile: GraphProfile, first: int, last: int, choices: Mapping[int, int]) -> Walk:
    """Return the walk of a region.

    Args:
        profile: The profile of the graph.
        first: Position of its first operation.
        last: Position of its last operation.
        choices: Dimension of each free operation, by position; the others are hoisted.
    """
    walk = Walk(profile, last)
    for position in range(last, first - 1, -1):
        walk.visit(position, choices.get(position))
    walk.settle()
    return walk


@dataclass(frozen=True)
class Candidates:
    """Possible regions with the same last operation; arrays with an entry for each.

    Attributes:
        num_operations: Operations of the region.
        extent: Extent of the chunk dimension.
        fixed: See `Walk`.
        inner: See `Walk`.
        reread: See `Walk`.
        moved: See `Walk`.
        num_chunked: Operations that each chunk runs.
        choices: Dimension of each free operation, by its distance from the last operation.
    """

    num_operations: np.ndarray
    extent: np.ndarray
    fixed: np.ndarray
    inner: np.ndarray
    reread: np.ndarray
    moved: np.ndarray
    num_chunked: np.ndarray
    choices: Sequence[Mapping[int, int]]


def candidates_of(profile: GraphProfile, last: int, *, inplace: bool = False) -> Candidates:
    """Return the possible regions with a last operation.

    Args:
        profile: The profile of the graph.
        last: Position of the last operation.
        inplace: Whether outputs take the memory of inputs, see `Walk.replaceable`.
    """
    rows: list[tuple[int, ...]] = []
    is_view = not any(Walk(profile, last)._made(last))
    choices: list[Mapping[int, int]] = []
    walks = [] if is_view else [Walk(profile, last)]
    for position in range(last, max(-1, last - MOST_OPERATIONS), -1):
        node = profile.nodes[position]
        if not walks or (has_effects(node) and position not in profile.own_writes):
            break
        following: list[Walk] = []
        for walk in walks:
            for each, is_chunked in _visits(walk, position):
                # A range that begins with a hoisted operation or a view is as good without it.
                if not each.is_valid:
                    continue
                can_begin = each.is_complete and each.highest_root >= position
                if is_chunked and any(each._made(position)) and can_begin:
                    replaced = each.replaceable() if inplace else ()
                    fixed = each.fixed - sum(profile.nodes[out].meta["val"].nbytes for out in replaced)
                    rows.append(
                        (
                            last - position + 1,
                            *(each.extent, fixed, each.inner, each.reread, each.moved + _strided(each)),
                            len(each.cuts),
                        )
                    )
                    choices.append({last - free: dim for free, dim in each.choices.items()})
                # With most operations hoisted, an earlier end of the walk is a better region.
                if each.is_open and len(each.hoisted) <= len(each.cuts):
                    following.append(each)
        walks = sorted(following, key=lambda each: each.fixed)[: _MOST_WALKS if position < last else None]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
    operations, extent, fixed, inner, reread, moved, chunked = columns
    return Candidates(operations, extent, fixed, inner, reread, moved, chunked, choices)


def _visits(walk: Walk, position: int) -> Iterator[tuple[Walk, bool]]:
    """Yield the walks that continue with an operation, and whether it is chunked."""
    dims = walk.free_dims(position) if walk.is_free(position) else []
    if not dims and position == walk.last:
        return
    for dim in dims[1:]:
        other = walk.copy()
        yield other, other.visit(position, dim)
    yield walk, walk.visit(position, dims[0] if dims else None)


def _strided(walk: Walk) -> int:
    """Return the bytes of inputs of the region whose parts are not contiguous."""
    total = 0
    for position, needs in walk._needs.items():
        value = walk._profile.nodes[position].meta["val"]
        for cut in needs:
            if cut is not None and any(extent > 1 for extent in value.shape[: cut.dim]):
                total += value.nbytes
    return total
