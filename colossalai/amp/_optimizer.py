"""Optimizer wrapper: scales the loss, unscales gradients once, clips, and steps only if all ranks can."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._gradients import Gradients, OptimizerGroup
from colossalai.amp._loss_scaling import LossScaler, Overflow, share_name
from colossalai.amp._loss_weights import (
    GivenLoss,
    LossKind,
    LossTerm,
    LossWeights,
    Silenced,
    Weight,
    check_loss,
    read_loss,
)
from colossalai.amp._masters import Masters
from colossalai.amp._sharded_params import OptimizerParams
from colossalai.amp._step_plan import UNKNOWN_PLACE, params_of
from colossalai.logging import get_dist_logger
from colossalai.tensor import as_memory, is_own_attribute, row_cache_of, spec_of

P = ParamSpec("P")
R = TypeVar("R")

_STAGE_PLACES = 2**20  # above the number of parameters of a pipeline stage
_WEIGHTED_TWICE = (
    "a step was made again without a backward, and the losses had weights: the optimizer works on float32 "
    "copies of the gradients, and only those were divided by the weights. Run a backward before each step, "
    "or call optimizer.zero_grad() after it"
)
_NO_BACKWARD = (
    "a step was made without a backward since the last one: there are no gradients, and nothing was updated"
)


def check_clipping(max_norm: float, norm_type: float) -> None:
    """Check the bound and the p of gradient clipping.

    Raises:
        ValueError: `max_norm` is below 0, `norm_type` is below 1, or either is not a number.
    """
    are_numbers = all(isinstance(each, int | float) and each is not True for each in (max_norm, norm_type))
    if not are_numbers or not max_norm >= 0 or not norm_type >= 1:
        raise ValueError(
            f"max_norm is {max_norm!r} and norm_type {norm_type!r}: the bound must be above 0, or 0 for no "
            "clipping, and the p of the norm at least 1"
        )


def _in_scope(
    method: Callable[Concatenate["OptimizerWrapper", P], R],
) -> Callable[Concatenate["OptimizerWrapper", P], R]:
    """Run a method of the wrapper in the plan's scope, in which ColoTensors are this rank's memory."""

    @wraps(method)
    def run(self: "OptimizerWrapper", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.gradients.plan.scope():
            return method(self, *args, **kwargs)

    return run


def _whole(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole gradient of a parameter; collective if ranks have slices of it."""
    from torch.distributed.tensor import DTensor

    spec = spec_of(param)
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return (whole if spec is None else spec.whole(whole)).detach().clone()


def _watch_steps(optim: Optimizer, wrapper: "OptimizerWrapper") -> None:
    """Register a hook that refuses wrong steps of an optimizer which its wrapper does not make."""
    hooks = getattr(optim, "_optimizer_step_pre_hooks", {})
    for number, hook in list(hooks.items()):
        if isinstance(hook, partial) and hook.func is _refuse_bare_step:
            del hooks[number]  # the hook of an earlier wrapper
    if len(wrapper.masters) or wrapper.scaler.skips:
        optim.register_step_pre_hook(
            partial(_refuse_bare_step, weakref.ref(wrapper), bool(len(wrapper.masters)))
        )


def _refuse_bare_step(
    wrapper: "weakref.ref[OptimizerWrapper]", has_optimizer_params: bool, optim: Optimizer, *_: Any
) -> None:
    """Refuse a step of an optimizer outside of its wrapper's step.

    Raises:
        ValueError: The wrapper is not in a step, or is gone and has left optimizer parameters.
    """
    living = wrapper()
    if has_optimizer_params if living is None else not living._is_updating:
        raise ValueError(
            f"step() was called of the {type(optim).__name__} that was given to boost or initialize, and it "
            "works on masters, slices or scaled gradients: call step() of the optimizer that was returned"
        )


class OptimizerWrapper(Optimizer):
    """The optimizer from `Booster.boost` or `colossalai.initialize`; other attributes are those of `optim`.

    Args:
        optim: The optimizer underneath.
        group: The optimizers of the model, which this one joins. Default: a group of its own, in this process
            alone, without loss scaling.
        param_names: Name of each of the model's parameters.
        masters: Tensors that the optimizer updates instead of the parameters: float32 masters, slices.
        before_step: Called with this wrapper, one after the other, before every update, when the gradients
            are true.
        max_norm: Bound of the gradient norm over all ranks in every step; 0 for no clipping.
        norm_type: The p of that norm.
        stages: The ranks of a pipeline, which hold different parameters; None without one.
        counts: Returns False for a parameter of the model that another stage holds and counts in norms.

    Attributes:
        group: As given.
        gradients: The gradients of the next step.
        masters: As given.
        param_names: Names of the parameters and of the masters.
        max_norm: As given.
        norm_type: As given.
        stepped: Whether the last step updated the parameters.

    Raises:
        ValueError: `max_norm` is below 0, or `norm_type` is below 1.
    """

    def __init__(
        self,
        optim: Optimizer,
        *,
        group: OptimizerGroup | None = None,
        param_names: Mapping[nn.Parameter, str] | None = None,
        masters: OptimizerParams | None = None,
        before_step: Sequence[Callable[["OptimizerWrapper"], None]] = (),
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        stages: dist.ProcessGroup | None = None,
        counts: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        # The base class is for isinstance() only: its state is the optimizer's.
        check_clipping(max_norm, norm_type)
        self.group = OptimizerGroup() if group is None else group
        self.masters: OptimizerParams = Masters() if masters is None else masters
        self.param_names = self.masters.with_masters(param_names or {})
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.stepped = False
        self._before_step = tuple(before_step)
        self._stages = stages
        # Ordered by stage, then by name.
        first = 0 if stages is None else dist.get_rank(stages) * _STAGE_PLACES
        self._places = {param: first + number for number, param in enumerate(param_names or {})}
        self.gradients = Gradients(
            optim, self.masters, self.group, places=self._places, stages=stages, counts=counts
        )
        is_first = self.group.members[0] is self.gradients
        self._after_step = self.group.after_step if is_first else ()  # once per step of the model
        self._is_updating = False
        self.optim = optim  # last: see [Note: attributes of a wrapper]
        _watch_steps(optim, self)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: pickle and copy read attributes before __init__ has run
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is read: `param_groups` and `state` belong to the optimizer underneath.

        Raises:
            ValueError: `value` of `param_groups` has new parameters, and the present ones have float32
                masters or slices.
        """
        own = self.__dict__
        if name in own or "optim" not in own or is_own_attribute(self, name):
            super().__setattr__(name, value)
            return
        if name == "param_groups" and len(self.masters):
            known = set(params_of(self.optim))
            if any(param not in known for group in value for param in group["params"]):
                raise ValueError(
                    "param_groups is set with a parameter that the optimizer does not update now, where its "
                    "float32 master would be missing: arrange those of optimizer.param_groups, or add others "
                    "before Booster.boost"
                )
        setattr(self.optim, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it is read."""
        if "optim" not in self.__dict__ or is_own_attribute(self, name):
            super().__delattr__(name)
        else:
            delattr(self.optim, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # torch's method would also run hooks of the optimizer in our step

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    @property
    def is_stepped_again(self) -> bool:
        """Whether the last step had gradients, without a backward or `zero_grad` since."""
        return self.gradients.were_stepped_with and not self.gradients.has_run

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler, which the optimizers of a model share."""
        return self.group.scaler

    @property
    def weights(self) -> LossWeights:
        """The weights of the losses of the next step."""
        return self.gradients.weights

    def unwrap(self) -> Optimizer:
        """Return the optimizer underneath."""
        return self.optim

    @property
    def mean_loss(self) -> torch.Tensor | None:
        """The mean of the losses of the last step over all ranks and backwards; None without weights."""
        return self.weights.mean_loss

    def backward(self, loss: GivenLoss, weight: Weight | None = None, **kwargs: Any) -> None:
        """Run the backward of the scaled loss; `kwargs` go to `Tensor.backward`.

        The other optimizers of the model are prepared for it, and can step with the gradients that it adds.

        Args:
            loss: The mean over the batch, or a pair (sum, count).
            weight: Number of labels of the mean: with it the gradients of the step are those of the mean over
                all backwards since `zero_grad` and all ranks. Losses must not be divided for accumulation
                then.
            kwargs: Further arguments of `Tensor.backward`.

        Raises:
            ValueError: `loss` is not a valid loss (see `check_loss`), `weight` is negative or not one number,
                or only some of the losses of a step have a weight.
        """
        given = read_loss(loss, weight)
        check_loss(given.value, is_seed_given=kwargs.get("gradient") is not None)
        self.backward_of(given, **kwargs)

    def backward_of(self, given: LossTerm, **kwargs: Any) -> None:
        """Run the backward of a checked loss; see `backward`."""
        for reducer in self.masters.reducers:
            reducer.before_backward()
        scale = self.start_backward()
        self.note_loss(given)
        if given.weight is None:
            with self._ending_backward():
                (given.value if scale == 1.0 else given.value * scale).backward(**kwargs)
            return
        value, factor = given.value, self.factor_of_sum(given.weight) * scale
        if not given.is_sum:
            factor = factor * given.weight
        wide = torch.promote_types(value.dtype, torch.float32)
        silenced = nullcontext() if given.is_sum else Silenced(value, given.weight)
        with self._ending_backward(), silenced:
            (value.to(wide) * factor.to(wide)).backward(**kwargs)

    @contextmanager
    def _ending_backward(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for reducer in self.masters.reducers:
                reducer.after_backward(has_failed=True)
            raise
        for reducer in self.masters.reducers:
            reducer.after_backward()

    def start_backward(self) -> float:
        """Prepare for a backward that the caller runs; return the loss scale."""
        return self.group.start_backward(self.gradients)

    def note_loss(self, loss: LossTerm) -> None:
        """Record the loss of a backward, with all optimizers of the model; once for each backward.

        Raises:
            ValueError: Losses with and without a weight would add up.
        """
        self.group.note_loss(loss, self.gradients)

    def factor_of_sum(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the factor of a sum of losses in the backward, without the loss scale.

        Args:
            weight: Number of labels of the sum; at the first call the replicas agree on a unit.

        Raises:
            ValueError: Several ranks decide together, and the optimizer was made without `replicas`.
        """
        ranks = self.group.ranks
        if self.group.replicas is None and ranks is not None and dist.get_world_size(ranks) > 1:
            raise ValueError(
                "a loss has a weight, but this optimizer has no replicas over which gradients are averaged: "
                "pass it to Booster.boost or colossalai.initialize"
            )
        return 1.0 / self.weights.unit(weight)

    @_in_scope
    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients down so that their norm over all ranks is at most `max_norm`.

        Args:
            max_norm: The bound, above 0.
            norm_type: The p of the p-norm; infinity for the largest absolute value.

        Returns:
            The norm before clipping; infinity if the step will be skipped for overflow.

        Raises:
            ValueError: `max_norm` is not above 0.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be above 0")
        if not self.gradients.prepare():
            return torch.tensor(float("inf"))
        return self.gradients.clip_norm(max_norm, norm_type)

    @_in_scope
    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as `clip_grad_by_norm` does, with the signature in the documents of AMP.

        Args:
            model: The model; only the gradients of this optimizer's parameters are clipped.
            max_norm: The bound, above 0.
            norm_type: The p of the p-norm.

        Raises:
            ValueError: `model` has none of this optimizer's parameters, or `max_norm` is not above 0.
        """
        own = {self.masters.param_of(param) for param in self.gradients.plan.params}
        if not isinstance(model, nn.Module) or own.isdisjoint(model.parameters()):
            raise ValueError(
                f"clip_grad_norm is given {type(model).__name__}, which has no parameter of this optimizer: "
                "pass the model, or call clip_grad_by_norm(max_norm)"
            )
        return self.clip_grad_by_norm(max_norm, norm_type)

    @_in_scope
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the gradients to `[-clip_value, clip_value]`.

        Raises:
            ValueError: `clip_value` is not above 0.
        """
        if not clip_value > 0:
            raise ValueError(f"clip_value is {clip_value}; it must be above 0")
        if self.gradients.prepare():
            self.gradients.clip_values(clip_value)

    @_in_scope
    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        if self.gradients.prepare():
            self.gradients.multiply(factor)

    @_in_scope
    def gathered_grads(self) -> dict[str, torch.Tensor]:
        """Return copies of the whole gradients that the next step applies, by the names of the parameters.

        They are averaged over the replicas, divided by the loss scale, and clipped if they have been. Call it
        on all ranks between the last backward of a step and the step; a rank then has memory for all of them.
        Parameters without a gradient are left out, and caches of tables, whose gradients name slots. Before a
        step that will be skipped for overflow they are not divided. Under a pipeline they are those of this
        stage.
        """
        self.gradients.prepare()
        return {
            self.param_names[param]: _whole(param, grad)
            for param, grad in self.masters.gathered_grads(self.gradients.plan.params).items()
            if param in self.param_names and row_cache_of(param) is None
        }

    @_in_scope
    def count_zero_grads(self) -> int:
        """Return the number of zero elements of the gradients over all ranks; collective."""
        self.gradients.prepare()
        return self.gradients.num_zeros()

    @_in_scope
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters, unless a rank found an overflow, or there are no gradients.

        The attribute `stepped` is True if it updated them. As in torch, a second step without a backward
        applies the same gradients again.

        Raises:
            ValueError: `closure` is given and the precision scales the loss, or no optimizer of the model has
                run the backward; or a second step applies gradients of losses with weights again, and the
                optimizer works on float32 copies of them.
            RepeatedOverflowError: `max_consecutive_skips` consecutive steps were skipped.
        """
        if closure is not None and self.scaler.skips:
            raise ValueError(
                "a closure computes gradients that are not scaled: with float16 call backward and step"
            )
        gradients = self.gradients
        if closure is None and gradients.weights.are_used and self.is_stepped_again and gradients.are_copies:
            raise ValueError(_WEIGHTED_TWICE)
        is_finite = gradients.prepare()
        if is_finite and self.max_norm > 0:
            gradients.clip_norm(self.max_norm, self.norm_type)
        has_gradients = closure is not None or gradients.exist
        decision = gradients.decision  # before the closure: its backwards have no decision yet
        assert decision is not None
        result = self._update(closure) if is_finite else None
        self.stepped = is_finite and has_gradients
        for update in self._after_step if self.stepped else ():
            update()
        gradients.end_step(had_gradients=has_gradients)
        if not has_gradients:
            get_dist_logger().log_once(_NO_BACKWARD, ranks=[0])
        elif self.scaler.skips and not decision.is_counted:
            decision.is_counted = True
            reason = "" if decision.overflow is None else self._reason(decision.overflow)
            self.scaler.update(stepped=self.stepped, reason=reason)
        return result

    @_in_scope
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.gradients.forget()
        self.masters.zero_grad(set_to_none=set_to_none)
        self.optim.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def for_checkpoint(self, *, loads: bool = True) -> Iterator[Optimizer]:
        """Context in which the optimizer underneath can be saved or loaded by the names of the model.

        It holds the model's parameters, and float32 masters are among their states.

        Args:
            loads: Whether states can be replaced in the block.
        """
        with self.gradients.plan.scope(), self.masters.as_states(self.optim, loads=loads):
            yield self.optim

    @_in_scope
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer underneath; float32 masters are among the states."""
        return self.masters.state_dict(self.optim)

    @_in_scope
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self.masters.load_state_dict(self.optim, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer underneath.

        Raises:
            ValueError: The optimizer works on float32 masters or slices, which `Booster.boost` makes.
        """
        if len(self.masters):
            raise ValueError(
                "a group is added after boost or initialize, which would have made the float32 masters of "
                "its parameters: add it to the optimizer before, with lr 0 until it is wanted"
            )
        self.optim.add_param_group(param_group)

    def _update(self, closure: Callable[[], float] | None) -> Any:
        for hook in self._before_step:
            hook(self)
        self._is_updating = True
        try:
            return self.masters.step(
                self.optim, None if closure is None else self._closure_with_grads(closure)
            )
        finally:
            self._is_updating = False

    def _closure_with_grads(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Return a closure that also gives the new gradients to the optimizer parameters."""

        def compute() -> float:
            with as_memory(False):  # the user's closure sees whole ColoTensors
                loss = closure()
            if self.weights.kind is LossKind.SUMS:
                self.gradients.prepare()
            else:
                self.masters.take_grads()
            return loss

        return compute

    def _reason(self, overflow: Overflow) -> str:
        """Return the reason of a skip; under a pipeline, one rank broadcasts the name of the parameter."""
        name = "<not a parameter of the model>"
        for param, known in self.param_names.items():
            model_param = self.masters.param_of(param)
            if self._places.get(model_param, UNKNOWN_PLACE) == overflow.place:  # type: ignore[call-overload]
                name = known
                break
        if self._stages is not None and self.group.ranks is not None:
            name = share_name(name, overflow, self.group.ranks)  # the other stages lack the parameter
        return f"skipped for inf or nan in the gradient of {name!r} on rank {overflow.global_rank}"
