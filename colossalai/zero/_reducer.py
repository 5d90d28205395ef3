"""Gradients averaged over replicas bucket by bucket while the backward runs; each rank keeps a slice.

The rules of the order in which buckets start are those of `colossalai.nn.parallel`: all ranks start them in
the same order, so a full bucket behind one that is not full waits, at worst until `flush`.

[Note: rounds]
A round ends with `flush`, which averages whatever has not been yet. In a round each bucket is averaged once,
as soon as it is full if backwards synchronize. The means of several rounds add up in the slices until
`forget`. With stage 1 the full gradients of a round stay in buckets that are kept for ever; a round may last
over many backwards. With stage 2 a bucket has memory only from its first gradient until its mean is there,
and every backward is a round.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from colossalai.communication import all_reduce_in_place, empty_to_send
from colossalai.context import Axis
from colossalai.nn.parallel import adopt_grad, call_on_grad
from colossalai.zero._exchange import Finish, start_mean
from colossalai.zero._layout import FlatBucket
from colossalai.zero._placeholder import BucketPlaceholders

KeepMean = Callable[[FlatBucket, torch.Tensor], torch.Tensor]


class BucketGrads:
    """The gradients of a bucket: full ones of this rank, and its slice of the mean.

    Args:
        bucket: The layout.
        is_kept: Whether the memory of full gradients is kept between rounds.
        keep: Returns a slice as it is to be kept, in another dtype or place; None: in that of the gradients.
    """

    def __init__(self, bucket: FlatBucket, *, is_kept: bool, keep: KeepMean | None = None) -> None:
        self.bucket = bucket
        self._keep = keep
        self.slice: torch.Tensor | None = None
        self.seen: set[int] = set()  # parameters that have had a gradient here since `forget`
        self.arrived: set[int] = set()  # in this round
        self._rank = bucket.axis.rank
        self._blank: set[int] = set()  # parameters of whose means the slice has nothing, but zeros
        self._is_kept = is_kept
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []  # of `_flat`, one for each parameter
        self.placeholders = BucketPlaceholders(bucket.params, bucket.grad_dtype)
        # Called with parameters that have lost their mean, and with those whose mean has become zero.
        self.listeners: list[Callable[[list[nn.Parameter], list[nn.Parameter]], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "listeners": []}  # a copy of the model has no optimizer

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this round have arrived."""
        return len(self.arrived) == len(self.bucket.params)

    @property
    def has_new(self) -> bool:
        """Whether there are gradients that no round has averaged."""
        return any(map(self.placeholders.is_real, range(len(self.bucket.params))))

    def adopt(self, index: int) -> None:
        """Move the gradient of a parameter into the bucket while it is in the cache."""
        self._memory()
        adopt_grad(self.bucket.params[index], self._views[index])

    def fill(self) -> torch.Tensor:
        """Return the bucket with all gradients of this rank in it; the parameters get placeholders."""
        self.follow_users()
        flat = self._memory()
        for index in range(len(self.bucket.params)):
            if self.placeholders.is_real(index):
                self.adopt(index)
                self.seen.add(index)
            else:
                self._views[index].zero_()
        self.placeholders.put()
        if not self._is_kept:
            self._release()
        return flat

    @torch.no_grad()
    def add_mean(self, finish: Finish, flat: torch.Tensor) -> None:
        """Add this rank's section of a mean; `flat` is what `fill` has returned, of which it is the mean."""
        if self.slice is not None:
            is_exact = flat.dtype.itemsize >= torch.float32.itemsize
            self.slice += finish(self.bucket.section(flat, self._rank) if is_exact else None)
        elif self._is_kept:
            self.slice = finish(self.bucket.section(flat, self._rank))
        elif self._keep is None:
            self.slice = finish(None).to(self.bucket.grad_dtype)
        else:
            self.slice = finish(None)
        self._blank.clear()
        if self._keep is not None:
            self.slice = self._keep(self.bucket, self.slice)

    @torch.no_grad()
    def scale(self, factor: float, *, besides: Collection[torch.Tensor]) -> None:
        """Multiply the slice, and full gradients that no round has averaged; of some parameters neither."""
        chosen = self._all_besides(besides)
        if len(chosen) == len(self.bucket.params) and self.slice is not None:
            self.slice *= factor
        elif self.slice is not None:
            for index in chosen:
                self._part(self.slice, index).mul_(factor)
        for index in chosen:
            grad = self.bucket.params[index].grad
            if grad is not None and self.placeholders.is_real(index):
                grad *= factor

    @torch.no_grad()
    def follow_users(self) -> None:
        """Let the mean follow what users have done to placeholders; see [Note: placeholders of gradients]."""
        gone, zeroed = self.placeholders.changed()
        if not gone and not zeroed:
            return
        self.seen.difference_update(gone)
        self.drop(gone)
        if self.slice is not None:
            for index in zeroed:
                self._part(self.slice, index).zero_()
        for listener in self.listeners:
            listener([self.bucket.params[n] for n in gone], [self.bucket.params[n] for n in zeroed])

    def forget(self, *, set_to_none: bool, besides: Collection[torch.Tensor]) -> None:
        """Drop the slice, and full gradients, or make them zero; of some parameters neither."""
        chosen = self._all_besides(besides)
        for index in chosen:
            param = self.bucket.params[index]
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()
        self.follow_users()
        self.arrived.difference_update(chosen)
        if set_to_none:
            self.seen.difference_update(chosen)
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

    def _all_besides(self, params: Collection[torch.Tensor]) -> Sequence[int]:
        own = self.bucket.params
        return range(len(own)) if not params else [n for n, param in enumerate(own) if param not in params]

    def _part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        begin, end = self.bucket.place(index, self._rank)
        return flat[begin:end]

    def _memory(self) -> torch.Tensor:
        if self._flat is None:
            bucket = self.bucket
            flat = empty_to_send(
                bucket.numel,
                dtype=bucket.grad_dtype,
                device=bucket.params[0].device,
                parallel_mode=bucket.axis,
            )
            flat[bucket.num_used :].zero_()
            self._flat, self._views = flat, bucket.views(flat)
        elif self.slice is not None and self.slice.data_ptr() == self._own_ptr():
            self.slice = self.slice.clone()  # an earlier mean, where new gradients go
        return self._flat

    def _release(self) -> None:
        self._flat, self._views = None, []

    def _own_ptr(self) -> int:
        assert self._flat is not None
        return self.bucket.section(self._flat, self._rank).data_ptr()


class ShardedReducer:
    """What averages the gradients of a model cut into parts, and keeps this rank's slices of the means.

    See [Note: rounds].

    Args:
        parts: The buckets of each part, which has a last backward of its own.
        late: Buckets that are complete at `flush` only.
        replicas: The ranks that see different parts of the batch.
        stage: 1 or 2.
        overlap: Start buckets during the backward; False: at its end.
        dtype: What is sent; None: gradients as they are.
        on_grad: Called with a bucket of which a gradient has come, and whether all have.
        keep: Called with a bucket and this rank's slice of the mean; returns it as it is to be kept.
        most_under_way: Buckets that are averaged at a time; a 16-bit one has receive buffers, together nearly
            as large as it is.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[FlatBucket]],
        late: Sequence[FlatBucket],
        replicas: Axis,
        *,
        stage: int,
        overlap: bool,
        dtype: torch.dtype | None,
        on_grad: Callable[[FlatBucket, bool], None] | None = None,
        keep: KeepMean | None = None,
        most_under_way: int = 2,
    ) -> None:
        self._replicas = replicas
        self._most_under_way = most_under_way
        self._told = on_grad
        self._nodes: list[Node] = []  # those of `await_nodes`: a parameter alone does not keep its own
        self._num_holds = 0
        self._stage = stage
        self._overlap = overlap
        self._dtype = dtype

        def grads_of(buckets: Sequence[FlatBucket]) -> list[BucketGrads]:
            return [BucketGrads(bucket, is_kept=stage == 1, keep=keep) for bucket in buckets]

        self._parts = [grads_of(buckets) for buckets in parts]
        self._late = grads_of(late)
        self._place: dict[torch.Tensor, tuple[BucketGrads, int]] = {}
        for grads in self.all_grads:
            for index, param in enumerate(grads.bucket.params):
                self._place[param] = (grads, index)
                call_on_grad(param, self, ShardedReducer._on_grad)
        self._queue: deque[BucketGrads] = deque()
        self._queued_parts: set[int] = set()
        self._started: set[BucketGrads] = set()
        self._under_way: deque[Callable[[], None]] = deque()
        self._is_dirty = True  # whether there may be gradients, on any rank, that no round has averaged
        self._ran = False  # whether a backward that averages began in this round
        self._enqueue_all()

    @property
    def all_grads(self) -> list[BucketGrads]:
        """The gradients of all buckets."""
        return [*(grads for part in self._parts for grads in part), *self._late]

    def before_backward(self) -> None:
        """Begin a new round if the backward before has averaged; collective."""
        if self._ran:
            self.flush()
        self.follow_users()  # after means that were under way have come
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.placeholders.lift()
        self._is_dirty = True
        self._ran = bool(self._queued_parts)

    def after_backward(self, *, has_failed: bool = False) -> None:
        """End what `before_backward` has begun; start what a backward that averages has left; collective.

        Args:
            has_failed: Whether the backward has raised; nothing is started then.
        """
        if self._ran and not has_failed:
            self._start_rest()
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.placeholders.lower()

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Say whether the backwards from now on average; with stage 2 they always do.

        Args:
            enabled: Whether they do.
            part: Of this part; default: of all.

        Raises:
            ValueError: `enabled` is False after buckets were started.
        """
        self._is_dirty = True
        if self._stage == 2 or (enabled and part is None):
            self._enqueue_all()
        elif enabled:
            assert part is not None
            self._enqueue(part)
        else:
            if self._ran:
                self.flush()
            if self._started:
                raise ValueError(
                    "synchronization is switched off while gradients are being averaged: call finish first"
                )
            self._forget_queue()

    def flush(self) -> None:
        """Average what has not been, wait for all, and begin a new round; collective over the replicas."""
        self._start_rest()
        while self._under_way:
            self._under_way.popleft()()
        for grads in self.all_grads:
            grads.arrived.clear()
        self._started.clear()
        self._forget_queue()
        self._enqueue_all()
        self._is_dirty = self._ran = False

    def follow_users(self) -> None:
        """Let the means follow what users have done to gradients; see [Note: placeholders of gradients]."""
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.follow_users()

    def finish(self) -> None:
        """Flush unless nothing can have come since the last time.

        Raises:
            ValueError: A gradient has come of a backward that was not announced, or was assigned.
        """
        if self._is_dirty or self._started:
            self.flush()
            self.follow_users()
            return
        self.follow_users()
        if any(grads.has_new for grads in self.all_grads):
            raise ValueError(
                "there are gradients that were assigned by hand, or of a backward that was not announced: "
                "run it by optimizer.backward(loss), booster.backward(loss, optimizer) or "
                "engine.backward(loss)"
            )

    def await_nodes(self) -> None:
        """Let parameters count as arrived when a backward has been through their nodes of the graph.

        That is at the same point on all ranks, if the graph leads there on all, whether or not there is a
        gradient: what is not there is zero.
        """
        find_reducer = weakref.ref(self)  # as in `call_on_grad`

        def call(param: torch.Tensor, *_: object) -> None:
            living = find_reducer()
            if living is not None:
                living._at_node(param)

        with torch._C.DisableTorchFunctionSubclass():
            for param in self._place:
                node = get_gradient_edge(param).node
                node.register_hook(partial(call, param))
                self._nodes.append(node)

    def hold(self) -> None:
        """Until `release`, gradients are taken, but after `await_nodes` none counts as arrived."""
        self._num_holds += 1

    def release(self) -> None:
        """End what `hold` has begun."""
        self._num_holds -= 1

    def scale(self, factor: float, *, besides: Collection[torch.Tensor] = ()) -> None:
        """Multiply all gradients but those of some parameters, between two backwards."""
        assert not self._started
        for grads in self.all_grads:
            grads.scale(factor, besides=besides)

    def forget(self, *, set_to_none: bool, besides: Collection[torch.Tensor] = ()) -> None:
        """Forget all gradients but those of some parameters; collective."""
        if self._ran or self._started:
            self.flush()  # what has been started has to be ended
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.forget(set_to_none=set_to_none, besides=besides)
        self._is_dirty = True

    def marks(self) -> list[bool]:
        """Return for each parameter, bucket by bucket, whether any replica has had a gradient; collective."""
        here = [index in grads.seen for grads in self.all_grads for index in range(len(grads.bucket.params))]
        if self._replicas.size == 1 or not here:
            return here
        marks = torch.tensor(here, dtype=torch.uint8, device=self.all_grads[0].bucket.params[0].device)
        return all_reduce_in_place(marks, self._replicas, dist.ReduceOp.MAX).bool().tolist()

    def _start_rest(self) -> None:
        """Start the buckets of this round that have not been started, in the same order on all ranks."""
        for grads in (*self._queue, *self._late, *self._unqueued()):
            if grads not in self._started:
                self._start(grads)
        self._queue.clear()

    def _unqueued(self) -> list[BucketGrads]:
        return [
            grads
            for number, part in enumerate(self._parts)
            if number not in self._queued_parts or not self._overlap
            for grads in part
        ]

    def _enqueue_all(self) -> None:
        for part in range(len(self._parts)):
            self._enqueue(part)

    def _enqueue(self, part: int) -> None:
        if part not in self._queued_parts:
            self._queued_parts.add(part)
            if self._overlap:
                self._queue += self._parts[part]
                for grads in self._parts[part]:  # of earlier backwards: they have to come once more
                    grads.arrived.clear()

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._queued_parts.clear()

    def _on_grad(self, param: torch.Tensor) -> None:
        """Called by autograd when a backward has added to the gradient of a parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # a parameter in a chunk answers in Python, ten times
            self._take(param)

    def _take(self, param: torch.Tensor) -> None:
        grads, index = self._place[param]
        if grads in self._started:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} got a gradient after its average was under way: "
                "run backwards by optimizer.backward(loss), booster.backward(loss, optimizer) or "
                "engine.backward(loss), and pass use_reentrant=False to torch.utils.checkpoint, which "
                "otherwise adds several times to shared weights"
            )
        if grads.placeholders.take_grad(index):  # a function may return none for it: zeros then
            grads.adopt(index)
        if not self._nodes:
            self._arrive(grads, index)

    def _at_node(self, param: torch.Tensor) -> None:
        """Called by autograd when a backward is through with a parameter, which may have got nothing."""
        grads, index = self._place[param]
        if self._num_holds == 0 and grads not in self._started:
            self._arrive(grads, index)

    def _arrive(self, grads: BucketGrads, index: int) -> None:
        grads.arrived.add(index)
        if self._told is not None:
            self._told(grads.bucket, grads.is_full)
        while self._queue and self._queue[0].is_full:
            self._start(self._queue.popleft())

    def _start(self, grads: BucketGrads) -> None:
        if len(self._under_way) == self._most_under_way:
            self._under_way.popleft()()
        flat = grads.fill()
        mean = start_mean(flat, grads.bucket, self._dtype)
        self._started.add(grads)
        self._under_way.append(lambda: grads.add_mean(mean, flat))
