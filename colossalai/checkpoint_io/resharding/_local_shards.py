"""Local shards: this rank's boxes of a global tensor, as views of its memory.

A rank holds a plain tensor whole, a slice that carries its `ShardingSpec`, a `DTensor`, a `DTensor` of such a
slice, or a flat range of any of the first two: of its values, or of its states alone. Only this file of
the package distinguishes these cases.
Boxes are in torch's order of dimensions, also if a layer stores them in another one.

Every function takes all tensors of a model or an optimizer at once: first the cuts of all are read, then the
boxes are made, then, in loading, the values are read into them.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from colossalai.checkpoint_io.resharding._tensors import ShardedTensor, StoredTensor, read_boxes
from colossalai.checkpoint_io.storage import listed
from colossalai.tensor import (
    Box,
    FlatRange,
    FullPrecisionTensor,
    ShardingSpec,
    flat_boxes,
    flat_values,
    range_of_states,
    source_of,
    spec_of,
    whole_box,
)

T = TypeVar("T")
Shape = tuple[int, ...]


def with_local_shards(content: T) -> T:
    """Return a nested value with this rank's shards in the places of its tensors; tied tensors stay one."""
    given, structure = tree_flatten(content)
    leaves = [in_full_precision(leaf) for leaf in given]
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    specs = {key: spec_of(tensor) for key, tensor in distinct.items()}
    held = dict(zip(distinct, _held(distinct.values()), strict=True))
    shards = {
        key: _sharded(held[key][0], specs[key], held[key][1], may_differ=not isinstance(tensor, nn.Parameter))
        for key, tensor in distinct.items()
    }
    found: T = tree_unflatten([shards.get(id(leaf), leaf) for leaf in leaves], structure)
    return found


def in_full_precision(value: T) -> T:
    """Return the float32 tensor of a `FullPrecisionTensor`, which has its memory; anything else as it is."""
    plain: Any = source_of(value) if isinstance(value, FullPrecisionTensor) else value
    found: T = plain
    return found


@dataclass(frozen=True)
class StateCut:
    """Cut of the states of a parameter.

    Attributes:
        shape: Shape of the parameter on this rank.
        whole_shape: Shape of the whole parameter.
        spec: The cut of the whole by mesh axes; None without one.
        part: The flat range of the states on this rank, None without one.
    """

    shape: Shape
    whole_shape: Shape
    spec: ShardingSpec | None
    part: FlatRange | None

    @property
    def is_slice(self) -> bool:
        """Whether the parameter is a slice, or not in torch's order, according to its spec."""
        return self.spec is not None and not self.spec.is_identity


def state_cuts(params: Mapping[str, nn.Parameter]) -> dict[str, StateCut]:
    """Return the cut of the states of each parameter, by its name."""
    specs = [spec_of(param) for param in params.values()]
    ranges = [range_of_states(param) for param in params.values()]
    return {
        name: StateCut(
            tuple(param.shape), tuple(param.shape) if spec is None else spec.whole_shape, spec, part
        )
        for (name, param), spec, part in zip(params.items(), specs, ranges, strict=True)
    }


def shards_of_states(
    states: Mapping[str, Mapping[str, torch.Tensor]], cuts: Mapping[str, StateCut]
) -> dict[str, dict[str, ShardedTensor]]:
    """Return this rank's shards of states: cut as the parameter is, where the extent is the same.

    Args:
        states: The tensors of each parameter's state by their keys, by the name of the parameter.
        cuts: The cuts of the states, by the name of the parameter.

    Raises:
        ValueError: A parameter is a tensor-parallel slice, and a tensor of its state has another shape: it is
            not known how that is cut.
    """
    found: dict[str, dict[str, ShardedTensor]] = {}
    for name, tensors in states.items():
        cut = cuts[name]
        extent = cut.shape if cut.part is None else cut.part.local_shape
        strange = [
            f"{key} {tuple(tensor.shape)}"
            for key, tensor in tensors.items()
            if tensor.ndim and tuple(tensor.shape) != extent
        ]
        if strange and cut.is_slice:
            raise ValueError(
                f"the state of {name!r}, a tensor-parallel slice of shape {cut.shape}, holds "
                f"{listed(strange)}: only states of the slice's shape, and numbers, can be saved"
            )
        found[name] = {
            key: _sharded(tensor.detach(), cut.spec, cut.part)
            if tuple(tensor.shape) == extent
            else _sharded(tensor.detach(), None, None)
            for key, tensor in tensors.items()
        }
    return found


def whole_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    """Return the shapes of the whole tensors, by name."""
    specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
    return {
        name: tuple(tensor.shape) if (spec := specs[name]) is None else spec.whole_shape
        for name, tensor in tensors.items()
    }


def fill(targets: Sequence[tuple[torch.Tensor, StoredTensor]]) -> None:
    """Overwrite this rank's parts of tensors with stored values; no communication.

    Afterwards, also after a failure, all ranks call the functions of `notes_of`.
    """
    specs = [spec_of(tensor) for tensor, _ in targets]
    held = _held([tensor for tensor, _ in targets])
    shards = [_sharded(tensor, spec, part) for (tensor, part), spec in zip(held, specs, strict=True)]
    _read(shards, [stored for _, stored in targets])


def notes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Return the functions that all ranks must call after `fill`, by the names of the filled tensors.

    Equal functions are called once, in this order. Before `fill`, since its errors are raised here.

    Raises:
        RuntimeError: The ranks have yet to exchange a write to one of `tensors`.
    """
    held = {name: flat_values(tensor) for name, tensor in tensors.items()}
    return {name: values.note_written for name, values in held.items() if values is not None}


def new_like(stored: StoredTensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a stored tensor, cut and placed as another one is."""
    part = torch.zeros_like(like, requires_grad=False)
    _read([_sharded(part, spec_of(like), None)], [stored])
    return part


def new_states(
    wanted: Sequence[tuple[StoredTensor, nn.Parameter]], cuts: Mapping[nn.Parameter, StateCut]
) -> list[torch.Tensor]:
    """Return this rank's parts of stored states, each cut and placed as its parameter is.

    A state of another shape than the parameter's is held whole by all ranks that share the parameter.

    Args:
        wanted: The states, each with its parameter.
        cuts: The cuts of the states of each parameter.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    states: list[torch.Tensor] = []
    shards: list[ShardedTensor] = []
    sources: list[StoredTensor] = []
    for stored, param in wanted:
        cut = cuts[param]
        part = cut.part
        if stored.shape == cut.whole_shape:
            if part is None:
                state = torch.zeros_like(param, dtype=stored.dtype, requires_grad=False)
            else:
                state = torch.zeros(part.local_shape, dtype=stored.dtype, device=part.device)
            shards.append(_sharded(state, cut.spec, part))
            sources.append(stored)
        elif isinstance(param, DTensor) and stored.shape:
            everywhere = [Replicate()] * param.device_mesh.ndim
            # No source rank: every rank reads the values itself, and none sends them.
            state = distribute_tensor(stored.whole(), param.device_mesh, everywhere, src_data_rank=None)
        else:
            # A number remains a plain tensor next to DTensors, as in torch's optimizers.
            state = stored.whole().to(param.device)
        states.append(state)
    _read(shards, sources)
    return states


def _held(tensors: Collection[torch.Tensor]) -> list[tuple[torch.Tensor, FlatRange | None]]:
    """Return the memory of each tensor on this rank, and the flat range that it is, if it is one."""
    flat = [flat_values(tensor) for tensor in tensors]
    return [
        (tensor.detach(), None) if values is None else (values.tensor, values.part)
        for tensor, values in zip(tensors, flat, strict=True)
    ]


def _read(targets: Sequence[ShardedTensor], sources: Sequence[StoredTensor]) -> None:
    with torch.no_grad():
        read_boxes(
            [
                (stored, box, tensor)
                for target, stored in zip(targets, sources, strict=True)
                for box, tensor in target.shards.items()
            ]
        )


def _sharded(
    tensor: torch.Tensor, spec: ShardingSpec | None, part: FlatRange | None, *, may_differ: bool = False
) -> ShardedTensor:
    """Return this rank's shards, with the metadata of the whole.

    Args:
        tensor: The tensor in its memory.
        spec: The cut of the whole by mesh axes; a DTensor or a flat range is a part of the slice.
        part: The flat range of `tensor`, None without one.
        may_differ: See `ShardedTensor`.
    """
    from torch.distributed.tensor import DTensor

    if spec is not None and spec.is_identity:
        spec = None
    shape = tuple(tensor.shape) if spec is None else spec.local_shape
    if part is not None and spec is None:
        shape = part.shape
    shards: dict[Box, torch.Tensor] = {}
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        if local.numel() > 0 or not tensor.numel():
            for chunk in tensor.__create_chunk_list__():
                shards[Box(tuple(chunk.offsets), tuple(chunk.sizes))] = local
    elif part is not None:
        flat, start = tensor.reshape(-1), 0
        for box in flat_boxes(shape, part.begin, part.end):
            shards[box] = flat[start : start + box.numel].view(box.sizes)
            start += box.numel
    else:
        shards[Box((0,) * len(shape), shape)] = tensor
    if spec is None:
        return ShardedTensor(shape, tensor.dtype, shards, may_differ)
    return ShardedTensor(spec.whole_shape, tensor.dtype, dict(_in_whole(shards, spec)), may_differ)


def _in_whole(shards: Mapping[Box, torch.Tensor], spec: ShardingSpec) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield shards of a slice as shards of the whole, in torch's order, without padding."""
    limits = whole_box(spec.whole_shape)
    for (held, tensor), region in itertools.product(shards.items(), spec.regions()):
        own = Box(
            tuple(stretch.local_offset for stretch in region), tuple(stretch.size for stretch in region)
        ).overlap(held)
        if own is None:
            continue
        further = [stretch.offset - stretch.local_offset for stretch in region]
        box = own.moved(further).permuted(spec.stored_dims)
        inside = box.overlap(limits)
        if inside is not None:
            view = own.moved(held.offsets, sign=-1).of(tensor).permute(spec.stored_dims)
            yield inside, inside.moved(box.offsets, sign=-1).of(view)
