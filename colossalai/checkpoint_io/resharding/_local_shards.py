"""What this rank holds of a tensor: which boxes of the whole, and where they are in its memory.

A rank holds a plain tensor whole, a slice that carries its `ShardingSpec`, a `DTensor`, a `DTensor` of such a
slice, or a flat range of any of the first two. Here, and nowhere else in this package, is it asked which.
Boxes are in torch's order of dimensions, whatever the order in which a layer stores them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from colossalai.checkpoint_io.resharding._box import Box, flat_boxes, whole_box
from colossalai.checkpoint_io.resharding._entries import Entry, Held, Piece, Stored
from colossalai.tensor import FlatRange, ShardingSpec, range_of_states, spec_of


def held(tensor: torch.Tensor) -> Held:
    """Return what this rank holds of a parameter, a buffer, or any other tensor."""
    own = _held(tensor.detach(), spec_of(tensor), None)
    return replace(own, may_differ=not isinstance(tensor, nn.Parameter))


def held_state(state: torch.Tensor, param: torch.Tensor) -> Held:
    """Return what this rank holds of a state of a parameter, which is cut as the parameter is.

    A number, or a state of another shape than the parameter's, is not cut.
    """
    part = range_of_states(param)
    if not follows(state, param):
        return _held(state.detach(), None, None)
    return _held(state.detach(), spec_of(param), part)


def follows(state: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether a state has the extent of what this rank holds of its parameter."""
    part = range_of_states(param)
    return tuple(state.shape) == (tuple(param.shape) if part is None else part.local_shape)


def is_cut_by_spec(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not the whole, or not in torch's order, and its spec says how."""
    spec = spec_of(tensor)
    return spec is not None and not spec.is_identity


def whole_shape(tensor: torch.Tensor | Entry) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    spec = spec_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return tuple(tensor.shape) if spec is None else spec.whole_shape


def copy_into(target: torch.Tensor, stored: Stored) -> None:
    """Overwrite what this rank holds of a tensor; no communication."""
    _fill(held(target), stored)


def new_like(stored: Stored, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a stored tensor, cut and placed as another one is."""
    part = torch.zeros_like(like, requires_grad=False)
    _fill(_held(part, spec_of(like), None), stored)
    return part


def new_state(stored: Stored, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a state that is cut as its parameter is."""
    part = range_of_states(param)
    if part is None:
        state = torch.zeros_like(param, dtype=stored.dtype, requires_grad=False)
    else:
        state = torch.zeros(part.local_shape, dtype=stored.dtype, device=part.device)
    _fill(held_state(state, param), stored)
    return state


def new_replicated(stored: Stored, param: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state that the ranks which share a parameter all hold whole.

    A number stays a plain tensor beside a DTensor, as torch's optimizers keep them.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if not isinstance(param, DTensor) or not stored.shape:
        return stored.whole().to(param.device)
    everywhere = [Replicate()] * param.device_mesh.ndim
    return distribute_tensor(stored.whole(), param.device_mesh, everywhere, src_data_rank=None)


def _fill(target: Held, stored: Stored) -> None:
    with torch.no_grad():
        for piece in target.pieces:
            stored.read(piece.box, piece.tensor)


def _held(tensor: torch.Tensor, spec: ShardingSpec | None, part: FlatRange | None) -> Held:
    if spec is not None and spec.is_identity:
        spec = None
    # Of the tensor that is not cut by the spec; DTensors and flat ranges are of what the spec has cut.
    local_shape = tuple(tensor.shape) if spec is None else spec.local_shape
    if part is not None and spec is None:
        local_shape = part.shape
    shape = local_shape if spec is None else spec.whole_shape
    pieces = tuple(_local_pieces(tensor, local_shape, part))
    if spec is not None:
        pieces = tuple(_in_whole(pieces, spec))
    return Held(shape, tensor.dtype, pieces)


def _local_pieces(tensor: torch.Tensor, shape: tuple[int, ...], part: FlatRange | None) -> Iterator[Piece]:
    """Yield what a rank holds of a tensor of a shape, spec aside."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        for chunk in tensor.__create_chunk_list__():
            if local.numel() > 0 or not tensor.numel():
                yield Piece(Box(tuple(chunk.offsets), tuple(chunk.sizes)), local)
    elif part is not None:
        flat, start = tensor.reshape(-1), 0
        for box in flat_boxes(shape, part.begin, part.end):
            yield Piece(box, flat[start : start + box.numel].view(box.sizes))
            start += box.numel
    else:
        yield Piece(whole_box(shape), tensor)


def _in_whole(pieces: tuple[Piece, ...], spec: ShardingSpec) -> Iterator[Piece]:
    """Yield pieces of a slice as pieces of the whole, in torch's order, without what is padding."""
    limits = whole_box(spec.whole_shape)
    for piece, region in itertools.product(pieces, spec.regions()):
        own = Box(
            tuple(stretch.local_offset for stretch in region), tuple(stretch.size for stretch in region)
        ).overlap(piece.box)
        if own is None:
            continue
        further = [stretch.offset - stretch.local_offset for stretch in region]
        box = own.moved(further).permuted(spec.stored_dims)
        inside = box.overlap(limits)
        if inside is not None:
            view = own.moved(piece.box.offsets, sign=-1).of(piece.tensor).permute(spec.stored_dims)
            yield Piece(inside, inside.moved(box.offsets, sign=-1).of(view))
