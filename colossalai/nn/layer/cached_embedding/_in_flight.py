"""Batches in flight: lookups whose rows must keep their slots.

[Note: pinned rows]
Gradients name slots, so a row keeps its slot from the forward until the step that applies its gradient. A
batch pins its rows when it is looked up with grad mode on. It releases them

- in the step after its backward,
- when its gradient was discarded (`zero_grad`) before a step, or
- when its graph was freed without a backward.

A hook of the output's node holds the batch and is called before its backward; a backward of a batch that has
released its rows is an error. Several batches can be in flight: gradient accumulation, a table that is used
twice in a model, recomputation.

[Note: order of sums]
The sparse gradient of a lookup has an entry for each id. Torch merges the entries of several gradients (of a
table that is used twice, or of accumulation) by index, and `coalesce` adds entries of equal index in an order
that depends on all of them. Both orders differ under the numbers of slots, and with them the last bit of a
sum. So sums are made under the ids of the table, and their indices are replaced by slots. A single gradient
needs new indices only: it keeps the order of the batch. Of several tables behind one cache the entries of
each are added by themselves, as if the others were not there.
"""

import weakref
from functools import partial
from typing import NamedTuple

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
        return self.under_slots(self._coalesce(self.under_ids(grad)), len(grad))

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

    def _coalesce(self, grad: Tensor) -> Tensor:
        """Return a gradient of the tables with one entry for each id."""
        begins = self._map.table_begins
        if len(begins) == 1:
            return grad.coalesce()
        ids, values = grad._indices()[0], grad._values()
        coalesced = []
        for begin, end in zip(begins, (*begins[1:], len(grad)), strict=True):
            is_own = (ids >= begin) & (ids < end)
            shape, own = (end - begin, *grad.shape[1:]), (ids[is_own] - begin)[None]
            coalesced.append(
                torch.sparse_coo_tensor(own, values[is_own], shape, check_invariants=False).coalesce()
            )
        indices = torch.cat(
            [each._indices() + begin for begin, each in zip(begins, coalesced, strict=True)], 1
        )
        return torch.sparse_coo_tensor(
            indices, torch.cat([each._values() for each in coalesced]), grad.shape, check_invariants=False
        )

    def _add(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor, ...]) -> None:
        grad = grad_inputs[0]
        if grad is not None and grad.is_sparse:
            self._in_flight.setdefault(torch._C._current_graph_task_id(), []).append(grad)


class _Batch:
    """Slots of the rows of a lookup; held by its graph until its backward.

    Args:
        slots: The slots, without duplicates.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self.has_grad = False  # the gradient of the cache includes its own
        self.is_released = False


class _Prepared(NamedTuple):
    """A batch whose lookup is to come, and the slot of each of its ids."""

    batch: _Batch
    slots: Tensor


class _Running(NamedTuple):
    """A batch whose backward is expected, and its slots, which are unpinned if its graph is freed."""

    batch: "weakref.ref[_Batch]"
    slots: Tensor


class _Applied(NamedTuple):
    """A gradient that a step has applied, its version, and the moves of rows until then."""

    grad: "weakref.ref[Tensor]"
    version: int
    num_moves: int


class InFlight:
    """The batches of a cache from their lookup to their step.

    See [Note: pinned rows].

    Args:
        slot_map: The map whose rows are pinned.
        param: The cache.

    Attributes:
        param: The cache.
        sums: Sums of its sparse gradients.
    """

    def __init__(self, slot_map: SlotMap, param: nn.Parameter) -> None:
        self.sums = SparseSums(slot_map)
        self._map = slot_map
        self._changed: list[Tensor] = []  # slots whose rows a loop without an optimizer can have changed
        self._prepared: list[_Prepared] = []  # rows were read, the lookup is to come
        self._running: list[_Running] = []  # looked up, the backward is to come
        self._with_grad: list[_Batch] = []  # the step is to come
        self._applied: _Applied | None = None  # the gradient of the last step
        self._adds_to_applied = False  # in the backward in progress
        self._is_unmoved = torch.zeros_like(
            slot_map.num_pins, dtype=torch.bool
        )  # released, with the same row
        self._num_moves = 0  # of the map, when that was noted
        self.param, self._is_watched = param, False
        self._watch_param()

    def set_param(self, param: nn.Parameter) -> None:
        """Use another parameter as the cache."""
        if param is not self.param:
            self.param, self._is_watched = param, False
        self._watch_param()

    @property
    def is_empty(self) -> bool:
        """Whether no batch needs its rows."""
        self.release_discarded()
        return not (self._prepared or self._running or self._with_grad)

    def prepare(self, slots: Tensor, *, distinct: Tensor) -> None:
        """Pin the rows of a lookup to come.

        Args:
            slots: The slot of each id.
            distinct: The same slots without duplicates.
        """
        self._map.pin(distinct)
        self._prepared.append(_Prepared(_Batch(distinct), slots.flatten().long().cpu()))

    def check_prepared(self, slots: Tensor) -> Tensor:
        """Return the distinct slots of the first `prepare` without a lookup, which must be of the same slots.

        Raises:
            RuntimeError: No `prepare` is left without its lookup.
            ValueError: `slots` are those of another `prepare`.
        """
        if not self._prepared:
            raise RuntimeError(
                f"set_cache_op(False): {self._map.name} takes slots of cache_weight_mgr.prepare_ids(ids), "
                "which has not been called for this forward"
            )
        prepared = self._prepared[0]
        if not torch.equal(slots.detach().flatten().long().cpu(), prepared.slots):
            raise ValueError(
                f"set_cache_op(False): {self._map.name} was not called with the slots of the first "
                "cache_weight_mgr.prepare_ids(ids) that is left: call it in the same order"
            )
        return prepared.batch.slots

    def follow(self, output: Tensor, slots: Tensor, *, is_prepared: bool) -> None:
        """Pin the rows of a lookup until its step, if it is differentiated.

        Args:
            output: The result of the lookup.
            slots: The slots that it has read, without duplicates.
            is_prepared: Whether `prepare` has pinned them.
        """
        if output.grad_fn is not None:
            batch = _Batch(slots)
            self._map.pin(slots)
            self._running.append(_Running(weakref.ref(batch), batch.slots))
            output.grad_fn.register_prehook(partial(self._begin_backward, batch))
            self.sums.follow(output)
            self._watch_param()
        if is_prepared:
            self._map.unpin(self._prepared.pop(0).batch.slots)

    def release_discarded(self) -> None:
        """Release batches whose graph was freed, and those whose gradient was discarded."""
        if torch._C._current_graph_task_id() == -1:  # no backward is in progress
            self._expect_again()
        for running in self._running:
            if running.batch() is None:
                self._unpin(running.slots)
        self._running = [each for each in self._running if each.batch() is not None]
        self._release_without_grad()

    def take_changed(self) -> Tensor:
        """Return the slots whose rows a loop without an optimizer can have changed, once."""
        changed, self._changed = self._changed, []
        return torch.cat(changed) if changed else torch.empty(0, dtype=torch.int64, device="cpu")

    def has_grad(self) -> Tensor:
        """Return for each slot whether a batch has a gradient for its row: (slots,)."""
        mask = torch.zeros(self._map.num_slots, dtype=torch.bool, device="cpu")
        for batch in self._with_grad:
            mask.numpy()[batch.slots.numpy()] = True
        return mask

    def _expect_again(self) -> None:
        """Expect the backward of batches whose gradient was not accumulated, as by `torch.autograd.grad`."""
        idle = [each for each in self._with_grad if not each.has_grad]
        self._with_grad = [each for each in self._with_grad if each.has_grad]
        self._running += [_Running(weakref.ref(each), each.slots) for each in idle]
        self._changed += [each.slots for each in idle]

    def _is_grad_empty(self) -> bool:
        """Return whether the gradient of the cache was discarded, or set to zero."""
        grad = self.param.grad
        if grad is None:
            return True
        return grad._nnz() == 0 if grad.is_sparse else not bool(grad.any())

    def slots_with_grad(self) -> Tensor:
        """Return the slots of the rows that have a gradient.

        Raises:
            RuntimeError: Rows have moved since the gradient was computed.
        """
        self._check_unapplied()
        grad = self.param.grad
        assert grad is not None
        slots = (grad._indices()[0] if grad.is_sparse else (grad != 0).any(1).nonzero().flatten()).cpu()
        mask = self.has_grad()
        for running in self._running:
            mask[running.slots] = True
        if self._num_moves == self._map.num_moves:
            mask |= self._is_unmoved
        if self._map.num_moves and not mask.numpy().take(slots.numpy()).all():
            raise RuntimeError(
                f"the gradient of {self._map.name} has rows of batches that were released, and others can be "
                "in their slots now: let backward() accumulate gradients until the step"
            )
        return slots

    def end_step(self) -> None:
        """Release the batches whose gradients were applied."""
        for batch in self._with_grad:
            self._release(batch)
        self._with_grad.clear()
        self.sums.discard()
        grad = self.param.grad
        if grad is not None:
            self._applied = _Applied(weakref.ref(grad), grad._version, self._map.num_moves)

    def _release_without_grad(self) -> None:
        """Release the batches whose gradient was discarded."""
        if any(batch.has_grad for batch in self._with_grad) and self._is_grad_empty():
            for batch in self._with_grad:
                if batch.has_grad:
                    self._changed.append(batch.slots)
                    self._release(batch)
            self._with_grad = [each for each in self._with_grad if not each.is_released]

    def _release(self, batch: _Batch) -> None:
        batch.is_released = True
        self._unpin(batch.slots)

    def _unpin(self, slots: Tensor) -> None:
        """Unpin slots, and note that a gradient can name them until rows move."""
        if self._num_moves != self._map.num_moves:
            self._num_moves = self._map.num_moves
            self._is_unmoved.fill_(False)
        self._is_unmoved.numpy()[slots.numpy()] = True
        self._map.unpin(slots)

    def _begin_backward(self, batch: _Batch, grads: tuple[Tensor, ...]) -> None:
        """Expect the gradient of a batch.

        Raises:
            RuntimeError: The rows of `batch` were released.
        """
        if batch.is_released:
            raise RuntimeError(
                f"rows of {self._map.name} for this backward were released by the step after an earlier "
                "backward of the same graph: call every backward before step()"
            )
        self._adds_to_applied = self._is_applied()
        self._release_without_grad()  # a loop can call `zero_grad` after the forward
        if all(each is not batch for each in self._with_grad):
            self._with_grad.append(batch)
            self._running = [each for each in self._running if each.batch() is not batch]

    def _is_applied(self) -> bool:
        """Return whether the gradient was applied by a step, and rows have moved since."""
        grad = self.param.grad
        if self._applied is None or grad is None:
            return False
        applied = self._applied
        has_moved = applied.num_moves != self._map.num_moves
        return has_moved and applied.grad() is grad and grad._version == applied.version

    def _check_unapplied(self, *, adds_to_applied: bool = False) -> None:
        """Check that the gradient of the last step was discarded.

        Raises:
            RuntimeError: The gradient of the last step is still there.
        """
        if adds_to_applied or self._is_applied():
            raise RuntimeError(
                f"{self._map.name} still has the gradient of the last step, whose rows may have left the "
                "cache: call zero_grad() between step() and the next backward"
            )

    def _watch_param(self) -> None:
        """Register hooks around the accumulation of its gradient, before others do."""
        if self._is_watched or not self.param.requires_grad:
            return
        self._is_watched, reference = True, weakref.ref(self)
        self.param.register_hook(partial(_before_accumulation, reference))
        self.param.register_post_accumulate_grad_hook(partial(_after_accumulation, reference))


def _before_accumulation(reference: "weakref.ref[InFlight]", grad: Tensor) -> None:
    """See `SparseSums`."""
    in_flight = reference()
    if in_flight is not None and grad.is_sparse:
        in_flight.sums.before_accumulation(in_flight.param)


def _after_accumulation(reference: "weakref.ref[InFlight]", param: Tensor) -> None:
    """Note that the gradient of the cache has those of all batches after their backward."""
    in_flight = reference()
    if in_flight is not None and param is in_flight.param:
        in_flight._check_unapplied(adds_to_applied=in_flight._adds_to_applied)
        in_flight.sums.after_accumulation(in_flight.param)
        for batch in in_flight._with_grad:
            batch.has_grad = True
