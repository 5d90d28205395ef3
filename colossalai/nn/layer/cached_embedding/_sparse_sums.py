"""Sums of sparse gradients of a cache, in the order of those of the whole table.

[Note: order of sums]
The sparse gradient of a lookup has an entry for each id. Torch merges the entries of several gradients (of a
table that is used twice, or of accumulation) by index, and `coalesce` adds entries of equal index in an order
that depends on all of them. Both orders differ under the numbers of slots, and with them the last bit of a
sum. So sums are made under the ids of the table, and their indices are replaced by slots. A single gradient
needs new indices only: it keeps the order of the batch.
"""

import torch
from torch import Tensor, nn

from colossalai.nn.layer.cached_embedding._slots import SlotMap


class SparseSums:
    """Sums of the gradients of lookups, as autograd adds them.

    Args:
        slot_map: The ids of the rows in slots.
    """

    def __init__(self, slot_map: SlotMap) -> None:
        self._map = slot_map
        self._in_flight: dict[int, list[Tensor]] = {}  # by backward: gradients that were not accumulated yet
        self._total: Tensor | None = None  # under ids; of the accumulation in progress

    def follow(self, output: Tensor) -> None:
        """Take the gradient of a lookup when its backward has computed it."""
        assert output.grad_fn is not None
        output.grad_fn.register_hook(self._add)

    def before_accumulation(self, param: nn.Parameter) -> None:
        """Compute the sum that autograd is about to make, under ids."""
        parts = self._in_flight.pop(torch._C._current_graph_task_id(), [])
        self._total = None
        if not parts or (param.grad is None and len(parts) == 1):
            return
        added = self.under_ids(parts[0])
        for part in parts[1:]:
            added = self.under_ids(part) + added  # the order of operands in torch's buffer of inputs
        if param.grad is None:
            self._total = added
        elif param.grad.is_sparse:
            self._total = self.under_ids(param.grad) + added

    def after_accumulation(self, param: nn.Parameter) -> None:
        """Replace the sum of autograd, unless hooks of others can have changed a gradient."""
        if self._total is not None and param.grad is not None and len(param._backward_hooks or ()) == 1:
            param.grad = self.under_slots(self._total, len(param))
        self._total = None

    def discard(self) -> None:
        """Discard gradients that were computed and not accumulated, as by `torch.autograd.grad`."""
        self._in_flight.clear()

    def coalesce(self, grad: Tensor) -> Tensor:
        """Return a gradient with one entry for each slot."""
        return self.under_slots(self.under_ids(grad).coalesce(), len(grad))

    def under_ids(self, grad: Tensor) -> Tensor:
        """Return a gradient of the cache as one of the table."""
        ids = self._map.row_of[grad._indices()[0].cpu()].to(grad.device)
        shape = (self._map.num_rows, *grad.shape[1:])
        return torch.sparse_coo_tensor(ids[None], grad._values(), shape, check_invariants=False)

    def under_slots(self, grad: Tensor, num_slots: int) -> Tensor:
        """Return a gradient of the table as one of the cache."""
        slots = self._map.slots_of(grad._indices()[0].cpu()).to(grad.device)
        shape = (num_slots, *grad.shape[1:])
        return torch.sparse_coo_tensor(slots[None], grad._values(), shape, check_invariants=False)

    def _add(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor, ...]) -> None:
        grad = grad_inputs[0]
        if grad is not None and grad.is_sparse:
            self._in_flight.setdefault(torch._C._current_graph_task_id(), []).append(grad)
