"""The loop over the chunks of a region, as a module of the rewritten graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from colossalai.autochunk._rules import ChunkCut


@dataclass(frozen=True)
class ChunkOutput:
    """An output of a region.

    Attributes:
        cut: Its part in a chunk.
        shape: Its whole shape.
        order: Its dimensions from the largest to the smallest stride.
    """

    cut: ChunkCut
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def allocate(self, part: Tensor) -> Tensor:
        """Return an uninitialized tensor for the whole output, in the order of strides, like a part of it."""
        return torch.empty([self.shape[dim] for dim in self.order], dtype=part.dtype, device=part.device)

    def write(self, whole: Tensor, part: Tensor, *, start: int, length: int) -> Tensor:
        """Write the part of a chunk into the whole output in the order of strides; return the whole.

        Args:
            whole: The tensor of `allocate`.
            part: The result of the chunk.
            start: First element of the chunk.
            length: Number of its elements.
        """
        dim, scale = self.cut.dim, self.cut.scale
        expected = (*self.shape[:dim], length * scale, *self.shape[dim + 1 :])
        assert part.shape == expected, f"a rule is wrong: {tuple(part.shape)} for {expected}"
        return _write(whole, part.permute(self.order), self.order.index(dim), start * scale)

    def finish(self, whole: Tensor) -> Tensor:
        """Return the whole output in the order of dimensions."""
        return whole.permute([self.order.index(dim) for dim in range(len(self.shape))])


class ChunkLoop(nn.Module):
    """Operations that run chunk by chunk; each chunk's outputs are written into the whole ones.

    Args:
        body: The operations for one chunk. It takes the inputs, then the chunk's length if `takes_length`,
            and returns a tuple of the outputs.
        inputs: Cut of each input; None: passed whole.
        outputs: The outputs.
        extent: Extent of the chunk dimension.
        size: Elements of a chunk; the last chunk can be smaller.
        takes_length: See `body`.
        replaced: Number of the input whose memory an output takes, by the number of the output. With
            gradients enabled, it is a new tensor.
        identity: Equal loops of repeated blocks have equal ones. None: unknown.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        *,
        inputs: Sequence[ChunkCut | None],
        outputs: Sequence[ChunkOutput],
        extent: int,
        size: int,
        takes_length: bool,
        replaced: Mapping[int, int],
        identity: Any = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.extent = extent
        self.size = size
        self.takes_length = takes_length
        self.replaced = dict(replaced)
        self.identity = identity

    def extra_repr(self) -> str:
        """Return the chunk dimension's sizes."""
        return f"extent={self.extent}, size={self.size}"

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all operations."""
        return self.run(inputs)

    def run(self, inputs: Sequence[Tensor], *, most: int | None = None) -> tuple[Tensor, ...]:
        """Run the first `most` chunks, all by default, and return the whole outputs."""
        whole: list[Tensor] = []
        # Autograd could have saved an input.
        inplace = {} if torch.is_grad_enabled() else self.replaced
        replaced = {output: inputs[number] for output, number in inplace.items()}
        for start in range(0, self.extent, self.size)[:most]:
            length = min(self.size, self.extent - start)
            arguments: list[Any] = [
                each if cut is None else each.narrow(cut.dim, start * cut.scale, length * cut.scale)
                for each, cut in zip(inputs, self.inputs, strict=True)
            ]
            parts = list(self.body(*arguments, *([length] if self.takes_length else [])))
            del arguments
            if replaced:
                parts = _copies_of_views(parts, list(replaced.values()))
            if not whole:
                whole = [
                    replaced[number].permute(each.order) if number in replaced else each.allocate(part)
                    for number, (each, part) in enumerate(zip(self.outputs, parts, strict=True))
                ]
            for number, output in enumerate(self.outputs):
                whole[number] = output.write(whole[number], parts[number], start=start, length=length)
            del parts  # before the next chunk
        return tuple(each.finish(tensor) for each, tensor in zip(self.outputs, whole, strict=True))


def _copies_of_views(parts: Sequence[Tensor], replaced: Sequence[Tensor]) -> list[Tensor]:
    """Return parts, and copies of those on the storage of an input that is written into."""
    storages = {each.untyped_storage()._cdata for each in replaced}
    return [each.clone() if each.untyped_storage()._cdata in storages else each for each in parts]


def _write(whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    """Copy a part into its place in the whole tensor; return the whole tensor."""
    if torch.is_grad_enabled() and (part.requires_grad or whole.requires_grad):
        return _PartWrite.apply(whole, part, dim, start)  # type: ignore[no-any-return]
    whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


class _PartWrite(torch.autograd.Function):
    """The copy of a part into its place. Autograd's own copies the gradient of the whole for each part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
        ctx.mark_dirty(whole)
        ctx.place = (dim, start, part.shape[dim])
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The place of `part` in `whole` has not been written before, so its gradient there is not used.
        return gradient, gradient.narrow(*ctx.place), None, None
