"""The fragments that an optimizer holds in the place of parameters, each on the rank that updates it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import STATE_KEY, OptimizerParams
from colossalai.context import Axis
from colossalai.tensor import FlatRange, row_cache_of, set_range_of_states
from colossalai.zero._bucket_grads import BucketGrads
from colossalai.zero._exchange import start_gather
from colossalai.zero._layout import FlatBucket
from colossalai.zero._reducer import ShardedReducer
from colossalai.zero._states import StateExchange
from colossalai.zero._weights import BucketFragments, BucketWeights, Fragment, make_fragments
from colossalai.zero._windows import step_in_windows


class Shards(OptimizerParams):
    """The fragments of an optimizer's parameters.

    Args:
        optimizer: The optimizer; its groups get the fragments, its states are cut.
        reducer: The reducer of the gradients of its parameters.
        replicas: The ranks that see different parts of the batch.
        weights_of: Return the weights of a bucket of the reducer; each of its parameters in one layout, or in
            none, if the optimizer lacks it.
        offload: Keep fragments and states in host memory.
        reducers: Those of all optimizers of the model, whose backwards are the same.
        before_step: Called, once all gradients are there, before every step; None: there is nothing to call.
        after_step: Called when all ranks have the updated or loaded values; None: there is nothing to call.
        others: Return the parameters of other optimizers whose gradients the reducer has, too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: ShardedReducer,
        replicas: Axis,
        *,
        weights_of: Callable[[FlatBucket], Sequence[BucketWeights]],
        offload: bool,
        reducers: Sequence[ShardedReducer],
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        others: Callable[[], Collection[nn.Parameter]] = tuple,
    ) -> None:
        self._reducer = reducer
        self.reducers = reducers
        self._before_step = before_step
        self._after_step = after_step
        self._others = others
        self._grads_of = {
            weights: grads for grads in reducer.all_grads for weights in weights_of(grads.bucket)
        }
        self._weights = list(self._grads_of)
        self._pageable = [weights for weights in self._weights if weights.can_page]
        self._moving = [weights for weights in self._weights if weights.moves_mean]
        for weights, grads in self._grads_of.items():
            grads.listeners.append(partial(self._lose, weights))
        self._fragments: dict[nn.Parameter, Fragment] = {}
        for weights in self._weights:
            self._fragments |= {each.param: each for each in make_fragments(weights, offload=offload)}
        self._tensors = [fragment.tensor for fragment in self._fragments.values()]
        self._param_of = {fragment.tensor: param for param, fragment in self._fragments.items()}
        self._buckets = self._in_flat_lists()
        self._whole_groups = [list(group["params"]) for group in optimizer.param_groups]
        held = (param for params in self._whole_groups for param in params)
        self._frozen = [
            param for param in held if param not in self._fragments and row_cache_of(param) is None
        ]
        self._exchange = StateExchange(
            {param: fragment.tensor for param, fragment in self._fragments.items()},
            ranges={
                param: [bucket.overlap(index, rank) for rank in range(bucket.axis.size)]
                for param, (bucket, index) in self._places.items()
            },
            axes={param: bucket.axis for param, (bucket, _) in self._places.items()},
            replicas=replicas,
        )
        self._exchange.cut(optimizer)
        self._put_fragments(optimizer)

    @property
    def _places(self) -> dict[nn.Parameter, tuple[FlatBucket, int]]:
        """For each parameter the layout of its update, and its number there."""
        return {
            fragment.param: (fragment.weights.bucket, fragment.index) for fragment in self._fragments.values()
        }

    def __len__(self) -> int:
        return len(self._fragments)

    def param_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        param: torch.Tensor = self._param_of.get(tensor, tensor)  # type: ignore[call-overload]
        return param

    def with_masters(self, param_names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """See the base class."""
        names = dict(param_names)
        for fragment, param in self._param_of.items():
            if param in names:
                names[fragment] = names[param]
        return names

    def measured(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """See the base class; empty fragments count, too."""
        rest = [param for param in params if param not in self._param_of]
        return [*self._tensors, *rest]

    def finish_means(self) -> None:
        """Wait until this rank's slices are means over the replicas, of all that has come; collective."""
        self._reducer.finish()

    def scale_grads(self, factor: float) -> None:
        """See the base class; within a backward of the reducer."""
        self._reducer.scale(factor, besides=self._others())
        for weights in self._moving:
            weights.scale_mean(factor)

    @torch.no_grad()
    def put_back_grads(self, factor: float, *, untaken: float | torch.Tensor) -> None:
        """See the base class; fragments of their own dtype lose their gradients after a step."""
        for bucket in self._buckets:
            weights, mean = bucket.weights, bucket.grads.slice
            if weights.moves_mean:
                mean = weights.take_mean(bucket.grads)
            if mean is None:
                continue
            parts = mean[: bucket.numel].split(bucket.sizes)
            for tensor, index, _ in bucket.parts:
                if tensor.grad is None:
                    parts[index].mul_(untaken)
                elif tensor.grad.dtype == mean.dtype and tensor.grad.device == mean.device:
                    parts[index].mul_(factor)  # it was a view of this mean, which can have moved since
                else:
                    parts[index].copy_(tensor.grad.reshape(-1) * factor)

    def take_grads(self) -> None:
        """Finish the reduction and give each fragment its part of the mean; collective.

        Raises:
            ValueError: A parameter that was frozen at `boost` or `initialize` has a gradient.
        """
        self._reducer.finish()  # waits for all means
        if self._before_step is not None:
            self._before_step()
        marks = self._reducer.marks()  # joined by all replicas: whether any of them has a gradient
        for bucket in self._buckets:
            weights, mean = bucket.weights, bucket.grads.slice
            if weights.moves_mean:
                mean = weights.take_mean(bucket.grads)
            parts = () if mean is None else mean[: bucket.numel].split(bucket.sizes)
            for tensor, index, mark in bucket.parts:
                grad = parts[index] if parts and marks[mark] else None
                if grad is not None and tensor.ndim != 1:
                    grad = grad.view(tensor.shape)
                if grad is not None and (grad.dtype != tensor.dtype or grad.device != tensor.device):
                    grad = grad.to(tensor.device, tensor.dtype)
                tensor.grad = grad
        for bucket in () if all(marks) else self._buckets:
            own = marks[bucket.first_mark :][: len(bucket.grads.bucket.params)]
            bucket.grads.withdraw(index for index, mark in enumerate(own) if not mark)
        for param in self._frozen:
            if param.grad is not None:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} was frozen when it was wrapped and has a "
                    "gradient now, which ZeRO does not average: freeze it after that, not before"
                )

    def follow_users(self) -> None:
        """See the base class."""
        self._reducer.follow_users()

    def has_grads(self, params: Sequence[nn.Parameter]) -> bool:
        """See the base class."""
        return any(
            bucket.grads.slice is not None or bucket.weights.has_moved_mean for bucket in self._buckets
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """See the base class."""
        self._reducer.forget(set_to_none=set_to_none, besides=self._others())
        for weights in self._moving:
            weights.forget_mean(set_to_none=set_to_none)
        for tensor in self._tensors:
            tensor.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """See the base class; parameters that were given other memory come back to their buckets."""
        for weights in self._weights:  # in one order on all ranks: owners collect pieces of written weights
            for param in weights.take_written():
                fragment = self._fragments[param]
                if fragment.has_own_memory:
                    home = fragment.home.to(fragment.tensor.device)
                    rounded = fragment.tensor.to(home.dtype)
                    fragment.tensor.copy_(
                        torch.where(home == rounded, fragment.tensor, home.to(fragment.tensor.dtype))
                    )
                    weights.give_back([fragment.home, fragment.tensor])
            if not weights.has_lasting_homes:
                weights.release_homes()

    def windows(self, params: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
        """See the base class: buckets on disk one by one; the memory of each is released after it."""
        paged = {weights for weights in self._pageable if weights.is_paged}
        if not paged:
            yield params
            return
        runs: dict[BucketWeights | None, list[nn.Parameter]] = {None: []}
        for param in params:
            weights = self._fragments[self._param_of[param]].weights if param in self._param_of else None
            runs.setdefault(weights if weights in paged else None, []).append(param)
        for weights, run in runs.items():
            if weights is None:
                if run or len(runs) == 1:
                    yield run
                continue
            yield run
            weights.give_back(tensor for param in run for tensor in (param, param.grad) if tensor is not None)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """See the base class; collective."""
        self.take_weights()
        result = self._update(optimizer, closure)
        self.write_weights()
        return result

    def _update(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """Step the optimizer; fragments on disk are updated bucket by bucket, and rounded right away."""
        if not self.is_paged:
            return optimizer.step() if closure is None else optimizer.step(closure)
        windows = list(self.windows([param for group in optimizer.param_groups for param in group["params"]]))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_in_windows(optimizer, windows, after_call=lambda window: self._settle(optimizer, window))
        return loss

    @property
    def is_paged(self) -> bool:
        """See the base class."""
        return any(weights.is_paged for weights in self._pageable)

    @torch.no_grad()
    def _settle(self, optimizer: Optimizer, tensors: Iterable[nn.Parameter]) -> None:
        """Move the tensors of fragments to their places: homes rounded, masters and states at home."""
        for tensor in tensors:
            if tensor not in self._param_of:
                continue
            fragment = self._fragments[self._param_of[tensor]]
            weights = fragment.weights
            if fragment.has_own_memory:
                fragment.round_on_disk()
                fragment.tensor.data = weights.keep(fragment.tensor.detach())
            else:
                fragment.tensor.data = fragment.home
            touched = [fragment.tensor.detach()]
            if weights.has_lasting_homes:
                touched.append(fragment.home)
            state = optimizer.state.get(fragment.tensor, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == fragment.tensor.shape:
                    state[key] = weights.keep(value)
                    touched.append(state[key])
            if fragment.tensor.grad is not None:
                touched.append(fragment.tensor.grad)
            weights.give_back(touched)

    def state_bytes(self, optimizer: Optimizer) -> dict[FlatBucket, tuple[int, int, int]]:
        """Return the share of this rank in each bucket: elements updated at home, bytes, and other bytes.

        The first bytes are those of the states of these elements. The others are of fragments on other
        devices: their own, those of their gradients, and of their states.
        """
        found: dict[FlatBucket, tuple[int, int, int]] = {}
        for fragment in self._fragments.values():
            state = optimizer.state.get(fragment.tensor, {})
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
            num_bytes = sum(value.nbytes for value in tensors)
            bucket = self._grads_of[fragment.weights].bucket
            numel, at_home, elsewhere = found.get(bucket, (0, 0, 0))
            if fragment.weights.has_lasting_homes:
                numel, at_home = numel + fragment.tensor.numel(), at_home + num_bytes
            else:
                elsewhere += num_bytes + 2 * fragment.tensor.nbytes
            found[bucket] = numel, at_home, elsewhere
        return found

    def settle(self, optimizer: Optimizer) -> None:
        """Move gradients and states of fragments to the present devices of their buckets' weights."""
        self._settle(optimizer, list(self._param_of))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the buckets and let all ranks have those; collective."""
        waits = []
        for bucket in self._buckets:
            weights, masters = bucket.weights, bucket.masters
            if masters and not (weights.is_paged and weights.has_lasting_homes):  # those are rounded
                homes = [weights.home(each.index).view(each.tensor.shape) for each in masters]
                torch._foreach_copy_(homes, [each.tensor.detach() for each in masters])
            for each in masters if weights.has_lasting_homes else ():
                each.tensor.grad = None  # a copy in float32; the slice of the mean is still there
            waits.append(weights.start_publishing())
        for wait in waits:
            wait()  # until the sections of all other ranks are here
        if self._after_step is not None:
            self._after_step()

    @contextmanager
    def as_states(self, optimizer: Optimizer, *, loads: bool = True) -> Iterator[None]:
        """See the base class; collective, if `loads`."""
        self.take_weights()
        masters = self._masters()
        for param, fragment in self._fragments.items():
            set_range_of_states(param, self._range_of(fragment))
            state = dict(optimizer.state.pop(fragment.tensor, {}))
            if param in masters:
                state[STATE_KEY] = masters[param]
            if state and fragment.tensor.numel() > 0:
                optimizer.state[param] = state
        self._put_params(optimizer)
        try:
            yield
        finally:
            self.take_weights()  # some may have been loaded in the block
            loaded = {}
            for param, fragment in self._fragments.items():
                set_range_of_states(param, None)
                state = optimizer.state.pop(param, {})
                if STATE_KEY in state:
                    loaded[param] = state.pop(STATE_KEY)
                if state:
                    optimizer.state[fragment.tensor] = state
            self._put_fragments(optimizer)
            if loads:
                self._take_masters(loaded)
                self.settle(optimizer)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state, the same that it would be without ZeRO; collective."""
        self.take_weights()
        with self._exchange.gathered(optimizer, masters=self._masters()):
            self._put_params(optimizer)
            try:
                return self._exchange.numbered(optimizer)
            finally:
                self._put_fragments(optimizer)

    def load_state_dict(self, optimizer: Optimizer, content: dict[str, Any]) -> None:
        """See the base class; every rank passes the same."""
        self.take_weights()
        masters = self._exchange.load_numbered(optimizer, content, self._whole_groups)
        self._put_fragments(optimizer)
        self._take_masters(masters)
        self.settle(optimizer)

    def gathered_grads(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """See the base class."""
        rest = [param for param in params if param not in self._param_of]
        return super().gathered_grads(rest) | self.whole_grads()

    def whole_grads(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the whole mean gradients of the parameters that have one, after `take_grads`; collective."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        marked = self._marked()
        for bucket, held in ((weights.bucket, weights.held) for weights in self._weights):
            device = bucket.params[0].device
            dtypes = (self._fragments[bucket.params[index]].tensor.dtype for index in held)
            dtype = reduce(torch.promote_types, dtypes, bucket.grad_dtype)  # of masters, if there are any
            flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
            for index in held:
                self._put_grad(bucket.params[index], bucket.section(flat, bucket.axis.rank))
            start_gather(flat, bucket)()  # sections of all ranks, in the order of buckets; waits at once
            found |= {
                bucket.params[index]: bucket.view(flat, index)
                for index in held
                if bucket.params[index] in marked
            }
        return found

    def _marked(self) -> set[nn.Parameter]:
        """Return the parameters of the model that have had a gradient on any replica; collective."""
        params = (param for grads in self._reducer.all_grads for param in grads.bucket.params)
        return {param for param, mark in zip(params, self._reducer.marks(), strict=True) if mark}

    def _in_flat_lists(self) -> list[BucketFragments]:
        first_marks: dict[BucketGrads, int] = {}
        mark_of: dict[nn.Parameter, int] = {}
        for grads in self._reducer.all_grads:
            first_marks[grads] = len(mark_of)
            for param in grads.bucket.params:
                mark_of[param] = len(mark_of)
        found = []
        for weights, grads in self._grads_of.items():
            bucket, rank = weights.bucket, weights.bucket.axis.rank
            places = (bucket.place(index, rank) for index in range(len(bucket.params)))
            sizes = [end - begin for begin, end in places]
            own = [self._fragments[bucket.params[index]] for index in weights.held]
            parts = [(each.tensor, each.index, mark_of[each.param]) for each in own]
            masters = [each for each in own if each.has_own_memory]
            found.append(
                BucketFragments(weights, grads, sizes, sum(sizes), parts, masters, first_marks[grads])
            )
        return found

    def _lose(
        self, weights: BucketWeights, gone: Sequence[nn.Parameter], zeroed: Sequence[nn.Parameter]
    ) -> None:
        """Forget the gradients of parameters, or make them zero, as users have done to placeholders."""
        own = {weights.bucket.params[index]: index for index in weights.held}
        for param in (param for param in gone if param in own):
            if weights.moves_mean:
                weights.clear_mean(own[param])
            self._fragments[param].tensor.grad = None
        for param in (param for param in zeroed if param in own):
            if weights.moves_mean:
                weights.clear_mean(own[param])
            if (grad := self._fragments[param].tensor.grad) is not None:
                grad.zero_()

    def _put_grad(self, param: nn.Parameter, section: torch.Tensor) -> None:
        fragment = self._fragments[param]
        begin, end = fragment.place
        if fragment.tensor.grad is not None:
            section[begin:end].copy_(fragment.tensor.grad.reshape(-1))

    def _masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return this rank's parts of the masters by parameter."""
        return {
            param: fragment.tensor.detach()
            for param, fragment in self._fragments.items()
            if fragment.tensor.dtype != param.dtype
        }

    @torch.no_grad()
    def _take_masters(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Let fragments take the values of masters that were loaded, or of parameters that were."""
        for param, part in masters.items():
            fragment = self._fragments[param]
            fragment.tensor.copy_(part.view(fragment.tensor.shape))
        for fragment in self._fragments.values():
            if fragment.has_own_memory:
                fragment.round_on_disk()
        self.write_weights()

    def _range_of(self, fragment: Fragment) -> FlatRange:
        param = fragment.param
        begin, end = self._exchange.own_range(param)
        local_shape = tuple(fragment.tensor.shape)
        return FlatRange(tuple(param.shape), begin, end, local_shape, fragment.tensor.device)

    def _put_params(self, optimizer: Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self._whole_groups, strict=True):
            group["params"] = list(params)

    def _put_fragments(self, optimizer: Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self._whole_groups, strict=True):
            group["params"] = [
                self._fragments[param].tensor if param in self._fragments else param
                for param in params
                if param not in self._fragments or self._fragments[param].tensor.numel() > 0
            ]
