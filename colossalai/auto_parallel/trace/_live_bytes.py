"""The peak of live bytes of one training step, from the profiles of its operations.

[Note: live bytes of a step]
`live_bytes` walks forward and backward as PyTorch runs them. A storage lives from the operation that makes it
to the last one that reads a tensor on it, to the backward of the last one that saved it, or, for outputs of
the model, to the end. Backwards run in the opposite order of their operations. During a backward, the
gradients of its outputs, its new gradients, and its temporaries are live; then the gradients of its outputs
and its saved tensors are freed; then each new gradient is added to the sum of the tensor's gradients so far,
into a new sum. (Autograd adds in place where it can, but never under a dispatch mode, and so not where bytes
are counted: this is an upper bound.) The gradient of a parameter is complete when all operations that use it
have run backward; it is then added to the gradient of the parameter, and freed.

Storages that live longer because of a local variable in the model's code, and temporaries within a kernel,
are not counted.
"""

from collections import Counter
from collections.abc import Mapping

from colossalai.auto_parallel.trace._profile_ops import OpProfile
from colossalai.auto_parallel.trace._trace import ModelTrace


def live_bytes(
    trace: ModelTrace, profiles: Mapping[str, OpProfile], *, with_param_grads: bool = False
) -> int:
    """Return the peak of live bytes of one forward and backward; see [Note: live bytes of a step].

    The backward starts at the first scalar output that requires a gradient, the loss; without one, at all
    outputs that require a gradient. Parameters, buffers and arguments do not count.

    Args:
        trace: The trace.
        profiles: Profiles of its operations.
        with_param_grads: Whether to count the gradients of parameters once they are complete, as in the first
            backward after they were set to None. Otherwise they exist before, and are accumulated.
    """
    walk = _LiveWalk(trace, profiles, keeps_param_grads=with_param_grads)
    walk.forward()
    walk.backward()
    return walk.peak


class _LiveWalk:
    """One forward and backward; see [Note: live bytes of a step].

    Args:
        trace: The trace.
        profiles: Profiles of its operations.
        keeps_param_grads: See `live_bytes`.
    """

    def __init__(
        self, trace: ModelTrace, profiles: Mapping[str, OpProfile], *, keeps_param_grads: bool
    ) -> None:
        self.peak = 0
        self._live = sum(trace.tensors[name].num_bytes for name in trace.constants)
        self._trace = trace
        self._trainable = frozenset(trace.trainable)
        self._profiles = profiles
        self._keeps_param_grads = keeps_param_grads
        self._returned = {trace.storage_of(name) for name in trace.outputs}
        self._num_savers = Counter(name for profile in profiles.values() for name in profile.saved)
        self._sizes: list[int] = []  # of the storages of gradients
        self._num_users: list[int] = []  # of each storage, the gradients on it
        self._grads: dict[str, int] = {}  # by tensor, the storage of its gradient
        self._num_missing: Counter[str] = Counter()  # by tensor, the backwards that still add to it

    def forward(self) -> None:
        """Run all operations."""
        trace = self._trace
        last_use = {
            trace.storage_of(name): number
            for number, each in enumerate(trace.operations)
            for name in (*each.inputs, *each.outputs)
        }
        ends: dict[int, list[str]] = {}
        for name, number in last_use.items():
            ends.setdefault(number, []).append(name)
        for number, each in enumerate(trace.operations):
            profile = self._profiles[each.name]
            made = {trace.storage_of(name) for name in each.outputs} & set(each.outputs)
            self._add(sum(trace.tensors[name].num_bytes for name in made) + profile.extra_saved_bytes)
            self.peak = max(self.peak, self._live + profile.forward_peak)
            for name in ends.get(number, ()):
                if not self._num_savers[name]:
                    self._free_tensor(name)

    def backward(self) -> None:
        """Run the backwards of the operations that the loss depends on, the last one first."""
        starts, running = self._plan()
        for name in starts:
            self._grads[name] = self._new_grad(self._trace.tensors[name].num_bytes)
        for each in reversed(self._trace.operations):
            if each.name in running:
                self._run(self._profiles[each.name])

    def _plan(self) -> tuple[list[str], set[str]]:
        """Return the start and the operations of the backward; count the gradients of each leaf."""
        trace = self._trace
        grown = {name for profile in self._profiles.values() for name in profile.differentiable}
        outputs = [name for name in dict.fromkeys(trace.outputs) if name in grown]
        losses = [name for name in outputs if trace.tensors[name].numel == 1]
        starts = losses[:1] or outputs
        reached, running = set(starts), set()
        # Counted before the first backward: a parameter's gradient is complete after its last user's.
        for each in reversed(trace.operations):
            profile = self._profiles[each.name]
            if reached.intersection(profile.differentiable):
                running.add(each.name)
                reached.update(gradient.tensor for gradient in profile.gradients)
                self._num_missing.update(self._leaf(gradient.tensor) for gradient in profile.gradients)
        return starts, running

    def _leaf(self, name: str) -> str:
        """Return the key of a tensor's gradient: a tied parameter has one for all of its names."""
        return self._trace.storage_of(name) if name in self._trainable else name

    def _run(self, profile: OpProfile) -> None:
        given = {name: self._grads.pop(name) for name in profile.differentiable if name in self._grads}
        made: dict[str, int] = {}
        for gradient in profile.gradients:
            shared = {**given, **made}.get(gradient.same_as)
            if shared is None:
                num_bytes = gradient.num_bytes or self._trace.tensors[gradient.tensor].num_bytes
                shared = self._new_grad(num_bytes)
            else:
                self._num_users[shared] += 1
            made[gradient.tensor] = shared
        self.peak = max(self.peak, self._live + profile.backward_peak)
        for storage in given.values():
            self._let_go(storage)
        for name in profile.saved:
            self._num_savers[name] -= 1
            if not self._num_savers[name]:
                self._free_tensor(name)
        self._live -= profile.extra_saved_bytes
        for name, storage in made.items():
            self._collect(name, storage)

    def _collect(self, name: str, storage: int) -> None:
        """Accumulate a gradient of a tensor; a complete gradient of a parameter is moved to the parameter."""
        leaf = self._leaf(name)
        before = self._grads.get(leaf)
        if before is None:
            self._grads[leaf] = storage
        else:
            self._grads[leaf] = self._new_grad(self._trace.tensors[leaf].num_bytes)
            self._let_go(before)
            self._let_go(storage)
        self._num_missing[leaf] -= 1
        if leaf in self._trainable and not self._num_missing[leaf]:
            complete = self._grads.pop(leaf)
            if self._keeps_param_grads and self._num_users[complete] > 1:
                self._new_grad(self._sizes[complete])  # a copy, since the storage has other users
            if not self._keeps_param_grads or self._num_users[complete] > 1:
                self._let_go(complete)

    def _new_grad(self, num_bytes: int) -> int:
        self._sizes.append(num_bytes)
        self._num_users.append(1)
        self._add(num_bytes)
        return len(self._sizes) - 1

    def _let_go(self, storage: int) -> None:
        self._num_users[storage] -= 1
        if not self._num_users[storage]:
            self._live -= self._sizes[storage]

    def _add(self, num_bytes: int) -> None:
        self._live += num_bytes
        self.peak = max(self.peak, self._live)

    def _free_tensor(self, storage: str) -> None:
        """Free a storage of the forward, unless it is an input or an output of the model."""
        if storage not in self._trace.outside and storage not in self._returned:
            self._live -= self._trace.tensors[storage].num_bytes
