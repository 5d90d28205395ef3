"""Models that some data methods do not train: parameters without gradients, shared by blocks, sparse."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel import make_plan
from colossalai.auto_parallel._parts import parts_of_model, zero_stages_of
from colossalai.auto_parallel.tensor_shard import autoparallelize
from colossalai.auto_parallel.trace._trace import trace_model
from colossalai.booster import Booster
from colossalai.booster.plugin import AutoPlugin
from colossalai.core import global_context as gpc
from tests.auto_parallel.plan.models import arguments_of, llama, slow_machine
from tests.ranks import run_ranks

WIDTH, BATCH = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Unused(Plain):
    """Has a layer that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)


class TwoOutputs(Unused):
    """Returns what a loss may leave out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.extra(x)


class WithLoss(TwoOutputs):
    """Returns a loss of all its parameters, and what it was made of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        first, second = super().forward(x)
        return (first - second).square().mean(), first


class Detached(Unused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra(x).detach()


class TiedBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class TakenOutside(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.blocks[0].up.weight


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table((x[:, 0] > 0).long())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (Plain, {0, 1, 2, 3}),
        (WithLoss, {0, 1, 2, 3}),
        (Unused, {1, 2, 3}),
        (TwoOutputs, {1, 2, 3}),
        (Detached, {1, 2, 3}),
        (TiedBlocks, {0, 1, 2}),
        (TakenOutside, {0, 1, 2}),
        (Sparse, {0}),
    ],
)
def test_plans_have_stages_that_train_a_model(build: Callable[[], nn.Module], stages: set[int]) -> None:
    model, given = build(), {"x": torch.rand(BATCH, WIDTH)}
    trace = trace_model(model, given)
    assert zero_stages_of(trace, model, parts_of_model(trace, model)) == stages
    setting = make_plan(model, given, world_size=2, profile=slow_machine(), optimizer="momentum").setting
    assert setting.data == 1 or setting.pipeline > 1 or setting.zero in stages


def _trains(build: Callable[[], nn.Module], by_booster: bool) -> float:
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    model = build().double()
    twin = copy.deepcopy(model)
    batch = torch.rand(3, BATCH, WIDTH, dtype=torch.double)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
    if by_booster:
        plan = make_plan(model, {"x": batch[0]}, optimizer="momentum")
        assert plan.setting.data == 2
        booster = Booster(plugin=AutoPlugin(plan))
        module, optimizers[0], *_ = booster.boost(model, optimizers[0])
    else:
        module = autoparallelize(model, {"x": batch[0]}, solver_preference="dp")
    for whole in batch:
        own = whole.chunk(2)[gpc.mesh.rank] if by_booster else whole
        for each, given, optimizer in zip((module, twin), (own, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(given).square().mean()
            booster.backward(loss, optimizer) if by_booster and each is module else loss.backward()
            optimizer.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("by_booster", [True, False])
def test_a_layer_that_is_not_used_is_left_as_it_is(by_booster: bool) -> None:
    assert max(run_ranks(_trains, 2, Unused, by_booster)) < 1e-12


@pytest.mark.unit
def test_what_tensor_parallelism_refuses_has_plans_without_it() -> None:
    """Adapters of DoRA are scaled by norms of whole weights."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "v_proj"])
    model, given = peft.get_peft_model(llama(), config), arguments_of(llama, BATCH)
    assert make_plan(model, given, world_size=2).setting.tensor == 1
    one = {name: value[:1] for name, value in given.items()}
    with pytest.raises(
        ValueError, match=r"a batch of 1 cannot be shared by 2 ranks.*and the model cannot \("
    ):
        make_plan(model, one, world_size=2)
