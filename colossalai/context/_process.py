"""The state of a process outside of its `ParallelContext`: random states, watchdogs, and actions at the end.

torch's generators, the exit of the interpreter and the watching threads belong to the process: no object that
a user makes and destroys could own them. All of it is in one object, `process`, which is the only state of
this package in a module except the context. Its parts are used in `_random`, `_random_saved`, `_supervision`
and `_launch`.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from colossalai._clock import Clock
from colossalai.cluster import StoreDeparture
from colossalai.monitor import Watchdog

State = dict[str, torch.Tensor]
"""The state of torch's generators by device type."""


@dataclass(frozen=True)
class SeedPlace:
    """Place of a process in the mesh, for its random states.

    Attributes:
        ranks: Its ranks along `dp`, `pp`, and `sp` and the tensor axes together.
        sizes: The number of ranks along these.
    """

    ranks: tuple[int, int, int] = (0, 0, 0)
    sizes: tuple[int, int, int] = (1, 1, 1)


@dataclass
class RandomStates:
    """The random states by mode; the state of the current mode is in torch's generators.

    Attributes:
        seeds: The seed of each mode.
        states: The state of each mode when it was last saved here.
        current: The mode in force; None before launch.
        expert_rank: The rank along `ep`, for seeds of experts.
        expert_seed: The seed of the values of experts.
        place: The place in the mesh.
    """

    seeds: dict[Hashable, int] = field(default_factory=dict)
    states: dict[Hashable, State] = field(default_factory=dict)
    current: Hashable | None = None
    expert_rank: int = 0
    expert_seed: int = 0
    place: SeedPlace = field(default_factory=SeedPlace)


@dataclass(eq=False)
class ExpertLosses:
    """The auxiliary losses of one forward.

    Attributes:
        terms: The losses, one from each call of a layer with experts.
        number: The number of the forward, counted over those of wrapped models; 0 if no wrapper ran it.
        extends: The losses of a finished forward, if `terms` are these and later additions of the user.
        behind: The losses of the forwards that made the inputs.
    """

    terms: list[torch.Tensor] = field(default_factory=list)
    number: int = 0
    extends: "ExpertLosses | None" = None
    behind: "list[ExpertLosses]" = field(default_factory=list)

    def total(self) -> torch.Tensor | float:
        """Return their sum, on the device of the first; 0.0 without losses."""
        if not self.terms:
            return 0.0
        total = self.terms[0]
        for term in self.terms[1:]:
            total = total + term.to(total.device)
        return total


@dataclass
class ExpertForwards:
    """The forwards whose auxiliary losses a criterion can look up.

    Attributes:
        current: The losses of the forward in progress in this thread, of the innermost wrapped model.
        last: The losses of the forward that began last.
        num_wrapped: The number of forwards of wrapped models so far.
        has_layers: Whether layers with experts have been built, or have added a loss.
        layer_classes: The classes of the layers that have been built.
        waiting: The wrapped models without a collector, each with the function that installs one.
        sources: The wrapped models whose forwards had losses, and for others the first layer of each forward.
        num_sources_compared: The number of `sources` when they were last compared for a warning.
        outputs: The losses by output, for outputs of forwards without a graph.
    """

    current: ContextVar[ExpertLosses | None] = field(
        default_factory=lambda: ContextVar("expert_losses", default=None)
    )
    last: ExpertLosses = field(default_factory=ExpertLosses)
    num_wrapped: int = 0
    has_layers: bool = False
    layer_classes: set[type[nn.Module]] = field(default_factory=set)
    waiting: WeakKeyDictionary[nn.Module, Callable[[Any], None]] = field(default_factory=WeakKeyDictionary)
    sources: WeakSet[nn.Module] = field(default_factory=WeakSet)
    num_sources_compared: int = 0
    outputs: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)


@dataclass
class Process:
    """State of this process.

    Attributes:
        random: Its random states.
        watching: Watchdog and open contexts of the launched job, for each launch that has not ended.
        before_end: Actions to run, in order, before the groups of the job are destroyed.
        departure: Departure from the store of the job; None outside of a job.
        experts: Losses of layers with experts, by forward.
        num_launches: Number of launches so far. It distinguishes launches in a store that outlives them.
        clock: The clock of its waits and of their deadlines.
    """

    random: RandomStates = field(default_factory=RandomStates)
    watching: list[tuple[Watchdog | None, ExitStack]] = field(default_factory=list)
    before_end: list[Callable[[], object]] = field(default_factory=list)
    departure: StoreDeparture | None = None
    experts: ExpertForwards = field(default_factory=ExpertForwards)
    num_launches: int = 0
    clock: Clock = field(default_factory=Clock)


process = Process()
"""The state of this process."""
