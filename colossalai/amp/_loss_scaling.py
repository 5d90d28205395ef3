"""Loss scaling: multiply the loss, so that small gradients do not underflow in float16; divide later.

[Note: one overflow decision]
An inf or nan can be in the gradients of one rank only (each rank of a sharded model sees its own slices). If
that rank alone skipped its step, the replicas would diverge. So the ranks take the maximum of their findings,
once per step, and all skip or none does. A finding is one number: 0 if all gradients are finite, else larger
for an earlier parameter of the model, then for a lower rank. So its maximum over the ranks identifies the
first parameter and its rank, without another message.

[Note: one scale for the optimizers of a model]
A backward multiplies one loss by one scale, and adds gradients that contain it in every optimizer of the
model. So those share a scaler. Each records the scale of the latest backward, of any of them, and divides by
that one: by the time of its step, the scaler may have changed after a step of another optimizer. Gradients
that are kept for accumulation are rescaled before a backward with another scale adds to them.

The first optimizer that needs a decision checks the gradients of all that wait for their step: if one of them
has an overflow, all skip, and the scaler counts one step. An optimizer that has made or skipped its step, and
has not cleared its gradients yet, is left out: additions of a later backward are thrown away, and an inf in
them is an old one. All this follows from the order of the program's calls, so all ranks decide alike.
"""

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from colossalai.context import check_number, check_positive
from colossalai.logging import get_dist_logger
from colossalai.tensor import local_grads

MAX_CONSECUTIVE_SKIPS = 50
"""Default number of consecutive skipped steps after which training stops."""

_HISTORY_LENGTH = 100
_REMINDER = 100  # consecutive skipped steps after which they are logged, if there is no bound
_REPORT_LENGTH = 5


class RepeatedOverflowError(RuntimeError):
    """Too many consecutive steps were skipped."""


@dataclass(frozen=True)
class ScaleRecord:
    """A step that was skipped, or that changed the loss scale.

    Attributes:
        step: Number of the step, skipped ones included, from 1.
        scale: The loss scale after it.
        reason: Reason of the record.
    """

    step: int
    scale: float
    reason: str


class LossScaler:
    """The scaler of precisions that need none: the loss is not scaled and no step is skipped.

    Attributes:
        scale: The factor of the loss.
        skips: Whether steps are skipped for an overflow, so that gradients have to be checked.
        weight_unit: The unit of the weights of losses, a scalar; None before the first one. See
            [Note: sums until the step].
    """

    scale: float = 1.0
    skips: ClassVar[bool] = False
    weight_unit: torch.Tensor | None = None

    def update(self, *, stepped: bool, reason: str = "") -> None:
        """Adapt the scale after a step that was made or skipped; only of scalers that skip steps.

        Args:
            stepped: Whether it was made.
            reason: Reason of the skip.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""


def check_scale(scale: float, name: str, *, least: float, most: float) -> None:
    """Check the first value of a dynamic loss scale.

    Args:
        scale: The value.
        name: Name of the option, for the error.
        least: `min_scale` of the same options.
        most: `max_scale` of the same options.

    Raises:
        ValueError: `scale` is not a number above 0, or not between `least` and `most`.
    """
    check_number(scale, name, least=0, positive=True)
    if not least <= scale <= most:
        raise ValueError(
            f"{name} is {scale:g}; it must be between min_scale ({least:g}) and max_scale ({most:g})"
        )


class CheckedLossScaler(LossScaler, ABC):
    """A scaler that skips steps with an overflow, and records them; abstract.

    It counts decisions: optimizers of one model, which share it, make one decision for a common step.

    Args:
        init_scale: The first scale.
        max_consecutive_skips: Number of consecutive skipped steps that stops training; 0 for no bound.
        verbose: Whether to log every change of the scale.
        quiet: Whether to suppress warnings of skipped steps.
    """

    skips: ClassVar[bool] = True

    def __init__(
        self,
        *,
        init_scale: float,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        verbose: bool = False,
        quiet: bool = False,
    ) -> None:
        if type(max_consecutive_skips) is not int or max_consecutive_skips < 0:
            raise ValueError(
                f"max_consecutive_skips is {max_consecutive_skips!r}; it must be an integer, 0 for no bound"
            )
        self.scale = float(init_scale)
        self.max_consecutive_skips = max_consecutive_skips
        self.verbose = verbose
        self.quiet = quiet
        self.num_steps = 0
        self.num_skips_in_a_row = 0
        self._scale_before_skips = self.scale
        self._history: deque[ScaleRecord] = deque(maxlen=_HISTORY_LENGTH)

    @abstractmethod
    def _adapt(self, *, stepped: bool) -> str:
        """Change the scale after a step, if needed; return the reason if it grew."""

    @property
    def history(self) -> tuple[ScaleRecord, ...]:
        """The last hundred skipped steps and changes of the scale, the latest one last."""
        return tuple(self._history)

    def update(self, *, stepped: bool, reason: str = "") -> None:
        """Adapt the scale, keep a record, and warn of skipped steps.

        Of several consecutive skips, the first is logged at once, and the others in one line when they end.

        Raises:
            RepeatedOverflowError: `max_consecutive_skips` consecutive steps were skipped; on all ranks, since
                they skip together.
        """
        self.num_steps += 1
        before = self.scale
        growth = self._adapt(stepped=stepped)
        if stepped:
            self._warn_of_skips()
            self.num_skips_in_a_row = 0
            if self.scale != before:
                self._record(growth, before, "info" if self.verbose else "")
            return
        self.num_skips_in_a_row += 1
        is_first = self.num_skips_in_a_row == 1
        if is_first:
            self._scale_before_skips = before
        level = "warning" if (is_first or self.verbose) and not self.quiet else ""
        self._record(reason or "overflow: the step was skipped", before, level)
        if self.max_consecutive_skips == 0 and self.num_skips_in_a_row % _REMINDER == 0:
            self._warn_of_skips(self.num_steps)
        if self.num_skips_in_a_row == self.max_consecutive_skips:
            raise RepeatedOverflowError(self._report())

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the counts and the history."""
        unit = {} if self.weight_unit is None else {"weight_unit": self.weight_unit.item()}
        return {
            "scale": self.scale,
            "num_steps": self.num_steps,
            "num_skips_in_a_row": self.num_skips_in_a_row,
            "history": [astuple(record) for record in self._history],
            **unit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`; the state of a precision without a scale changes nothing."""
        if not state:
            return
        self.scale = float(state["scale"])
        self.num_steps = int(state.get("num_steps", 0))  # older checkpoints have the scale only
        self.num_skips_in_a_row = int(state.get("num_skips_in_a_row", 0))
        self._scale_before_skips = self.scale
        self._history.clear()
        self._history.extend(ScaleRecord(*record) for record in state.get("history", []))
        unit = state.get("weight_unit")
        self.weight_unit = None if unit is None else torch.tensor(unit, dtype=torch.float64)

    def _record(self, reason: str, before: float, level: str) -> None:
        self._history.append(ScaleRecord(self.num_steps, self.scale, reason))
        if level:
            message = f"step {self.num_steps}: {reason}; loss scale {before:g}, now {self.scale:g}"
            getattr(get_dist_logger(), level)(message, ranks=[0])

    def _warn_of_skips(self, last: int | None = None) -> None:
        """Warn of the consecutive skipped steps up to `last`, by default the one before this step."""
        if self.num_skips_in_a_row < 2 or self.quiet or self.verbose:
            return
        last = self.num_steps - 1 if last is None else last
        get_dist_logger().warning(
            f"steps {last - self.num_skips_in_a_row + 1} to {last} were skipped for inf or nan in gradients; "
            f"loss scale {self._scale_before_skips:g} before, now {self.history[-1].scale:g}",
            ranks=[0],
        )

    def _report(self) -> str:
        latest = "; ".join(
            f"step {record.step}: {record.reason} (loss scale then {record.scale:g})"
            for record in self.history[-_REPORT_LENGTH:]
        )
        return (
            f"{self.num_skips_in_a_row} steps in a row were skipped. The latest: {latest}. If the scale is "
            "small by now, the gradients themselves are inf or nan: look at the loss, the data, the learning "
            "rate and the named parameter. max_consecutive_skips sets the bound"
        )


class StaticLossScaler(CheckedLossScaler):
    """A constant scale; a step with an overflow is skipped all the same.

    Args:
        scale: The scale, above 0.
        max_consecutive_skips: Number of consecutive skipped steps that stops training; 0 for no bound.
        quiet: Whether to suppress warnings of skipped steps.

    Raises:
        ValueError: `scale` is not above 0.
    """

    def __init__(
        self, scale: float, *, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS, quiet: bool = False
    ) -> None:
        if not scale > 0:
            raise ValueError(f"the loss scale is {scale}; it must be above 0")
        super().__init__(init_scale=scale, max_consecutive_skips=max_consecutive_skips, quiet=quiet)

    def _adapt(self, *, stepped: bool) -> str:
        return ""


class DynamicLossScaler(CheckedLossScaler):
    """A scale that grows without overflows and shrinks at one (Micikevicius et al., 1710.03740).

    Args:
        init_scale: The first scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks; the steps are skipped
            all the same.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale.
        max_consecutive_skips: Number of consecutive skipped steps that stops training; 0 for no bound.
        verbose: Whether to log every change of the scale.
        quiet: Whether to suppress warnings of skipped steps.

    Raises:
        ValueError: An option is of another type or out of range, or `init_scale` is not between `min_scale`
            and `max_scale`.
    """

    def __init__(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float = float("inf"),
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        verbose: bool = False,
        quiet: bool = False,
    ) -> None:
        check_scale(init_scale, "init_scale", least=min_scale, most=max_scale)
        check_number(growth_factor, "growth_factor", least=1, positive=True)
        if check_number(backoff_factor, "backoff_factor", least=0, positive=True) >= 1:
            raise ValueError(f"backoff_factor is {backoff_factor}; it must be below 1")
        check_positive(growth_interval, "growth_interval")
        check_positive(hysteresis, "hysteresis")
        super().__init__(
            init_scale=init_scale, max_consecutive_skips=max_consecutive_skips, verbose=verbose, quiet=quiet
        )
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self._overflows = 0  # since the last growth

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the history, and the counts of good steps and overflows."""
        return {**super().state_dict(), "good_steps": self.good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        super().load_state_dict(state)
        self.good_steps = int(state.get("good_steps", 0))  # a static scale has none
        self._overflows = int(state.get("overflows", 0))  # nor have older checkpoints

    def _adapt(self, *, stepped: bool) -> str:
        """Shrink the scale after enough skipped steps, grow it after enough good ones."""
        if stepped:
            return self._count_good_step()
        self._count_overflow()
        return ""

    def _count_good_step(self) -> str:
        self.good_steps += 1
        if self.good_steps < self.growth_interval:
            return ""
        self.scale = min(self.scale * self.growth_factor, self.max_scale)
        self.good_steps = 0
        self._overflows = 0
        return f"{self.growth_interval} steps without overflow"

    def _count_overflow(self) -> None:
        self.good_steps = 0
        self._overflows += 1
        if self._overflows >= self.hysteresis:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)


_RANK_BITS = 20
_MAX_RANK = 2**_RANK_BITS - 1
_MAX_PLACE = 2**40
_NAME_BYTES = 256


@dataclass(frozen=True)
class Overflow:
    """The first gradient with an inf or nan.

    Attributes:
        place: Place of its parameter in the model.
        global_rank: The lowest rank with an inf or nan in it.
    """

    place: int
    global_rank: int


def find_overflow(
    placed: Iterable[tuple[Sequence[torch.Tensor], Sequence[int]]], group: dist.ProcessGroup | None
) -> Overflow | None:
    """Return the first overflow over all ranks of a group, the same on each; None without one.

    One all-reduce of one int64 over `group`. See [Note: one overflow decision].

    Args:
        placed: This rank's gradients (slices, if they are sharded), and for each the place of its parameter
            in the model; in runs, checked one after the other.
        group: The ranks that decide together; None for this process alone.
    """
    findings = [_finding(grads, places) for grads, places in placed]
    finding = functools.reduce(torch.maximum, findings) if findings else _finding([], [])
    if group is not None:
        # MAX of one number over all deciding ranks: the first overflow, so that all step or none does.
        dist.all_reduce(finding, op=dist.ReduceOp.MAX, group=group)
    value = int(finding.item())
    if value == 0:
        return None
    return Overflow(_MAX_PLACE - (value >> _RANK_BITS), _MAX_RANK - (value & _MAX_RANK))


@dataclass(eq=False)
class Decision:
    """Decision whether some optimizers step.

    Attributes:
        overflow: The overflow that forbids the step, or None.
        is_counted: Whether the scaler has counted it.
    """

    overflow: Overflow | None = None
    is_counted: bool = False


def decide(
    runs: Iterable[tuple[Sequence[torch.Tensor], Sequence[int]]], group: dist.ProcessGroup | None
) -> Decision:
    """Search for an inf or nan; one all-reduce of one int64 over `group`.

    Args:
        runs: Parameters, and their places in the model; those of a run are in memory together.
        group: The ranks that decide together; None for this process alone.
    """

    def placed_grads() -> Iterator[tuple[list[torch.Tensor], list[int]]]:
        for params, places in runs:
            with_grad = [place for param, place in zip(params, places, strict=True) if param.grad is not None]
            yield local_grads(params), with_grad

    return Decision(find_overflow(placed_grads(), group))


def share_name(name: str, overflow: Overflow, group: dist.ProcessGroup) -> str:
    """Return the name of an overflow's parameter on the overflow's rank; other ranks can lack it.

    One broadcast of 256 bytes over `group`.

    Args:
        name: The name on this rank; only the one on the overflow's rank is used.
        overflow: The overflow.
        group: The ranks that found it together.
    """
    content = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    encoded = name.encode()[-_NAME_BYTES:]
    content[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    content = content.to(_default_device())
    dist.broadcast(content, src=overflow.global_rank, group=group)  # from the rank that has the parameter
    return bytes(content.tolist()).rstrip(b"\0").decode(errors="replace")


def _finding(grads: Sequence[torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    """Return this rank's finding as an int64 scalar on the gradients' device."""
    # torch has no infinity norm of an empty tensor
    entries = (grad._values() if grad.is_sparse else grad for grad in grads)
    held = [(grad, place) for grad, place in zip(entries, places, strict=True) if grad.numel()]
    if not held:
        return torch.zeros((), dtype=torch.int64, device=_default_device())
    global_rank = dist.get_rank() if dist.is_initialized() else 0
    codes = [((_MAX_PLACE - place) << _RANK_BITS) + _MAX_RANK - global_rank for _, place in held]
    largest = torch._foreach_norm([grad for grad, _ in held], float("inf"))
    is_bad = ~torch.stack([norm.isfinite() for norm in largest])
    return (is_bad * torch.tensor(codes, device=is_bad.device)).amax()


def _default_device() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
