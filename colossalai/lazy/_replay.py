"""Replay of the steps of a tape: from a tensor without memory to its values.

Steps run in the order of their recording, so that each reads the same values as in an eager build, even if a
tensor is written again later. Only the steps that a value depends on are run, and intermediate tensors are
freed after their last use.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from colossalai.lazy._random import drawing_from
from colossalai.lazy._tape import Place, Step, Tape, place_of, tape_of

Device = torch.device | str | int | None
Memory = dict[Tape, UntypedStorage]


def value_of(tensor: Tensor) -> Tensor:
    """Return the values of a lazy tensor in new memory, and any other tensor unchanged."""
    tape = tape_of(tensor)
    return tensor if tape is None else view(replay(tape), place_of(tensor, tape))


def replay(tape: Tape, *, device: Device = None) -> UntypedStorage:
    """Return a new storage with the values that a tape describes, moved to a device if one is given."""
    storage = _replay(tape)
    if device is None or storage.device == torch.device(device):
        return storage
    with torch._C._DisableTorchDispatch():
        return (
            torch.empty(0, dtype=torch.uint8, device=storage.device)
            .set_(storage)
            .to(device)
            .untyped_storage()
        )


@torch.no_grad()
def _replay(tape: Tape) -> UntypedStorage:
    plan = steps_for(tape)
    last_use = {place.tape: step for step in plan for place in _places(step)}
    memory: Memory = {}
    default_dtype = torch.get_default_dtype()
    with torch._C._DisableTorchDispatch():  # do not record these operations
        try:
            for step in plan:
                torch.set_default_dtype(step.default_dtype)
                _run(step, memory, kept={tape, *last_use})
                for other in {place.tape for place in _places(step)} - {tape}:
                    if last_use[other] is step:
                        memory.pop(other, None)
        finally:
            torch.set_default_dtype(default_dtype)
    return memory[tape]


def view(storage: UntypedStorage, place: Place) -> Tensor:
    """Return the part of a storage that a place describes."""
    with torch._C._DisableTorchDispatch():  # do not record these operations
        empty = torch.empty(0, dtype=place.dtype, device=storage.device)
        tensor = empty.set_(storage, place.offset, place.size, place.stride)
        tensor = tensor.conj() if place.is_conj else tensor
        return torch._neg_view(tensor) if place.is_neg else tensor


def steps_for(tape: Tape) -> list[Step]:
    """Return the steps that the values of a tape depend on, in the order of their recording."""
    found: set[Step] = set()
    wanted = [(tape, tape.steps[-1].number)]
    while wanted:
        current, last = wanted.pop()
        for step in reversed(current.steps):
            if step.number > last:
                continue
            if step in found:
                break  # the earlier steps are in `wanted` already, with the places that this step reads
            found.add(step)
            reads = {place.tape for place in _places(step)} - {step.overwrites}
            wanted += [(read, step.number - 1) for read in reads if read is not current]
            if step.overwrites is current:
                break
    return sorted(found, key=lambda step: step.number)


def _places(step: Step) -> Iterable[Place]:
    return (leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Place))


def _run(step: Step, memory: Memory, *, kept: set[Tape]) -> None:
    tape = step.overwrites
    if tape is not None and tape not in memory:  # the steps before it are omitted
        memory[tape] = UntypedStorage(tape.num_bytes, device=tape.device)

    def find(place: Place) -> Tensor:
        return view(memory[place.tape], place)

    args, kwargs = tree_map_only(Place, find, (step.args, step.kwargs))
    with drawing_from(step.random_state) as generator:
        outputs = tree_flatten(step.op(*args, **{**kwargs, **generator}))[0]
    for position, place in step.creates:
        if place.tape in kept:
            memory[place.tape] = _in_place(outputs[position], place)


def _in_place(output: Tensor, place: Place) -> UntypedStorage:
    """Return the storage of an output in its recorded layout: a kernel may choose other strides."""
    found = (tuple(output.shape), output.stride(), output.storage_offset(), output.dtype)
    if found == (place.size, place.stride, place.offset, place.dtype):
        return output.untyped_storage()
    storage = UntypedStorage(place.tape.num_bytes, device=output.device)
    view(storage, place).copy_(output)
    return storage
