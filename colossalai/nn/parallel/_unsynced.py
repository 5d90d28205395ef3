"""Gradients that the reducer of `DistributedDataParallel` does not average: noticed, and averaged after them.

[Note: gradients that torch's reducer does not take]
Torch's reducer takes the gradients of one backward after a forward of its wrapper, of parameters that were
trainable when it was made. After the loss of another method (`model.compute_loss(x)`), after the second
backward of two forwards, and in layers that were unfrozen since, each rank has gradients of its own. A hook
on every parameter notices these, and at the end of the backward all gradients of that reducer are averaged.
Those that are means already keep their values, which are the same on all ranks. All ranks run the same
backwards, so they notice the same.
"""

from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import nn

from colossalai.communication import start_all_reduce
from colossalai.context import Axis
from colossalai.nn.parallel._buckets import EarlierMeans, call_on_grad, make_buckets

CAP_BYTES = 25 * 2**20


@final
class UnsyncedGrads:
    """Notices gradients of some parameters that no reducer takes, and averages all of theirs.

    See [Note: gradients that torch's reducer does not take].

    Args:
        params: The parameters, trainable or not.
        replicas: The ranks that see different parts of the batch.
        means: Of the same parameters.
        syncs: Returns whether backwards average now.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        replicas: Axis,
        means: EarlierMeans,
        *,
        syncs: Callable[[], bool],
    ) -> None:
        self._params = tuple(params)
        self._replicas = replicas
        self._means = means
        self._syncs = syncs
        self._expected: set[torch.Tensor] = set()  # what a reducer takes in the next backward
        self._graph_task: int | None = None  # the backward at whose end gradients are averaged
        for param in self._params:
            is_frozen = not param.requires_grad
            if is_frozen:
                param.requires_grad_(True)  # or torch takes no hook
            call_on_grad(param, self, UnsyncedGrads._on_grad)
            param.requires_grad_(not is_frozen)

    def expect(self) -> None:
        """Leave the gradients of the next backward, one of each parameter, to a reducer."""
        self._expected.update(self._params)

    def _on_grad(self, param: torch.Tensor) -> None:
        if param in self._expected:
            self._expected.discard(param)
        elif self._syncs():
            task = torch._C._current_graph_task_id()
            if task != self._graph_task:
                self._graph_task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients of all parameters; collective over the ranks that hold them."""
        self._graph_task = None
        trainable = [param for param in self._params if param.requires_grad]
        self._means.track(trainable)
        for bucket in make_buckets(trainable, self._replicas, cap_bytes=CAP_BYTES):
            bucket.marks.fill_(1.0)
            for index, (param, view) in enumerate(zip(bucket.params, bucket.views, strict=True)):
                if param.grad is None:
                    bucket.marks[index] = 0.0
                    continue
                _check_dense(param)
                view.copy_(param.grad)
                self._means.scale(param, view)
            bucket.flat.div_(bucket.sync.divisor)
            start_all_reduce(bucket.flat, bucket.sync.axis)()
            marks = bucket.marks.tolist()
            for param, view, mark in zip(bucket.params, bucket.views, marks, strict=True):
                if param.grad is not None:
                    param.grad.copy_(view)
                elif mark > 0:  # another rank has one
                    param.grad = view.clone()
                self._means.note(param)


def _check_dense(param: nn.Parameter) -> None:
    assert param.grad is not None
    if param.grad.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a {param.grad.layout} gradient, and the boosted "
            "model was not called before this backward: call the model itself, or build the embedding with "
            "sparse=False"
        )
