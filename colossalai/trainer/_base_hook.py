"""The base of all hooks: the moments in the life of a training, each of which does nothing here."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


class BaseHook:
    """Something to do at certain moments of a training; override the methods of the moments that matter.

    Every rank has the same hooks. A hook may limit its output to some ranks, but not its collectives, such as
    `trainer.metrics["train"].step_values()`.

    Args:
        priority: Hooks with a lower value run earlier; those of the same one in the order they were given.
    """

    priority: int = 10
    """On the class too: a subclass whose `__init__` does not call this one has it."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: "Trainer") -> None:
        """Run when a trainer takes the hook."""

    def before_train(self, trainer: "Trainer") -> None:
        """Run when a training begins."""

    def after_train(self, trainer: "Trainer") -> None:
        """Run when a training is complete."""

    def before_train_epoch(self, trainer: "Trainer") -> None:
        """Run when a training epoch begins."""

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Run when a training epoch is complete; `trainer.cur_epoch` counts it."""

    def before_train_iter(self, trainer: "Trainer") -> None:
        """Run when a training iteration begins; its batch is loaded."""

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Run when a training iteration is complete; `trainer.cur_step` counts it.

        Args:
            trainer: The trainer.
            output: The output of the model, None with `return_output_label=False`.
            label: The label of the batch, None with `return_output_label=False`.
            loss: The mean loss of the batch, detached; None on a rank that does not compute it.
        """

    def before_test(self, trainer: "Trainer") -> None:
        """Run when a test begins."""

    def after_test(self, trainer: "Trainer") -> None:
        """Run when a test is complete."""

    def before_test_epoch(self, trainer: "Trainer") -> None:
        """Run when the pass over the test data begins."""

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Run when the pass over the test data is complete."""

    def before_test_iter(self, trainer: "Trainer") -> None:
        """Run when a test iteration begins; its batch is loaded."""

    def after_test_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Run when a test iteration is complete; the arguments are those of `after_train_iter`."""

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        """Run when an exception, including Ctrl-C, ends a training or a test; it is re-raised afterwards.

        Do not issue collectives here: the other ranks may be at another point of the program.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the hook needs after a restart, as plain values, for training states."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; called unless that was empty."""

    def init_runner_states(self, trainer: "Trainer", key: str, val: Any) -> None:
        """Put `val` under `key` into `trainer.states` unless there is something already."""
        trainer.states.setdefault(key, val)


def check_interval(interval: int, *, name: str = "interval") -> int:
    """Return a number of epochs or steps if it is a positive integer.

    Raises:
        ValueError: `interval` is not a positive integer.
    """
    if not isinstance(interval, int) or interval <= 0:
        raise ValueError(f"{name}={interval!r} is out of range; give a positive integer")
    return interval


def hook_states(hooks: Sequence[BaseHook]) -> dict[str, Any]:
    """Return the states of hooks by class name, with a number appended for further hooks of a class."""
    return {name: state for name, hook in _named(hooks) if (state := hook.state_dict())}


def load_hook_states(hooks: Sequence[BaseHook], states: Mapping[str, Any]) -> None:
    """Restore the states of `hook_states`; a hook without a state starts anew."""
    for name, hook in _named(hooks):
        if name in states:
            hook.load_state_dict(states[name])


def _named(hooks: Sequence[BaseHook]) -> Iterator[tuple[str, BaseHook]]:
    numbers: Counter[str] = Counter()
    for hook in hooks:
        name = type(hook).__name__
        numbers[name] += 1
        yield (name if numbers[name] == 1 else f"{name}-{numbers[name]}"), hook
