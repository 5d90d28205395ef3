"""Gradients averaged over replicas bucket by bucket while the backward runs; each rank keeps a slice.

The rules of the order in which buckets start are those of `colossalai.nn.parallel`: all ranks start them in
the same order, so a full bucket behind an incomplete one waits, at worst until `flush`.

[Note: rounds]
A round ends with `flush`, which averages the remaining buckets. In a round each bucket is averaged once, as
soon as it is full if backwards synchronize. The means of several rounds add up in the slices until `forget`.
With stage 1 the full gradients of a round stay in permanent buckets; a round can last over many backwards.
With stage 2 a bucket has memory only from its first gradient until its mean is there, and every backward is a
round.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge

from colossalai.communication import all_reduce_in_place
from colossalai.context import Axis
from colossalai.nn.parallel import call_on_grad, sparse_gradient
from colossalai.zero._bucket_grads import BucketGrads, KeepMean
from colossalai.zero._exchange import start_mean
from colossalai.zero._layout import FlatBucket


class ShardedReducer:
    """Reducer of the gradients of a model in parts, which keeps this rank's slices of the means.

    See [Note: rounds].

    Args:
        parts: The buckets of each part, which has a last backward of its own.
        late: Buckets that are complete at `flush` only.
        replicas: The ranks that see different parts of the batch.
        stage: 1 or 2.
        overlap: Start buckets during the backward; False: at its end.
        dtype: Dtype of the messages; None: the dtype of the gradients.
        on_full: Called with a bucket when all its gradients have come; None: nothing is called.
        keep: Called with a bucket and this rank's slice of the mean; converts it to its stored form.
        max_in_flight: Buckets that are averaged at a time; a 16-bit one has receive buffers, together nearly
            as large as it is.

    Attributes:
        all_grads: The gradients of all buckets, part by part, and then the late ones.
        on_grad: Called with a bucket of which a gradient has come; None: nothing is called.
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
        on_full: Callable[[FlatBucket], None] | None = None,
        keep: KeepMean | None = None,
        max_in_flight: int = 2,
    ) -> None:
        self._replicas = replicas
        self._max_in_flight = max_in_flight
        self.on_grad: Callable[[FlatBucket], None] | None = None
        self._on_full = on_full
        self._nodes: list[Node] = []  # those of `await_nodes`: a parameter alone does not keep its own
        self._num_holds = 0
        self._stage = stage
        self._overlap = overlap
        self._dtype = dtype

        def grads_of(buckets: Sequence[FlatBucket]) -> list[BucketGrads]:
            return [BucketGrads(bucket, is_kept=stage == 1, keep=keep) for bucket in buckets]

        self._parts = [grads_of(buckets) for buckets in parts]
        self._late = grads_of(late)
        self.all_grads = (*(grads for part in self._parts for grads in part), *self._late)
        for number, grads in enumerate(self.all_grads):
            for index, param in enumerate(grads.bucket.params):
                call_on_grad(param, _on_grad, self, number, index)
        self._queue: deque[BucketGrads] = deque()
        self._queued_parts: set[int] = set()
        self._started: set[BucketGrads] = set()
        self._in_flight: deque[Callable[[], None]] = deque()
        self._is_dirty = True  # whether there may be gradients, on any rank, that no round has averaged
        self._ran = False  # whether a backward that averages began in this round
        self._enqueue_all()

    def before_backward(self) -> None:
        """Begin a new round if the backward before has averaged; collective."""
        if self._ran:
            self.flush()
        self.follow_users()  # after the means in flight have arrived
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.lift()
        self._is_dirty = True
        self._ran = bool(self._queued_parts)

    def after_backward(self, *, has_failed: bool = False) -> None:
        """End `before_backward`; start the remaining buckets of a backward that averages; collective.

        Args:
            has_failed: Whether the backward has raised; nothing is started then.
        """
        if self._ran and not has_failed:
            self._start_rest()  # a rank whose backward has failed sends nothing
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self.all_grads:
                grads.lower()

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Set whether the following backwards average; with stage 2 they always do.

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
        """Average the remaining buckets, wait for all, and begin a new round; collective over replicas."""
        self._start_rest()
        while self._in_flight:
            self._in_flight.popleft()()  # wait for the mean, in the order in which they were started
        for grads in self.all_grads:
            grads.arrived.clear()
        self._started.clear()
        self._forget_queue()
        self._enqueue_all()
        self._is_dirty = self._ran = False

    def follow_users(self) -> None:
        """Apply the user's changes of gradients to the means; see [Note: placeholders of gradients]."""
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
        gradient: a missing one is zero.
        """
        find_reducer = weakref.ref(self)  # as in `call_on_grad`
        with torch._C.DisableTorchFunctionSubclass():
            for number, grads in enumerate(self.all_grads):
                for index, param in enumerate(grads.bucket.params):
                    node = get_gradient_edge(param).node
                    node.register_hook(partial(_at_node, find_reducer, number, index))
                    self._nodes.append(node)

    def hold(self) -> None:
        """Until `release`, gradients are taken, but after `await_nodes` none counts as arrived."""
        self._num_holds += 1

    def release(self) -> None:
        """End `hold`."""
        self._num_holds -= 1

    def scale(self, factor: float, *, besides: Collection[torch.Tensor] = ()) -> None:
        """Multiply all gradients but those of some parameters, between two backwards."""
        assert not self._started
        for grads in self.all_grads:
            grads.scale(factor, besides=besides)

    def forget(self, *, set_to_none: bool, besides: Collection[torch.Tensor] = ()) -> None:
        """Forget all gradients but those of some parameters; collective."""
        if self._ran or self._started:
            self.flush()  # started buckets have to be completed
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
        # One byte for each parameter, over the replicas; between the means and the update.
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

    def _after_arrival(self, grads: BucketGrads) -> None:
        """Start the buckets at the head of the queue that are full, after a gradient has arrived in one."""
        if self.on_grad is not None:
            self.on_grad(grads.bucket)
        if len(grads.arrived) < len(grads.placeholders):
            return
        if self._on_full is not None:
            self._on_full(grads.bucket)
        while self._queue and len(self._queue[0].arrived) == len(self._queue[0].placeholders):
            self._start(self._queue.popleft())

    def _start(self, grads: BucketGrads) -> None:
        if len(self._in_flight) == self._max_in_flight:
            self._in_flight.popleft()()  # wait for the oldest mean, and free its buffers
        flat = grads.fill()
        # Joined by all ranks that hold the bucket, in the order of the queue: each sends its gradients.
        mean = start_mean(flat, grads.bucket, self._dtype)
        self._started.add(grads)
        self._in_flight.append(partial(grads.add_mean, mean, flat))


def _on_grad(
    find_reducer: "weakref.ref[ShardedReducer]", number: int, index: int, param: torch.Tensor
) -> None:
    """Called by autograd when a backward has added to the gradient of a parameter.

    Args:
        find_reducer: Returns the reducer, if it is still there.
        number: The number of the bucket.
        index: The number of the parameter in the bucket.
        param: The parameter.
    """
    reducer = find_reducer()
    if reducer is None:
        return
    grads = reducer.all_grads[number]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter in a chunk answers in Python, ten times
        if grads in reducer._started:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} got a gradient after its average was started: "
                "run backwards by optimizer.backward(loss), booster.backward(loss, optimizer) or "
                "engine.backward(loss), and pass use_reentrant=False to torch.utils.checkpoint, which "
                "otherwise adds several times to shared weights"
            )
        if index in grads.placed and not grads.is_lifted:
            grads.take_added(index)
        grad = param.grad
        if grad is not None and grad is not grads.placeholders[index]:  # a function may return none for it
            if not grads.is_open:
                grads.open()
            view = grads.views[index]
            if grad is not view:  # moved into the bucket while it is in the cache
                if grad.layout is not torch.strided:
                    raise sparse_gradient(param)
                view.copy_(grad)
                param.grad = view
        if reducer._nodes:
            return  # parameters arrive when the backward is through their nodes
        grads.arrived.add(index)
        if reducer.on_grad is not None or len(grads.arrived) == len(grads.placeholders):
            reducer._after_arrival(grads)


def _at_node(find_reducer: "weakref.ref[ShardedReducer]", number: int, index: int, *_: object) -> None:
    """Called by autograd when a backward is through with a parameter, which may have got nothing.

    Args:
        find_reducer: Returns the reducer, if it is still there.
        number: The number of the bucket.
        index: The number of the parameter in the bucket.
    """
    reducer = find_reducer()
    if reducer is None:
        return
    grads = reducer.all_grads[number]
    if reducer._num_holds == 0 and grads not in reducer._started:
        grads.arrived.add(index)
        reducer._after_arrival(grads)
