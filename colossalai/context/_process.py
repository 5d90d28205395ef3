"""The state of a process beside its `ParallelContext`: random states, what watches, what is done at the end.

torch's generators, the exit of the interpreter and the threads that watch are the process's: no object that a
user makes and destroys could own them. All of it is in one object, `process`, which is also the only state
that this package keeps in a module besides the context. What is done with its parts stands in `_random`,
`_random_saved`, `_supervision` and `_launch`.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from colossalai.cluster import StoreDeparture
from colossalai.monitor import Watchdog

State = dict[str, torch.Tensor]
"""The state of torch's generators by device type."""


@dataclass(frozen=True)
class SeedPlace:
    """Where in the mesh a process is, as far as its random states depend on that.

    Attributes:
        ranks: Its ranks along `dp`, `pp`, and `sp` and the tensor axes together.
        sizes: The number of ranks along these.
    """

    ranks: tuple[int, int, int] = (0, 0, 0)
    sizes: tuple[int, int, int] = (1, 1, 1)


@dataclass
class RandomStates:
    """The random states by mode; that of the current mode lives in torch's generators.

    Attributes:
        seeds: What each mode started from.
        states: The state of each mode when it was last put aside.
        current: The mode in force; None before launch.
        expert_rank: The rank along `ep`, for seeds of experts.
        expert_seed: What the values of experts follow from.
        place: The place in the mesh.
    """

    seeds: dict[Hashable, int] = field(default_factory=dict)
    states: dict[Hashable, State] = field(default_factory=dict)
    current: Hashable | None = None
    expert_rank: int = 0
    expert_seed: int = 0
    place: SeedPlace = field(default_factory=SeedPlace)


@dataclass
class Process:
    """What this process keeps.

    Attributes:
        random: Its random states.
        watching: What watches over the launched job, one entry for each launch that has not ended.
        before_end: What is to be done before the groups of the job are destroyed, in this order.
        departure: From the store of the job; None outside of a job.
        expert_losses: What layers with experts have left for the loss of the forward that ran last.
        num_launches: How often it has launched. Tells launches apart in a store that outlives them.
    """

    random: RandomStates = field(default_factory=RandomStates)
    watching: list[tuple[Watchdog | None, ExitStack]] = field(default_factory=list)
    before_end: list[Callable[[], object]] = field(default_factory=list)
    departure: StoreDeparture | None = None
    expert_losses: list[torch.Tensor] = field(default_factory=list)
    num_launches: int = 0


process = Process()
"""The state of this process."""
