"""The gradients of an optimizer between a backward and the step, and the optimizers that share backwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.amp._gradient_state import MOVES, GradEvent, GradState
from colossalai.amp._loss_scaling import Decision, LossScaler, decide
from colossalai.amp._loss_weights import LossKind, LossTerm, LossWeights
from colossalai.amp._sharded_params import OptimizerParams
from colossalai.amp._step_plan import StepPlan
from colossalai.context import Axis
from colossalai.tensor import Windows, grad_norm, local_grads, num_zero_grads, scale_grads


class OptimizerGroup:
    """The optimizers of a model: they share backwards, the loss scale, and the decision whether to step.

    See [Note: one scale for the optimizers of a model].

    Args:
        scaler: The loss scaler. Default: no scaling.
        ranks: The ranks that decide together; None for this process alone.
        replicas: The ranks over which gradients are averaged, so that losses can have weights; None for this
            process alone.
        after_step: The updates of the model that follow its optimizer step, such as the moves of routing
            biases, in order; the first member calls them after each update. Default: none.
    """

    def __init__(
        self,
        scaler: LossScaler | None = None,
        *,
        ranks: dist.ProcessGroup | None = None,
        replicas: Axis | None = None,
        after_step: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.scaler: LossScaler = scaler or LossScaler()
        self.ranks = ranks
        self.replicas = replicas
        self.after_step = tuple(after_step)
        self.members: list[Gradients] = []

    def start_backward(self, by: "Gradients") -> float:
        """Prepare all members for a backward of one of them; return the loss scale."""
        scale = self.scaler.scale
        for each in self.members:
            each.start_backward(scale, GradEvent.BACKWARD if each is by else GradEvent.OTHER_BACKWARD)
        return scale

    def note_loss(self, loss: LossTerm, by: "Gradients") -> None:
        """Record the loss of a backward of one member with all members.

        Raises:
            ValueError: Losses with and without a weight would add up.
        """
        total = None if loss.weight is None else loss.total
        for each in self.members:
            each.weights.add(loss.weight, total, is_own=each is by)

    def decide(self, by: "Gradients") -> None:
        """Take the gradients of a member, and all scaled ones, and decide whether they are finite.

        Collective, with one all-reduce of one int64 over the ranks, if the scaler can skip steps.

        Raises:
            ValueError: `by` has gradients of a backward with an unknown loss scale.
        """
        if not self.scaler.skips:
            by.take(Decision())
            return
        deciding = [each for each in self.members if each is by or each.state is GradState.SCALED]
        for each in deciding:
            each.take()
        by.refuse_unknown_scale()
        decision = decide((run for each in deciding for run in each.placed_runs()), self.ranks)
        for each in deciding:
            each.follow(decision)


class Gradients:
    """The gradients of one optimizer; its methods return or change true ones: averaged, without a scale.

    See [Note: states of gradients].

    Args:
        optim: The optimizer.
        optimizer_params: Tensors that it updates instead of the model's parameters.
        group: The optimizers of the model.
        places: Place of each parameter in the model.
        stages: See `OptimizerWrapper`.
        counts: See `OptimizerWrapper`.

    Attributes:
        state: The state of the gradients.
        decision: The decision on them; None before it, and after the step.
        weights: The weights of their losses.
        plan: Flat lists of the tensors that the optimizer updates.
        has_run: Whether there was a backward since the last step or `forget`.
        were_stepped_with: Whether the last step had gradients, and they have not been cleared since.
    """

    def __init__(
        self,
        optim: Optimizer,
        optimizer_params: OptimizerParams,
        group: OptimizerGroup,
        *,
        places: Mapping[nn.Parameter, int],
        stages: dist.ProcessGroup | None = None,
        counts: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self.state = GradState.EMPTY
        self.decision: Decision | None = None
        self.weights = LossWeights(group.scaler, group.replicas)
        self.has_run = False
        self.were_stepped_with = False
        self._optim = optim
        self._optimizer_params = optimizer_params
        self._group = group
        self._places = places
        self._stages = stages
        self._counts = counts
        self._scale: float | None = None  # contained in the gradients; None: there are none, or they are true
        self._weights_factor: torch.Tensor | None = None  # turns sums into means, once they are taken
        self._factor: float | torch.Tensor = 1.0  # that made the last gradients true
        self.plan = self._lower([param for each in optim.param_groups for param in each["params"]])
        group.members.append(self)

    def current_plan(self) -> StepPlan:
        """Return the plan, made again if users have put other parameters into the groups of the optimizer."""
        params = [param for each in self._optim.param_groups for param in each["params"]]
        if [*map(id, params)] != self.plan.ids:
            self.plan = self._lower(params)
        return self.plan

    @property
    def exist(self) -> bool:
        """Whether there are gradients for a step, from a backward or assigned by users."""
        return self.has_run or any(param.grad is not None for param in self.plan.params)

    @property
    def are_copies(self) -> bool:
        """Whether the optimizer has copies, in another dtype, of the gradients from backwards."""
        plan = self.plan
        pairs = zip(plan.params, plan.model_params, strict=True)
        return any(held.dtype != param.dtype for held, param in pairs)

    def move(self, event: GradEvent) -> None:
        """Change the state by a legal event."""
        after = MOVES[self.state].get(event)
        assert after is not None, f"gradients that are {self.state.name} cannot {event.name}"
        self.state = after

    def start_backward(self, scale: float, event: GradEvent) -> None:
        """Prepare for a backward with a loss scale; present gradients are rescaled to it.

        Args:
            scale: The loss scale.
            event: `BACKWARD` or `OTHER_BACKWARD`.
        """
        is_own = event is GradEvent.BACKWARD
        is_spent = is_own and self.weights.kind is LossKind.SPENT
        if is_spent and not self._optimizer_params.has_grads(self.current_plan().params):
            self.weights.forget()  # users have cleared the gradients
        if self._scale is None:
            if self.state is GradState.EMPTY:  # except gradients that users have assigned
                self._scale_untaken(scale)
            else:  # they can be clipped, and have no scale any more
                self._optimizer_params.put_back_grads(scale, untaken=scale * self._factor)
                self._scale_own(scale)
        else:
            self._scale_untaken(scale / self._scale)
        self.move(event)
        self._scale, self.decision, self.has_run = scale, None, True

    def prepare(self) -> bool:
        """Make the gradients true, once between a backward and the step; return whether they are finite.

        This is the only division by the loss scale and by the weight of all losses. Collective.
        """
        if self.decision is None:
            self._group.decide(self)
        else:  # users can have cleared gradients since they were taken
            self._optimizer_params.follow_users()
        if self.state is GradState.ACCEPTED:
            scale = 1.0 if self._scale is None else self._scale
            self._factor = 1.0 / scale
            if self._weights_factor is not None:
                self._factor = self._weights_factor / scale
                self.weights.spend()
            if self._weights_factor is not None or scale != 1.0:
                self.multiply(self._factor)
            self.move(GradEvent.DIVIDE)
            self._scale = self._weights_factor = None
        return self.state is GradState.TRUE

    def take(self, decision: Decision | None = None) -> None:
        """Finish the reduction of the gradients, and give them to the optimizer parameters; collective.

        Args:
            decision: The decision on them, if there is one already.
        """
        self.current_plan()
        self._optimizer_params.take_grads()
        self._weights_factor = self.weights.factor()
        if decision is not None:
            self.follow(decision)

    def follow(self, decision: Decision) -> None:
        """Apply a decision on the gradients."""
        self.decision = decision
        self.move(GradEvent.ACCEPT if decision.overflow is None else GradEvent.REJECT)

    def refuse_unknown_scale(self) -> None:
        """Refuse gradients of a backward that was not run by an optimizer of the model.

        Raises:
            ValueError: A parameter has such a gradient, and losses are scaled.
        """
        is_unknown = self._scale is None and self._group.scaler.scale != 1.0
        if is_unknown and any(param.grad is not None for param in self.plan.params):
            raise ValueError(
                f"{type(self._optim).__name__}: a step without a backward whose loss scale is known: run it "
                "by optimizer.backward(loss), booster.backward(loss, optimizer) or engine.backward(loss), "
                "with an optimizer of the same model. One loss of two models that were boosted or "
                "initialized separately has one scale only: put them into one model, or take bfloat16, which "
                "has none"
            )

    def clip_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip their norm over all ranks, and return the norm before; after `prepare`; collective."""
        norm = grad_norm(self.plan.norm_groups, norm_type, stages=self._stages, windows=self._windows())
        self.multiply((max_norm / (norm + 1e-6)).clamp(max=1.0))  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        return norm

    def clip_values(self, bound: float) -> None:
        """Clamp their elements to `[-bound, bound]`; after `prepare`."""
        for run in self._runs():
            for param in run:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.coalesce()  # its entries are elements then
            for grad in local_grads(run):
                (grad.values() if grad.is_sparse else grad).clamp_(-bound, bound)

    def num_zeros(self) -> int:
        """Return the number of zero elements over all ranks; after `prepare`; collective."""
        return num_zero_grads(self.plan.norm_groups, stages=self._stages, windows=self._windows())

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Multiply them by a factor; after `prepare`."""
        for run in self._runs():
            scale_grads(run, factor)

    def placed_runs(self) -> Iterator[tuple[Sequence[nn.Parameter], Sequence[int]]]:
        """Yield the parameters in runs that fit into memory together, and their places in the model."""
        plan = self.plan
        if not self._optimizer_params.is_paged:
            yield plan.params, plan.places
            return
        place_of = dict(zip(plan.ids, plan.places, strict=True))
        for run in self._optimizer_params.windows(plan.params):
            yield run, [place_of[id(param)] for param in run]

    def end_step(self, *, had_gradients: bool) -> None:
        """Record a step that was made or skipped."""
        self.move(GradEvent.STEP)
        self.decision = self._scale = None
        self.has_run, self.were_stepped_with = False, had_gradients
        self.weights.spend()
        if not any(each.weights.kind is LossKind.SUMS for each in self._group.members):
            self.weights.renew_unit()

    def forget(self) -> None:
        """Record that there are no gradients."""
        self.move(GradEvent.FORGET)
        self.decision = self._scale = None
        self.has_run = self.were_stepped_with = False
        self.weights.forget()

    def _lower(self, params: Sequence[nn.Parameter]) -> StepPlan:
        return StepPlan.lower(params, self._optimizer_params, self._places, self._counts)

    def _windows(self) -> Windows | None:
        return self._optimizer_params.windows if self._optimizer_params.is_paged else None

    def _runs(self) -> Iterable[Sequence[nn.Parameter]]:
        """Yield the parameters in runs that fit into memory together."""
        params = self.plan.params
        return self._optimizer_params.windows(params) if self._optimizer_params.is_paged else (params,)

    def _scale_untaken(self, factor: float) -> None:
        """Multiply gradients from backwards that have not been taken yet."""
        if factor != 1.0:
            self._optimizer_params.scale_grads(factor)
            self._scale_own(factor)

    def _scale_own(self, factor: float) -> None:
        """Multiply the gradients of those parameters of the model that the optimizer updates itself."""
        if factor != 1.0:
            plan = self.current_plan()
            pairs = zip(plan.params, plan.model_params, strict=True)
            scale_grads([held for held, param in pairs if held is param], factor)
