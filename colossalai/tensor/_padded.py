"""Parameters with padded rows, so that the ranks divide them: a vocabulary of 50257 over 4 ranks.

The padding is zeros at the end of a dimension. Only the slices have it: tensors that are exchanged between
layouts (checkpoints, weights of other models, norms of full tensors) have the size without padding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from colossalai.tensor._spec import ShardingSpec


@dataclass(frozen=True)
class PaddedSpec(ShardingSpec):
    """A cut of a tensor that has been padded with zeros; `shape` is with the padding.

    Attributes:
        unpadded: The shape without it, as it is stored.
    """

    unpadded: tuple[int, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The global shape without padding, in torch's order."""
        return tuple(self.unpadded[dim] for dim in self.stored_dims)

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's slice, as it is stored, of the tensor without padding."""
        if tuple(whole.shape) != self.whole_shape:
            raise ValueError(f"the global shape is {self.whole_shape}, not {tuple(whole.shape)}")
        return self.cut(pad_to(whole.permute(self._order), self.shape))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor without padding, in torch's order; collective as `gather`."""
        gathered = self.gather(tensor)
        for dim, size in enumerate(self.unpadded):
            gathered = gathered.narrow(dim, 0, size)
        return gathered.permute(self.stored_dims)

    def boxes_without_padding(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return views of this rank's slice that have its elements, each once, without padding.

        Args:
            tensor: The slice, as it is stored.
        """
        boxes = []
        for region in self.regions():
            box = tensor
            for dim, (stretch, end) in enumerate(zip(region, self.unpadded, strict=True)):
                size = max(0, min(stretch.size, end - stretch.offset))
                box = box.narrow(dim, stretch.local_offset, size)
            boxes.append(box)
        return boxes


def padded_size(size: int, *num_ranks: int) -> int:
    """Return the next size that all numbers of ranks divide."""
    multiple = math.lcm(*num_ranks)
    return -(-size // multiple) * multiple


def pad_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor with zeros at the ends of its dimensions, up to a shape."""
    missing = [wanted - size for wanted, size in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return functional.pad(tensor, [count for behind in reversed(missing) for count in (0, behind)])
