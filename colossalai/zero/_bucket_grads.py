"""The gradients of a bucket: whole ones of this rank, its slice of the mean, placeholders in `param.grad`.

See [Note: placeholders of gradients] and [Note: rounds].
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossalai.communication import empty_to_send
from colossalai.nn.parallel import sparse_gradient
from colossalai.zero._exchange import Finish
from colossalai.zero._layout import FlatBucket
from colossalai.zero._placeholder import GradPlaceholder, refused

KeepMean = Callable[[FlatBucket, torch.Tensor], torch.Tensor]


@final
class BucketGrads:
    """The gradients of a bucket; its parameters are known by their numbers in the bucket.

    Args:
        bucket: The layout.
        is_kept: Whether the memory of whole gradients is kept between rounds.
        keep: Converts a slice to its stored dtype and device; None: those of the gradients.

    Attributes:
        bucket: As given.
        slice: This rank's section of the mean; None: there is none.
        views: The memory of the whole gradient of each parameter, for use while `is_open`.
        is_open: Whether gradients can be written into `views`; if not, `open` comes first.
        seen: Parameters that have had a gradient here since `forget`.
        arrived: Parameters that have had one in this round, which is complete when all have.
        placeholders: Placeholder of each parameter; None until the first mean.
        placed: Parameters whose mean is dropped with their placeholder.
        is_lifted: Whether placeholders are taken away for a backward.
        listeners: Called with parameters that have lost their mean, and with those whose mean became zero.
    """

    def __init__(self, bucket: FlatBucket, *, is_kept: bool, keep: KeepMean | None = None) -> None:
        self.bucket = bucket
        self.slice: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.is_open = False
        self.seen: set[int] = set()
        self.arrived: set[int] = set()
        self.placeholders: list[GradPlaceholder | None] = [None for _ in bucket.params]
        self.placed: set[int] = set()
        self.is_lifted = False
        self.listeners: list[Callable[[list[nn.Parameter], list[nn.Parameter]], None]] = []
        self._keep = keep
        self._is_kept = is_kept
        self._rank = bucket.axis.rank
        # Memory that the other ranks can read; a single rank sends nothing.
        axis = bucket.axis
        self._empty = torch.empty if axis.size == 1 else partial(empty_to_send, parallel_mode=axis)
        self._flat: torch.Tensor | None = None
        self._blank: set[int] = set()  # parameters of whose means the slice has nothing, but zeros
        self._covered: set[int] = set()  # of `placed` those that got new gradients on top of the mean

    def __getstate__(self) -> dict[str, Any]:
        # Copies of parameters have no gradients, and a copy of the model has no optimizer.
        no_placeholders = {"placeholders": [None for _ in self.placeholders], "placed": set()}
        return {**vars(self), **no_placeholders, "_covered": set(), "is_lifted": False, "listeners": []}

    @property
    def has_new(self) -> bool:
        """Whether there are gradients that no round has averaged."""
        return any(map(self._is_real, range(len(self.bucket.params))))

    def open(self) -> None:
        """Prepare `views` for gradients: get their memory, or move an earlier mean out of it."""
        if self._flat is None:
            bucket = self.bucket
            flat = self._empty(bucket.numel, dtype=bucket.grad_dtype, device=bucket.params[0].device)
            flat[bucket.num_used :].zero_()
            self._flat, self.views = flat, bucket.views(flat)
        elif self.slice is not None:
            begin, _ = self.bucket.bounds[self._rank]
            if self.slice.data_ptr() == self._flat[begin:].data_ptr():
                self.slice = self.slice.clone()
        self.is_open = True

    def fill(self) -> torch.Tensor:
        """Return the bucket with all gradients of this rank in it; the parameters get placeholders."""
        self.follow_users()
        if not self.is_open:
            self.open()
        flat, params = self._flat, self.bucket.params
        assert flat is not None
        for index, (param, view) in enumerate(zip(params, self.views, strict=True)):
            grad = param.grad
            if grad is None or grad is self.placeholders[index]:
                view.zero_()
                continue
            self.seen.add(index)
            if grad is not view:  # assigned by a user
                if grad.layout is not torch.strided:
                    raise sparse_gradient(param)
                view.copy_(grad)
        for index, (param, placeholder) in enumerate(zip(params, self.placeholders, strict=True)):
            if placeholder is None:
                placeholder = self.placeholders[index] = GradPlaceholder(param, self.bucket.grad_dtype)
            placeholder.is_zeroed = False
            param.grad = placeholder
        self.placed.update(range(len(params)))
        self._covered.clear()
        self.is_lifted = False
        if not self._is_kept:
            self._release()
        return flat

    @torch.no_grad()
    def add_mean(self, finish: Finish, flat: torch.Tensor) -> None:
        """Add this rank's section of the mean of `flat`, the gradients that `fill` returned."""
        begin, end = self.bucket.bounds[self._rank]
        # `finish` waits for the sections of the other ranks; then `flat` goes with its last reference.
        if self.slice is not None:
            is_exact = flat.dtype.itemsize >= torch.float32.itemsize
            self.slice += finish(flat[begin:end] if is_exact else None)
        elif self._is_kept:
            self.slice = finish(flat[begin:end])
            self.is_open = False  # the mean is where new gradients go
        elif self._keep is None:
            self.slice = finish(None).to(self.bucket.grad_dtype)
        else:
            self.slice = finish(None)
        self._blank.clear()
        if self._keep is not None:
            self.slice = self._keep(self.bucket, self.slice)

    @torch.no_grad()
    def scale(self, factor: float, *, besides: Collection[torch.Tensor]) -> None:
        """Multiply the slice, and whole gradients that no round has averaged; of some parameters neither."""
        chosen = self._all_besides(besides)
        if len(chosen) == len(self.bucket.params) and self.slice is not None:
            self.slice *= factor
        elif self.slice is not None:
            for index in chosen:
                self._part(self.slice, index).mul_(factor)
        for index in chosen:
            grad = self.bucket.params[index].grad
            if grad is not None and grad is not self.placeholders[index]:
                grad *= factor

    def forget(self, *, set_to_none: bool, besides: Collection[torch.Tensor]) -> None:
        """Drop the slice, and whole gradients, or make them zero; of some parameters neither."""
        chosen = self._all_besides(besides)
        for index in chosen:
            param = self.bucket.params[index]
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()
        if besides or not set_to_none:
            self.follow_users()
        self.arrived.difference_update(chosen)
        if set_to_none:
            self.seen.difference_update(chosen)
            self.placed.difference_update(chosen)
            self._covered.difference_update(chosen)
            self.drop(chosen)
            if self.slice is None and not self._is_kept:
                self._release()
        elif self.slice is not None:
            for index in chosen:
                self._part(self.slice, index).zero_()

    def drop(self, indices: Iterable[int]) -> None:
        """Let the slice have nothing of the means of some parameters; it goes when it has nothing at all."""
        self._blank.update(indices)
        if len(self._blank) == len(self.bucket.params):
            self.slice = None
            self._blank.clear()
        elif self.slice is not None:
            for index in self._blank:
                self._part(self.slice, index).zero_()

    def lift(self) -> None:
        """Take placeholders away before a backward; `lower` follows it."""
        for index in self.placed:
            if self.bucket.params[index].grad is self.placeholders[index]:
                self.bucket.params[index].grad = None
        self.is_lifted = True

    def lower(self) -> None:
        """Give placeholders back after a backward to the parameters that it gave nothing."""
        if not self.is_lifted:
            return
        self.is_lifted = False
        for index in self.placed:
            if self.bucket.params[index].grad is None:
                self.bucket.params[index].grad = self.placeholders[index]
            else:
                self._covered.add(index)

    def take_added(self, index: int) -> None:
        """Move the gradient that an unannounced backward added to a placeholder to its parameter."""
        param, placeholder = self.bucket.params[index], self.placeholders[index]
        assert placeholder is not None
        if param.grad is placeholder and placeholder.added is not None:
            param.grad, placeholder.added = placeholder.added, None
        if self._is_real(index):
            self._covered.add(index)

    def withdraw(self, indices: Iterable[int]) -> None:
        """Let parameters have no gradient in the place of their placeholder, since no rank has one."""
        for index in self.placed.intersection(indices):
            self.placed.discard(index)
            if self.bucket.params[index].grad is self.placeholders[index]:
                self.bucket.params[index].grad = None

    @torch.no_grad()
    def follow_users(self) -> None:
        """Apply the user's changes of placeholders to the mean; see [Note: placeholders of gradients].

        Raises:
            ValueError: A hook of the user's has added to a placeholder during a backward.
        """
        if self.is_lifted:
            return
        gone, zeroed = [], []
        for index in self.placed:
            placeholder, grad = self.placeholders[index], self.bucket.params[index].grad
            assert placeholder is not None
            if grad is None or (grad is not placeholder and index not in self._covered):
                gone.append(index)
            elif placeholder.added is not None:
                placeholder.added = None
                raise refused("an addition", placeholder)
            elif placeholder.is_zeroed:
                placeholder.is_zeroed = False
                zeroed.append(index)
        if not gone and not zeroed:
            return
        self.placed.difference_update(gone)
        self._covered.difference_update(gone)
        self.seen.difference_update(gone)
        self.drop(gone)
        if self.slice is not None:
            for index in zeroed:
                self._part(self.slice, index).zero_()
        for listener in self.listeners:
            listener([self.bucket.params[n] for n in gone], [self.bucket.params[n] for n in zeroed])

    def _is_real(self, index: int) -> bool:
        """Return whether a parameter has a gradient that is not a placeholder."""
        grad = self.bucket.params[index].grad
        return grad is not None and grad is not self.placeholders[index]

    def _all_besides(self, params: Collection[torch.Tensor]) -> Sequence[int]:
        own = self.bucket.params
        return range(len(own)) if not params else [n for n, param in enumerate(own) if param not in params]

    def _part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        begin, end = self.bucket.place(index, self._rank)
        return flat[begin:end]

    def _release(self) -> None:
        """Free the memory of whole gradients; a send in flight keeps it until it is complete."""
        self._flat, self.views, self.is_open = None, [], False
