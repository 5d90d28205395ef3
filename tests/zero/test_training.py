"""What breaks other implementations of ZeRO: each case trains as one process does, under both stages."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossalai
import colossalai.nn.optimizer
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import DiskOptions, HybridAdam
from colossalai.zero import declare_elementwise, is_elementwise
from tests.parity.training import Batch, Run, Task, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import BATCH, WIDTH, Branches, Net, NoGradient, batch_of, plugin

pytestmark = pytest.mark.dist

Params = Iterable[nn.Parameter]


def batches() -> list[Batch]:
    """Return samples whose first feature says who uses a branch: nobody, the first rank, the last, all."""
    found = [batch_of(step) for step in range(4)]
    for x, users in zip(found, ((0, 0), (0, 1), (BATCH - 2, BATCH), (0, BATCH)), strict=True):
        x[:, 0] = -1.0
        x[slice(*users), 0] = 1.0
    return [(x,) for x in found]


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().mean()


NET = Task(
    build=Net,
    batches=batches,
    criterion=None,
    loss=mean_square,
    optimizer=partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
)


def frozen() -> Net:
    model = Net()
    model.first.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


class LowRank(nn.Module):
    """An adapter beside a frozen layer, as LoRA has them (2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Net:
    model = Net().requires_grad_(False)
    model.first, model.middle = LowRank(model.first), LowRank(model.middle)
    return model


class Spare(Net):
    """With a parameter that a backward leads to, and that gets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(super().forward(x), self.spare)


class Reused(Net):
    """`middle` three times over, and its weight once more by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = torch.tanh(self.middle(x))
        return self.last(x @ self.middle.weight) * self.gain


class Tied(Net):
    """`middle` and `other` share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(7, 7)
        self.other.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(torch.tanh(self.middle(self.first(x))))) * self.gain


class Recomputed(Net):
    """`middle` is checkpointed."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x) * self.gain


class ReentrantRecomputed(Recomputed):
    reentrant = True


class ChannelsLast(nn.Module):
    """A weight whose memory is not in the order of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 1, 1, WIDTH)).mean(dim=(1, 2))
        return x @ self.transposed.t()


class One(nn.Module):
    """Less than one element for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class MixedDtypes(nn.Module):
    """A float32 head on a bfloat16 body, once it is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(self.body[0].weight.dtype)).to(self.head.weight.dtype))


def cast(model: Any) -> nn.Module:
    model.body.bfloat16()
    model.head.float()
    return model


def groups(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    decayed = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.1, "betas": (0.5, 0.9)}], lr=0.02
    )


def of_some(
    build: Any, params: Params, *, min_ndim: int = 0, num_left_out: int = 0, **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer of some parameters; gradients of the others are dropped after each step."""
    params = list(params)
    held = [param for param in params[num_left_out:] if param.ndim >= min_ndim]
    rest = set(params).difference(held)

    def forget(*_: Any) -> None:
        for param in rest:
            param.grad = None

    optimizer = build(held, **options)
    optimizer.register_step_post_hook(forget)
    return optimizer


def with_a_frozen_one(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    params[3].requires_grad_(False)
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def evaluate_between(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(*batch)
    model(*batch).sum()
    model.train()
    return mean_square(model, batch)


def two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return mean_square(model, batch) + model(2 * batch[0]).abs().mean()


def forward_without_backward(model: nn.Module, batch: Batch) -> Tensor:
    model(*batch)
    return mean_square(model, batch)


class Centered(torch.optim.SGD):
    """An optimizer of the user's own, with a step that looks at whole tensors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad -= param.grad.mean()
        return super().step(closure)


CENTERED = replace(NET, optimizer=partial(Centered, lr=0.1))
# bfloat16 gradients are sums over halves of the batch on one side, and rounded in another order.
MIXED = replace(
    NET, build=MixedDtypes, place=cast, optimizer=partial(torch.optim.SGD, lr=0.05), tolerance=0.02
)
ON_DISK = partial(
    HybridAdam,
    lr=0.05,
    nvme_offload_fraction=1.0,
    nvme_options=DiskOptions(depth=2, buffer_size=4096),  # a page for each block, several of each slice
)
BUILDS = (Net, frozen, adapted, Branches, Reused, Tied, Recomputed, ChannelsLast)
MAKERS = (groups, partial(of_some, torch.optim.AdamW, num_left_out=4, lr=0.05), with_a_frozen_one, ON_DISK)
LOSSES = (evaluate_between, two_forwards, forward_without_backward)
CASES: list[tuple[Task, dict[str, Any]]] = [
    *((replace(NET, build=build), {}) for build in BUILDS),
    *((replace(NET, optimizer=make), {}) for make in MAKERS),
    *((replace(NET, loss=loss), {}) for loss in LOSSES),
    (replace(NET, build=ReentrantRecomputed), {"overlap_communication": False}),
    (NET, {"cpu_offload": True}),
    (MIXED, {}),
]


def by_stage(
    task: Task, stage: int, num_ranks: int = 2, max_norm: float | None = None, **options: Any
) -> Run:
    """Return a run under ZeRO; gradients are clipped by the plugin."""
    make = partial(plugin, stage, max_norm=max_norm or 0.0, **options)
    return Run(task=task, num_ranks=num_ranks, plugin=make, max_norm=max_norm)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            *("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
            "Adafactor",
        )
    },
    "AdamW": {"amsgrad": True, "foreach": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Muon": {"min_ndim": 2},
    "Lamb": {"weight_decay": 0.1},
    "Lars": {"momentum": 0.9, "weight_decay": 0.1},
    "HybridAdam": {"weight_decay": 0.1},  # and CPUAdam, which is the same
    "FusedAdam": {"weight_decay": 0.1, "adamw_mode": False},
    "FusedSGD": {"momentum": 0.9, "weight_decay": 0.1},
    "FusedLAMB": {"weight_decay": 0.1, "max_grad_norm": 0.0},
}
ABOUT_WHOLE_TENSORS = ("Adafactor", "Muon", "Lamb", "Lars", "FusedLAMB")


def build_optimizer(name: str, params: Params) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, name, None) or getattr(colossalai.nn.optimizer, name)
    return of_some(cls, params, lr=0.05, **OPTIMIZERS[name])


def by_optimizer(name: str) -> Task:
    return replace(NET, build=Branches, optimizer=partial(build_optimizer, name))


ROWS = [
    # Cases have the two stages by turns.
    *(by_stage(task, 1 + place % 2, **options) for place, (task, options) in enumerate(CASES)),
    *(further(by_stage(task, 2 - place % 2, **options)) for place, (task, options) in enumerate(CASES)),
    further(by_stage(replace(NET, build=Branches), 2, num_ranks=4)),
    *(by_stage(replace(NET, build=Spare), stage) for stage in (1, 2)),
    # A norm of which one rank has no part, and a bound that is too high to change anything.
    by_stage(replace(NET, build=One), 1, max_norm=1e9),
    by_stage(replace(CENTERED, build=One), 1, max_norm=1e9),
    by_stage(CENTERED, 1),
    *(by_stage(by_optimizer(name), 1 if name < "M" else 2) for name in OPTIMIZERS),
    *(further(by_stage(by_optimizer(name), 2, num_ranks=4)) for name in ABOUT_WHOLE_TENSORS),
]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(ROWS))
def test_a_run_is_that_of_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


@pytest.mark.unit
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_are_for_those_that_treat_each_element_alone(name: str) -> None:
    is_whole = name in ABOUT_WHOLE_TENSORS
    assert is_elementwise(build_optimizer(name, Net().parameters())) == (not is_whole)


class Renamed(torch.optim.SGD):
    """One that changes nothing."""


class Sworn(Centered):
    elementwise = True


@pytest.mark.unit
@pytest.mark.parametrize(("cls", "expected"), [(Centered, False), (Renamed, True), (Sworn, True)])
def test_what_is_declared_holds_until_there_is_another_step(cls: type, expected: bool) -> None:
    assert is_elementwise(cls(Net().parameters(), lr=0.1)) == expected


@pytest.mark.unit
def test_a_class_of_a_library_can_be_declared() -> None:
    class Foreign(Centered):
        pass

    declare_elementwise(Foreign)
    assert is_elementwise(Foreign(Net().parameters(), lr=0.1))


@pytest.mark.unit
def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS treats all parameters as one vector"):
        is_elementwise(torch.optim.LBFGS(Net().parameters()))


def run_versions(stage: int) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, x = Net().double(), batch_of(0)
    booster = Booster(plugin=plugin(stage))
    wrapped, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = wrapped(x).sum()
    before = [param._version for param in model.parameters()]
    optimizer.backward(wrapped(x).sum())
    optimizer.step()
    assert all(param._version > version for param, version in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_autograd_sees_a_step_as_that_of_a_plain_optimizer(stage: int) -> None:
    run_ranks(run_versions, 2, stage)
