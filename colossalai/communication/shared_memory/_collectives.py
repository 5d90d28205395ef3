"""Collectives over slots in shared memory.

p ranks, n bytes per rank. Sums are in rank order, element by element, for any split into parts, so that their
bits depend on neither; float16 and bfloat16 are summed in float32 and rounded once.

| call | a rank copies in | adds | copies out | phases waited for |
| --- | --- | --- | --- | --- |
| all-reduce, small | n | p n | | WRITTEN |
| all-reduce | (p-1)/p n | n | n | WRITTEN, REDUCED |
| all-reduce, sparse | n, by entries | p n | (p-1) n | WRITTEN, three times |
| reduce | (p-1)/p n | n | root: n | WRITTEN, root: REDUCED |
| reduce-scatter | (p-1)/p n | n | | WRITTEN |
| all-gather | n | | (p-1) n | WRITTEN |
| all-to-all | (p-1)/p n | | (p-1)/p n | WRITTEN |
| broadcast | root: n | | others: n | others: WRITTEN of the root |
| gather | others: n | | root: (p-1) n | root: WRITTEN |
| scatter | root: (p-1) n | | others: n | others: WRITTEN of the root |
"""

import struct
from collections.abc import Callable, Sequence

import torch

from colossalai.communication.shared_memory._calls import Call
from colossalai.communication.shared_memory._segment import copy_bytes
from colossalai.communication.shared_memory._slots import DONE, REDUCED, WRITTEN, Slots
from colossalai.communication.shared_memory._tensors import Bytes

Combine = Callable[..., torch.Tensor]

_SMALL = 64 << 10  # up to so many bytes, each rank computes the whole sum, which saves one wait
_CACHE_LINE = 64
_MOST_DIMS = 16  # most dimensions of a sparse tensor, whose shape is exchanged
_COMBINES: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
HALVES = (torch.float16, torch.bfloat16)  # summed in float32
_REDUCIBLE = (
    torch.float64,
    torch.float32,
    *HALVES,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def check_reduction(reduction: str, dtype: torch.dtype) -> None:
    """Check that a reduction exists for a dtype.

    Raises:
        ValueError: `reduction` does not exist, or not for `dtype`; the message has the alternatives.
    """
    if (reduction, dtype) not in _SUPPORTED:
        raise ValueError(_unsupported_reason(reduction, dtype))


def _unsupported_reason(reduction: str, dtype: torch.dtype) -> str:
    """Return the error message of an unsupported reduction; empty if it is supported."""
    name = str(dtype).removeprefix("torch.")
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    if reduction not in _COMBINES:
        return f"ReduceOp.{reduction} is not one of {', '.join(_COMBINES)}"
    if dtype not in _REDUCIBLE:
        return f"{dtype} cannot be reduced: convert it to float32 or an integer type of torch first"
    if reduction in ("BAND", "BOR", "BXOR") and not is_exact:
        return f"ReduceOp.{reduction} works on integers and bools, not on {name}"
    if reduction in ("MIN", "MAX") and dtype.is_complex:
        return f"ReduceOp.{reduction} needs numbers that have an order, not {name}"
    if reduction == "AVG" and is_exact:
        return f"ReduceOp.AVG is a mean, which {name} cannot hold: use SUM"
    return ""


_SUPPORTED = frozenset(
    (name, dtype) for name in _COMBINES for dtype in _REDUCIBLE if not _unsupported_reason(name, dtype)
)


def barrier(slots: Slots, call: Call) -> None:
    """Wait until all ranks have entered the barrier."""
    slots.start(call, 0)
    slots.begin()
    # DONE includes WRITTEN, and this rank reads nothing. The wait ends when all have entered.
    slots.publish(DONE)
    slots.wait(WRITTEN)


def all_reduce(slots: Slots, call: Call, tensor: torch.Tensor) -> None:
    """Replace a flat contiguous tensor by the reduction over all ranks."""
    slots.start(call, tensor.nbytes)
    lends = slots.lend(tensor.data_ptr(), tensor.nbytes)
    unit = tensor.element_size()
    for start, size in slots.parts(tensor.nbytes, unit):
        part = tensor[start // unit : (start + size) // unit]
        slots.begin()
        if size * (slots.num_ranks - 1) <= _SMALL:
            _all_reduce_alone(slots, part, call.slot_reduction)
        else:
            sections = _sections(part.numel(), slots.num_ranks, unit)
            _reduce_section(slots, part, sections, call.slot_reduction, start=start, lends=lends)
            # After the sum is stored: the other ranks copy this rank's section.
            slots.publish(REDUCED)
            slots.wait(REDUCED)  # the sums of all sections are complete; the next line copies them
            # Overwrites the sections of this rank's operand that others have reduced, and no longer read.
            _collect(slots, part, sections, start=start, lends=lends)
        slots.publish(DONE)
    # The caller writes to the operand after this call, so the other ranks have to be DONE.
    if lends:
        slots.end_loan()


def all_reduce_sparse(slots: Slots, call: Call, tensor: torch.Tensor) -> None:
    """Replace a sparse tensor by the sum over all ranks; its entries are the union of the ranks' entries.

    Every rank gathers the counts, indices and values of all ranks' entries, and adds them in rank order. The
    entries are padded to the largest count, which also determines the cost of ranks with few entries.

    Args:
        slots: Slots of the group.
        call: The call, the same on all ranks, with the reduction SUM or AVG.
        tensor: Tensor of layout `torch.sparse_coo`, of the same shape on all ranks.

    Raises:
        ValueError: Ranks have tensors of different shapes or of different numbers of sparse dimensions.
    """
    own = tensor.coalesce()
    count, places, values = own._nnz(), own.indices(), own.values()
    form = [own.sparse_dim(), *own.shape, *[-1] * _MOST_DIMS][:_MOST_DIMS]
    # Joined by all ranks: counts and shapes, from which every rank derives the same padded size.
    forms = _gather_alike(slots, call, torch.tensor([count, *form]))
    for rank, (_, *other) in enumerate(forms.tolist()):
        if other != form:
            said, mine = ([size for size in sizes[1:] if size >= 0] for sizes in (other, form))
            raise ValueError(
                f"all_reduce of sparse tensors: rank {rank} of the group has shape {said} with {other[0]} "
                f"sparse dimensions, and rank {slots.rank} {mine} with {form[0]}"
            )
    counts = forms[:, 0].tolist()
    padded = [part.new_zeros(max(counts), *part.shape[1:]) for part in (places.t(), values)]
    padded[0][:count], padded[1][:count] = places.t(), values
    # Joined by all ranks, twice: padded indices, padded values.
    all_places, all_values = (_gather_alike(slots, call, part) for part in padded)
    # The indices of a rank are unique, so each `index_add_` adds one number to an element, in rank order.
    joined = torch.cat([found[:number] for found, number in zip(all_places, counts, strict=True)])
    union, rows = joined.unique(dim=0, return_inverse=True)
    is_half = values.dtype in HALVES
    total = values.new_zeros(len(union), *values.shape[1:], dtype=torch.float32 if is_half else values.dtype)
    for found, number, at in zip(all_values, counts, rows.split(counts), strict=True):
        total.index_add_(0, at, found[:number].to(total.dtype))
    if call.slot_reduction == "AVG":
        total.div_(slots.num_ranks)
    result = torch.sparse_coo_tensor(
        union.t(), total.to(values.dtype), tensor.shape, check_invariants=False, is_coalesced=True
    )
    tensor.copy_(result)


def reduce(slots: Slots, call: Call, tensor: torch.Tensor) -> None:
    """Replace a flat contiguous tensor by the reduction over all ranks, on the root only."""
    slots.start(call, tensor.nbytes)
    unit = tensor.element_size()
    is_root = slots.rank == call.slot_root
    for start, size in slots.parts(tensor.nbytes, unit):
        part = tensor[start // unit : (start + size) // unit]
        slots.begin()
        if size * (slots.num_ranks - 1) <= _SMALL:
            slots.put(part.data_ptr(), size)
            # Other ranks read no slot, so they are DONE and do not wait for the root.
            slots.publish(WRITTEN if is_root else DONE)
            if is_root:
                slots.wait(WRITTEN)  # all terms are in the slots; the other ranks do not wait
                combine(part, _terms(slots, part, 0), call.slot_reduction)
            else:
                slots.defer_check()
        else:
            sections = _sections(part.numel(), slots.num_ranks, unit)
            _reduce_section(slots, part, sections, call.slot_reduction, start=start, lends=False)
            # The root still copies; the other ranks read nothing after their sum.
            slots.publish(REDUCED if is_root else DONE)
            if is_root:
                slots.wait(REDUCED)
                _collect(slots, part, sections, start=start, lends=False)
        if is_root:
            slots.publish(DONE)


def reduce_scatter(slots: Slots, call: Call, output: torch.Tensor, source: torch.Tensor) -> None:
    """Reduce a flat tensor of p sections over all ranks; each rank gets its own section.

    Args:
        slots: Slots of the group.
        call: The call, the same on all ranks.
        output: This rank's section of the result, (n,); it can be a view of `source`.
        source: Term of this rank, (p n,).
    """
    slots.start(call, source.nbytes)
    lends = slots.lend(source.data_ptr(), source.nbytes)
    unit, count = output.element_size(), output.numel()
    for start, size in slots.parts(output.nbytes, unit, slots.num_ranks):
        first, length = start // unit, size // unit
        slots.begin()
        for other in () if lends else slots.others:
            slots.put(source.data_ptr() + other * output.nbytes + start, size, other * size)
        own = source[slots.rank * count + first :][:length]
        part = output[first : first + length]
        if part.data_ptr() == own.data_ptr() and slots.rank:  # the sum would overwrite its own term
            slots.put(own.data_ptr(), size, slots.rank * size)
            own = slots.elements(slots.rank, slots.rank * length, length, output.dtype)
        # This rank's terms are visible. The wait for all ranks comes before any read of their terms.
        slots.publish(WRITTEN)
        slots.wait(WRITTEN)
        slots.read_loans()
        at, in_slot = slots.rank * output.nbytes + start, slots.rank * size
        terms = [
            own if rank == slots.rank else slots.operand(rank, at, length, output.dtype, in_slot=in_slot)
            for rank in range(slots.num_ranks)
        ]
        combine(part, terms, call.slot_reduction)
        # After the last read of other ranks' terms: they can overwrite them.
        slots.publish(DONE)
    if lends:
        slots.end_loan()


def all_gather(slots: Slots, call: Call, targets: Sequence[int], source: int, num_bytes: int) -> None:
    """Copy bytes of each rank to all ranks.

    Args:
        slots: Slots of the group.
        call: The call, the same on all ranks.
        targets: Target addresses by source rank; this rank's own can be `source`.
        source: Address of this rank's bytes.
        num_bytes: Number of bytes per rank.
    """
    slots.start(call, num_bytes)
    lends = slots.lend(source, num_bytes)
    for start, size in slots.parts(num_bytes, _CACHE_LINE):
        slots.begin()
        if not lends:
            slots.put(source + start, size)
        # This rank's bytes are visible; its own copy is made while others are late.
        slots.publish(WRITTEN)
        copy_bytes(targets[slots.rank] + start, source + start, size)
        slots.wait(WRITTEN)  # all ranks' bytes are in their slots or arenas
        slots.read_loans()
        for other in slots.following:
            slots.get_operand(targets[other] + start, other, size, at=start, in_slot=0)
        # After the last read from other ranks.
        slots.publish(DONE)
    if lends:
        slots.end_loan()


def all_to_all(slots: Slots, call: Call, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Send each rank a message of any size.

    In each part, every pair of ranks has a region of the same size in the sender's slot. If the messages of a
    rank have different sizes, its first part begins with a table of them; otherwise its header has the common
    size. Receivers compare these sizes with the expected ones, and all ranks derive the number of parts from
    the largest message.

    Args:
        slots: Slots of the group.
        call: The call, the same on all ranks.
        targets: Address and number of the bytes from each rank.
        sources: Address and number of the bytes for each rank.

    Raises:
        ValueError: A rank sends more or less than this one expects.
    """
    slots.start(call, 0)
    p, own = slots.num_ranks, slots.rank
    sizes = [size for _, size in sources]
    largest = max([sizes[other] for other in slots.others], default=0)
    is_even = all(sizes[other] == largest for other in slots.others)
    table = -(-8 * p // _CACHE_LINE) * _CACHE_LINE
    copy_bytes(targets[own][0], sources[own][0], min(sizes[own], targets[own][1]))
    start, extent, is_first = 0, 0, True
    while is_first or start < extent:
        slots.begin(extent=largest, is_even=is_even)
        head = table if is_first else 0
        region = (slots.room - head) // p // _CACHE_LINE * _CACHE_LINE
        if is_first and not is_even:
            slots.write(struct.pack(f"<{p}Q", *sizes))
        for other in slots.others:
            slots.put(
                sources[other][0] + start, max(0, min(region, sizes[other] - start)), head + other * region
            )
        # All messages of this rank in this part are visible.
        slots.publish(WRITTEN)
        slots.wait(WRITTEN)  # the messages of all ranks, and the sizes in the first part
        if is_first:
            extent = _check_sizes(slots, largest, targets)
        for other in slots.following:
            address, size = targets[other]
            slots.get(address + start, other, max(0, min(region, size - start)), head + own * region)
        # After the last read. The next part uses the other half of the slots.
        slots.publish(DONE)
        start += region
        if is_first and start < extent:
            # Collective: `extent` is the same on all ranks, so all of them grow their slots or none does.
            slots.make_room((extent - start) * p)
        is_first = False


def broadcast(slots: Slots, call: Call, address: int, num_bytes: int) -> None:
    """Replace bytes by the root's bytes."""
    slots.start(call, num_bytes)
    for start, size in slots.parts(num_bytes, _CACHE_LINE):
        slots.begin()
        slots.defer_check()
        if slots.rank == call.slot_root:
            slots.put(address + start, size)
        else:
            slots.wait(WRITTEN, (call.slot_root,))  # for the root alone
            slots.get(address + start, call.slot_root, size)
        # The root is DONE at once; its half is reused when the others have copied it (`begin`).
        slots.publish(DONE)


def gather(slots: Slots, call: Call, targets: Sequence[int], source: int, num_bytes: int) -> None:
    """Copy bytes of each rank to the root. `targets` has an address per rank there, else it is empty."""
    slots.start(call, num_bytes)
    for start, size in slots.parts(num_bytes, _CACHE_LINE):
        slots.begin()
        slots.defer_check()
        if slots.rank != call.slot_root:
            slots.put(source + start, size)
            # This rank reads nothing, and does not wait for the root.
            slots.publish(DONE)
            continue
        # The root sends no data: WRITTEN publishes its header, which is compared later.
        slots.publish(WRITTEN)
        copy_bytes(targets[slots.rank] + start, source + start, size)
        for other in slots.others:
            # In order of rank: its bytes are copied while later ranks still write.
            slots.wait(WRITTEN, (other,))
            slots.get(targets[other] + start, other, size)
        slots.publish(DONE)


def scatter(slots: Slots, call: Call, target: int, sources: Sequence[int], num_bytes: int) -> None:
    """Copy bytes from the root to each rank. `sources` has an address per rank there, else it is empty."""
    slots.start(call, num_bytes * slots.num_ranks)
    for start, size in slots.parts(num_bytes, _CACHE_LINE, slots.num_ranks):
        slots.begin()
        slots.defer_check()
        if slots.rank == call.slot_root:
            for other in slots.others:
                slots.put(sources[other] + start, size, other * size)
            # The pieces of all ranks are visible, and the root reads no slot.
            slots.publish(DONE)
            copy_bytes(target + start, sources[slots.rank] + start, size)
        else:
            # For the root alone: ranks do not wait for one another.
            slots.wait(WRITTEN, (call.slot_root,))
            slots.get(target + start, call.slot_root, size, slots.rank * size)
            slots.publish(DONE)


def _gather_alike(slots: Slots, call: Call, own: torch.Tensor) -> torch.Tensor:
    """Gather tensors of the same shape and stack them along a new first dimension, by rank."""
    own = own.contiguous()
    gathered = own.new_empty(slots.num_ranks, *own.shape)
    first = gathered.data_ptr()
    targets = [first + rank * own.nbytes for rank in range(slots.num_ranks)]
    all_gather(slots, call, targets, own.data_ptr(), own.nbytes)
    return gathered


def _sections(count: int, num_ranks: int, unit: int) -> list[slice]:
    """Split elements into one section per rank, at cache lines; the last ones can be empty."""
    line = max(1, _CACHE_LINE // unit)
    size = -(-count // num_ranks // line) * line if count >= num_ranks * line else -(-count // num_ranks)
    return [slice(min(count, rank * size), min(count, (rank + 1) * size)) for rank in range(num_ranks)]


def _all_reduce_alone(slots: Slots, part: torch.Tensor, reduction: str) -> None:
    slots.put(part.data_ptr(), part.nbytes)
    # Every rank reads the terms of all ranks, in rank order, so all have the same bits.
    slots.publish(WRITTEN)
    slots.wait(WRITTEN)
    combine(part, _terms(slots, part, 0), reduction)


def _reduce_section(
    slots: Slots, part: torch.Tensor, sections: Sequence[slice], reduction: str, *, start: int, lends: bool
) -> None:
    """Publish this rank's terms of the other sections, and reduce its own section.

    The result is written to this rank's slot, or to its operand if that is lent, for the other ranks to read.
    """
    unit, mine = part.element_size(), sections[slots.rank]
    before, after = mine.start * unit, mine.stop * unit
    if not lends:
        slots.put(part.data_ptr(), before)
        slots.put(part.data_ptr() + after, part.nbytes - after, after)
    # The sections of this rank for others are visible; after the wait it alone writes to its own section.
    slots.publish(WRITTEN)
    slots.wait(WRITTEN)  # the terms of this rank's section are in the slots or arenas of all ranks
    slots.read_loans()
    terms = [
        part[mine]
        if rank == slots.rank
        else slots.operand(rank, start + before, mine.stop - mine.start, part.dtype, in_slot=before)
        for rank in range(slots.num_ranks)
    ]
    target = part[mine] if lends else slots.elements(slots.rank, mine.start, terms[0].numel(), part.dtype)
    if lends and slots.rank > 1:  # the sum would overwrite this rank's term before its turn
        slots.put(part.data_ptr() + before, after - before, before)
        terms[slots.rank] = slots.elements(slots.rank, mine.start, target.numel(), part.dtype)
    combine(target, terms, reduction)


def _terms(slots: Slots, part: torch.Tensor, start: int) -> list[torch.Tensor]:
    """Return views of the slots of all ranks from element `start` on, with the dtype and size of `part`."""
    count = part.numel()
    return [slots.elements(rank, start, count, part.dtype) for rank in range(slots.num_ranks)]


def _collect(slots: Slots, part: torch.Tensor, sections: Sequence[slice], *, start: int, lends: bool) -> None:
    """Copy the reduced sections into `part`; this rank's own is there already if its operand is lent."""
    unit = part.element_size()
    for rank in slots.following if lends else (slots.rank, *slots.following):
        section = sections[rank]
        at, num_bytes = section.start * unit, (section.stop - section.start) * unit
        slots.get_operand(part.data_ptr() + at, rank, num_bytes, at=start + at, in_slot=at)


def combine(target: torch.Tensor, terms: Sequence[torch.Tensor], reduction: str) -> None:
    """Reduce the terms, in their order, into `target`, which can be the first term but no other."""
    combine = _COMBINES[reduction]
    total = target if target.dtype not in HALVES else torch.empty_like(target, dtype=torch.float32)
    if len(terms) == 1 or total is not target:
        total.copy_(terms[0])
    first = terms[0] if total is target else total
    for place, term in enumerate(terms[1:]):
        other = term if total is target else term.float()
        combine(first if place == 0 else total, other, out=total)
    if reduction == "AVG":
        total.div_(len(terms))
    if total is not target:
        target.copy_(total)


def _check_sizes(slots: Slots, largest: int, targets: Sequence[Bytes]) -> int:
    """Compare the sizes of the messages for this rank with the expected ones; return the largest message."""
    for other in slots.others:
        extent, is_even = slots.extent(other)
        largest = max(largest, extent)
        size = extent if is_even else struct.unpack("<Q", slots.read(other, 8 * slots.rank, 8))[0]
        if size != targets[other][1]:
            raise ValueError(
                f"all_to_all: rank {other} of the group sends {size} bytes to rank {slots.rank}, which "
                f"expects {targets[other][1]}: its output split sizes do not fit the other's input ones"
            )
    return largest
