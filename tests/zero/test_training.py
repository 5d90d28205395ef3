"""What breaks other implementations of ZeRO: each case trains as one process does, under both stages."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossalai.nn.optimizer
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import DiskOptions, HybridAdam
from colossalai.zero import declare_elementwise, is_elementwise
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import Case, Net, adamw, compare, compare_all

pytestmark = pytest.mark.dist


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


class Branches(Net):
    """`middle` is used where it is told to."""

    use = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(self.middle(x) if self.use else x) * self.gain


def every_other_step(model: nn.Module, x: Tensor, step: int, part: int) -> Tensor:
    raw_of(model).use = step % 2 == 1
    return model(x).square().mean()


def on_one_rank(model: nn.Module, x: Tensor, step: int, part: int) -> Tensor:
    raw_of(model).use = part == step % 2
    return model(x).square().mean()


def raw_of(model: nn.Module) -> nn.Module:
    return model.unwrap() if hasattr(model, "unwrap") else model


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


def groups(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    decayed = [param for param in named.values() if param.ndim > 1]
    rest = [param for param in named.values() if param.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.1, "betas": (0.5, 0.9)}], lr=0.02
    )


def subset(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.middle.parameters(), model.gain], lr=0.05)


def with_a_frozen_one(model: nn.Module) -> torch.optim.Optimizer:
    model.norm.weight.requires_grad_(False)
    return adamw(model)


def on_disk(model: nn.Module) -> torch.optim.Optimizer:
    """A page for each block, so that there are several of each slice."""
    options = DiskOptions(depth=2, buffer_size=4096)
    return HybridAdam(model.parameters(), lr=0.05, nvme_offload_fraction=1.0, nvme_options=options)


def evaluate_between(model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.float64))
    model(torch.ones(2, 5, dtype=torch.float64)).sum()
    model.train()


def two_forwards(model: nn.Module, x: Tensor, step: int, part: int) -> Tensor:
    return model(x).square().mean() + model(2 * x).abs().mean()


def forward_without_backward(model: nn.Module, step: int) -> None:
    model(torch.ones(2, 5, dtype=torch.float64))


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
        self.transposed = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 1, 1, 5)).mean(dim=(1, 2))
        return x @ self.transposed.t()


class MixedDtypes(nn.Module):
    """A float32 head on a bfloat16 body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7)).bfloat16()
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.bfloat16()).float())


CASES: dict[str, Case] = {
    "plain": Case(),
    "frozen": Case(build=frozen),
    "adapters": Case(build=adapted),
    "unused in some steps": Case(build=Branches, loss=every_other_step),
    "unused on some ranks": Case(build=Branches, loss=on_one_rank),
    "used several times": Case(build=Reused),
    "tied": Case(build=Tied),
    "groups": Case(optimizer=groups),
    "subset": Case(optimizer=subset),
    "frozen in the optimizer": Case(optimizer=with_a_frozen_one),
    "train and eval": Case(before=evaluate_between),
    "two forwards": Case(loss=two_forwards),
    "forward without backward": Case(before=forward_without_backward),
    "recomputed": Case(build=Recomputed),
    "recomputed, reentrant": Case(build=ReentrantRecomputed, options={"overlap_communication": False}),
    "channels last": Case(build=ChannelsLast),
    "cpu_offload": Case(options={"cpu_offload": True}),
    "states on disk": Case(optimizer=on_disk),
    # bfloat16 gradients are sums over halves of the batch on one side, and rounded in another order
    "mixed dtypes": Case(build=MixedDtypes, tolerance=0.02),
}


def run_cases(turn: int) -> None:
    compare_all({name: (case, 1 + (place + turn) % 2) for place, (name, case) in enumerate(CASES.items())})


@pytest.mark.parametrize("turn", [0, further(1)])
def test_each_case_is_one_process(turn: int) -> None:
    """Cases have the two stages by turns, all of them in one job."""
    run_ranks(run_cases, 2, turn)


def run_case(name: str, stage: int) -> None:
    compare(CASES[name], stage)


@pytest.mark.long
def test_a_case_on_four_ranks() -> None:
    run_ranks(run_case, 4, "unused on some ranks", 2)


class One(nn.Module):
    """Less than one element for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def run_one(elementwise: bool) -> None:
    """Clip by a norm of which one rank has no part; the bound is too high to change anything."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return (adamw if elementwise else Centered.of)(model)

    compare(Case(build=One, optimizer=optimizer, options={"max_norm": 1e9}), 1)


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_rank_that_has_nothing(elementwise: bool) -> None:
    run_ranks(run_one, 2, elementwise)


OPTIMIZERS = {
    **{
        name: {}
        for name in (
            *("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
            "Adafactor",
        )
    },
    "AdamW": {"amsgrad": True, "foreach": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Muon": {},
    "Lamb": {"weight_decay": 0.1},
    "Lars": {"momentum": 0.9, "weight_decay": 0.1},
    "HybridAdam": {"weight_decay": 0.1},  # and CPUAdam, which is the same
    "FusedAdam": {"weight_decay": 0.1, "adamw_mode": False},
    "FusedSGD": {"momentum": 0.9, "weight_decay": 0.1},
    "FusedLAMB": {"weight_decay": 0.1, "max_grad_norm": 0.0},
}
ABOUT_WHOLE_TENSORS = ("Adafactor", "Muon", "Lamb", "Lars", "FusedLAMB")
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name not in ABOUT_WHOLE_TENSORS)


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    cls = getattr(torch.optim, name, None) or getattr(colossalai.nn.optimizer, name)
    params = [param for param in model.parameters() if name != "Muon" or param.ndim == 2]
    return cls(params, lr=0.05, **OPTIMIZERS[name])


def run_optimizers(stages: dict[str, int]) -> None:
    """Train with optimizers, each under a stage."""
    cases = {}
    for name, stage in stages.items():
        case = Case(build=Branches, loss=on_one_rank, optimizer=partial(build_optimizer, name))
        cases[name] = case, stage
    compare_all(cases)


@pytest.mark.parametrize("names", [ELEMENTWISE, ABOUT_WHOLE_TENSORS], ids=["elementwise", "whole"])
def test_an_optimizer_does_the_same(names: tuple[str, ...]) -> None:
    run_ranks(run_optimizers, 2, {name: 1 if name < "M" else 2 for name in names})


@pytest.mark.long
def test_whole_tensors_on_four_ranks() -> None:
    run_ranks(run_optimizers, 4, dict.fromkeys(ABOUT_WHOLE_TENSORS, 2))


@pytest.mark.unit
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_are_for_those_that_treat_each_element_alone(name: str) -> None:
    assert is_elementwise(build_optimizer(name, Net())) == (name not in ABOUT_WHOLE_TENSORS)


class Centered(torch.optim.SGD):
    """An optimizer of the user's own, with a step that looks at whole tensors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad -= param.grad.mean()
        return super().step(closure)

    @classmethod
    def of(cls, model: nn.Module) -> "Centered":
        return cls(model.parameters(), lr=0.1)


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


def run_undeclared() -> None:
    compare(Case(optimizer=Centered.of), 1)


def test_an_optimizer_that_nobody_declared_gets_whole_tensors() -> None:
    run_ranks(run_undeclared, 2)


def run_versions(stage: int) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = Net().double()
    plugin = LowLevelZeroPlugin(stage=stage, precision="fp32")
    wrapped, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 5, dtype=torch.float64)
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
