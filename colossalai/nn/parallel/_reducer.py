"""Gradients averaged over replicas, bucket by bucket, during the backward that computes them.

[Note: the order of buckets]
All ranks must start the all-reduces of a group in the same order, but gradients may come in another order on
another rank, or not at all. So buckets wait in a queue, and only its head may start: a full bucket behind an
incomplete one waits, at worst until `finish`. The buckets of a part of the model join the queue when `join`
is called for that part, which all ranks do in the same order.

[Note: marks]
A parameter may have no gradient here and one on another replica; then its average is that of zero and the
others'. Without one on any replica it must get none: an optimizer would decay it, or move it by its
momentum. So the gradients of a bucket are followed by a mark for each parameter, 1 if it has a gradient, and
the all-reduce adds up the marks along with the gradients.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from colossalai.communication import start_all_reduce
from colossalai.context import Axis
from colossalai.nn.parallel._buckets import Bucket, EarlierMeans, call_on_grad, make_buckets, sparse_gradient


class GradReducer:
    """Averages the gradients of a model cut into parts; gradients are views of its buckets.

    Args:
        parts: The parts, each of which has a last backward of its own; a parameter may be in several.
        replicas: The ranks that see different parts of the batch.
        cap_bytes: Size of a bucket.
        overlap: Start buckets during the backward; False: in `finish` only.
    """

    def __init__(self, parts: Sequence[nn.Module], replicas: Axis, *, cap_bytes: int, overlap: bool) -> None:
        self._overlap = overlap
        self._replicas, self._cap_bytes = replicas, cap_bytes
        params = (param for part in parts for param in part.parameters())
        self._frozen = dict.fromkeys(param for param in params if not param.requires_grad)
        own, shared = _trainable(parts)
        self._buckets_of = [make_buckets(params, replicas, cap_bytes=cap_bytes) for params in own]
        self._buckets: list[Bucket] = []
        for buckets in self._buckets_of:
            self._add(buckets)
        # Those of parameters that parts share are complete after the last part only.
        self._add(make_buckets(shared, replicas, cap_bytes=cap_bytes))
        self._queue: list[Bucket] = []
        self._arrived: dict[Bucket, set[int]] = {}  # of the buckets in the queue
        self._started: dict[Bucket, Callable[[], object]] = {}
        self._synced: set[int] = set()  # parts whose buckets are, or were, in the queue
        self._means = EarlierMeans((param for bucket in self._buckets for param in bucket.params), replicas)
        self._sync_all()

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """Set whether the backwards from now on are the last ones before `finish`.

        Args:
            enabled: Whether they are.
            part: Of this part; default: of all.

        Raises:
            ValueError: `enabled` is False after buckets were started.
        """
        if not enabled:
            if self._started:
                raise ValueError(
                    "synchronization is switched off while gradients are being averaged: call finish first"
                )
            self._forget()
        elif part is None:
            self._sync_all()
        elif part not in self._synced:
            self._enqueue(part)

    def finish(self) -> None:
        """Average the remaining gradients, and wait for all; every later backward is a last one again."""
        self._take_unfrozen()
        begun = {*self._started, *self._queue}
        for bucket in (*self._queue, *(bucket for bucket in self._buckets if bucket not in begun)):
            self._start(bucket)
        for bucket, wait in self._started.items():
            wait()  # until the flat memory has the means of all ranks
            missing = [index for index, param in enumerate(bucket.params) if param.grad is None]
            marks = bucket.marks.tolist() if missing else []
            for index in missing:
                if marks[index] > 0:  # another replica has one; see [Note: marks]
                    bucket.params[index].grad = bucket.views[index]
            for param in bucket.params if self._means.factors else ():
                self._means.note(param)
        self._started = {}
        self._forget()
        self._sync_all()

    def _take_unfrozen(self) -> None:
        """Lay out buckets for parameters that have become trainable since the last `finish`."""
        params = [param for param in self._frozen if param.requires_grad]
        if not params:
            return
        for param in params:
            del self._frozen[param]
        buckets = make_buckets(params, self._replicas, cap_bytes=self._cap_bytes)
        self._means.track(params)
        self._add(buckets)

    def _add(self, buckets: Sequence[Bucket]) -> None:
        for number, bucket in enumerate(buckets, len(self._buckets)):
            for index, param in enumerate(bucket.params):
                call_on_grad(param, _on_grad, self, number, index)
        self._buckets += buckets

    def _sync_all(self) -> None:
        for part in range(len(self._buckets_of)):
            if part not in self._synced:
                self._enqueue(part)

    def _enqueue(self, part: int) -> None:
        self._synced.add(part)
        if self._overlap:
            self._queue += self._buckets_of[part]
            self._arrived.update({bucket: set() for bucket in self._buckets_of[part]})

    def _forget(self) -> None:
        self._queue = []
        self._arrived = {}
        self._synced = set()

    def _start(self, bucket: Bucket) -> None:
        """Begin to average a bucket: the one place where gradients are divided."""
        bucket.marks.fill_(1.0)
        for index, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
            grad = param.grad
            if grad is None:
                view.zero_()
                bucket.marks[index] = 0.0
            elif grad is not view:  # assigned by a user
                if grad.layout is not torch.strided:
                    raise sparse_gradient(param)
                view.copy_(grad)
                param.grad = view
        for param in bucket.params if self._means.factors else ():
            if param.grad is not None:
                self._means.scale(param, param.grad)
        bucket.flat.div_(bucket.sync.divisor)  # before the sum: float16 has little room above
        # Joined by all ranks that hold the bucket, in the same order: see [Note: the order of buckets].
        self._started[bucket] = start_all_reduce(bucket.flat, bucket.sync.axis)


def _on_grad(find_reducer: "weakref.ref[GradReducer]", number: int, index: int, param: torch.Tensor) -> None:
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
    bucket = reducer._buckets[number]
    if bucket in reducer._started:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} got a gradient after its average was started: "
            "switch synchronization on right before the last backward, and pass use_reentrant=False to "
            "torch.utils.checkpoint, which otherwise adds several times to shared weights"
        )
    grad, view = param.grad, bucket.views[index]
    if grad is not None and grad is not view:  # a function may return none for it: zeros then
        if grad.layout is not torch.strided:
            raise sparse_gradient(param)
        view.copy_(grad)
        param.grad = view
    arrived = reducer._arrived.get(bucket)
    if arrived is None:
        return
    arrived.add(index)
    # See [Note: the order of buckets].
    queue = reducer._queue
    while queue and len(reducer._arrived[queue[0]]) == len(queue[0].params):
        reducer._start(queue.pop(0))


def _trainable(parts: Sequence[nn.Module]) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """Return the trainable parameters of each part alone, and those in several; the last ones first."""
    params_of = [[param for param in part.parameters() if param.requires_grad] for part in parts]
    num_parts: dict[nn.Parameter, int] = {}
    for params in params_of:
        for param in params:
            num_parts[param] = num_parts.get(param, 0) + 1
    own = [[param for param in reversed(params) if num_parts[param] == 1] for params in params_of]
    return own, [param for param in reversed(num_parts) if num_parts[param] > 1]
