"""Memory budget of a rank between forward and backward, enforced while the forward runs."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

MB = 2**20


class BudgetExceededError(RuntimeError):
    """A forward keeps more for its backward than a rank may hold."""


class SavedActivations:
    """Counts the bytes that autograd saves in a block of code, and stops at a budget.

    Each piece of memory counts once, that of parameters not at all: it is held anyhow. The saved tensors live
    until the backward, so their sum at the end of the forward is the peak.

    Args:
        parameters: Tensors that do not count.
        budget: Bytes that a rank may hold.

    Raises:
        BudgetExceededError: More is saved; out of the forward that saves it.
    """

    def __init__(self, parameters: Iterable[Tensor], *, budget: int) -> None:
        self.num_bytes = 0
        self.budget = budget
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, _unchanged)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
            if self.num_bytes > self.budget:
                raise BudgetExceededError(
                    f"the forward keeps more than the {self.budget / MB:.1f} MB that a rank may hold for the "
                    "backward: share the sequence among more ranks (--nproc_per_node), or shorten it"
                )
        return tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
