"""Gradients that the reducer of `DistributedDataParallel` does not average are detected and averaged here.

[Note: gradients outside of torch's reducer]
Torch's reducer takes the gradients of one backward after a forward of its wrapper, of parameters that were
trainable when it was made. After the loss of another method (`model.compute_loss(x)`), after the second
backward of two forwards, and in layers that were unfrozen since, each rank has gradients of its own. A hook
on every parameter notices these, and at the end of the backward all gradients of that reducer are averaged.
Those that are means already keep their values, which are the same on all ranks. All ranks run the same
backwards, so they notice the same; unfrozen parameters are averaged after each, also on ranks without
gradients.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import nn

from colossalai.communication import start_all_reduce
from colossalai.context import Axis
from colossalai.nn.parallel._buckets import EarlierMeans, call_on_grad, make_buckets

CAP_BYTES = 25 * 2**20


@final
class UnsyncedGrads:
    """Notices gradients that no reducer of torch takes, and averages them at the end of the backward.

    See [Note: gradients outside of torch's reducer].

    Args:
        taken: The parameters of each reducer.
        frozen: Those that were frozen when reducers were made; they are averaged once they are trainable.
        replicas: The ranks that see different parts of the batch.
        means: Of the same parameters.
        are_all_used: Whether each forward uses all parameters of a reducer, on all ranks.

    Attributes:
        syncs: Whether backwards average now.
    """

    def __init__(
        self,
        taken: Sequence[Sequence[nn.Parameter]],
        frozen: Iterable[nn.Parameter],
        replicas: Axis,
        means: EarlierMeans,
        *,
        are_all_used: bool,
    ) -> None:
        self._taken = taken
        self._frozen = tuple(filter(_can_be_trained, frozen))
        self._replicas = replicas
        self._means = means
        self._are_all_used = are_all_used
        self._ends_always = bool(self._frozen) or not are_all_used
        self.syncs = True
        # Parameters have numbers, those of a reducer one after the other; frozen ones follow.
        self._numbers: list[range] = []
        self._expected: set[int] = set()  # parameters that reducers take in the next backward
        self._noticed: set[int] = set()  # reducers that did not take a gradient
        self._graph_task: int | None = None  # the backward at whose end gradients are averaged
        for reducer, params in enumerate(taken):
            first = self._numbers[-1].stop if self._numbers else 0
            self._numbers.append(range(first, first + len(params)))
            for number, param in enumerate(params, first):
                call_on_grad(param, _on_grad, self, number, reducer)
        for param in self._frozen:
            param.requires_grad_(True)  # or torch takes no hook
            call_on_grad(param, _on_grad, self, -1, -1)  # expected by no reducer
            param.requires_grad_(False)

    def expect(self, reducer: int) -> None:
        """Leave the gradients of the next backward, one of each parameter, to a reducer."""
        self._expected.update(self._numbers[reducer])

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Average gradients that reducers have not taken; collective over the ranks that hold them."""
        self._graph_task = None
        if not self._are_all_used:  # else there can be a part of a backward that was checkpointed
            self._expected.clear()
        noticed, self._noticed = sorted(self._noticed), set()
        if not self.syncs:
            return
        for reducer in noticed:
            self._average(self._taken[reducer])
        # On all ranks, whether or not there is a gradient on this one.
        unfrozen = [param for param in self._frozen if param.requires_grad]
        if unfrozen:
            self._average(unfrozen)

    def _average(self, params: Sequence[nn.Parameter]) -> None:
        trainable = [param for param in params if param.requires_grad]
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
            # Joined by all ranks that hold the bucket: its gradients, and a mark for each.
            start_all_reduce(bucket.flat, bucket.sync.axis)()
            marks = bucket.marks.tolist()
            for param, view, mark in zip(bucket.params, bucket.views, marks, strict=True):
                if param.grad is not None:
                    param.grad.copy_(view)
                elif mark > 0:  # another rank has one
                    param.grad = view.clone()
                self._means.note(param)


def _on_grad(
    find_grads: "weakref.ref[UnsyncedGrads]", number: int, reducer: int, param: torch.Tensor
) -> None:
    """Called by autograd when a backward has added to the gradient of a parameter.

    Args:
        find_grads: Returns the object that averages gradients, None once it is gone.
        number: The number of the parameter; -1 if it was frozen.
        reducer: The number of its reducer; -1 for none.
        param: The parameter.
    """
    grads = find_grads()
    if grads is None:
        return
    if number in grads._expected:
        grads._expected.remove(number)
        if not grads._ends_always:
            return
    elif reducer >= 0:
        grads._noticed.add(reducer)
    task = torch._C._current_graph_task_id()
    if task != grads._graph_task:
        grads._graph_task = task
        torch.autograd.Variable._execution_engine.queue_callback(grads._end_backward)


def _can_be_trained(param: nn.Parameter) -> bool:
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def _check_dense(param: nn.Parameter) -> None:
    assert param.grad is not None
    if param.grad.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a {param.grad.layout} gradient, and the boosted "
            "model was not called before this backward: call the model itself, or build the embedding with "
            "sparse=False"
        )
