"""`MoeLoss` and what layers with experts leave for it: once, for each forward, of the tokens of all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.context import MOE_CONTEXT
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import MoeGradientHandler
from colossalai.global_variables import moe_env
from colossalai.nn import CrossEntropyLoss, MoeCrossEntropyLoss, MoeLoss, checkpoint
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, TopKRouter, auxiliary_loss
from tests.parity.subjects.moe import auxiliary, collecting
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

WIDTH, NUM_EXPERTS = 6, 4


class Classifier(nn.Module):
    """A layer of experts before a linear one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ffn = MoeLayer(WIDTH, NUM_EXPERTS, TopKRouter(2, **options), FFNExperts(NUM_EXPERTS, WIDTH, 8))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.ffn(x))


@pytest.fixture(autouse=True)
def _no_losses() -> Any:
    MOE_CONTEXT.reset_loss()
    yield
    MOE_CONTEXT.reset_loss()


@pytest.mark.unit
def test_the_loss_of_a_task_and_of_the_layers() -> None:
    torch.manual_seed(0)
    model = Classifier(z_loss_weight=0.1).double()
    x, y = torch.randn(9, WIDTH, dtype=torch.float64), torch.randint(3, (9,))
    with collecting(model) as routes:
        logits = model(x)
    wanted = nn.functional.cross_entropy(logits, y, label_smoothing=0.1) + 0.25 * auxiliary(routes, 0.1)
    torch.testing.assert_close(MoeLoss(0.25, nn.CrossEntropyLoss, label_smoothing=0.1)(logits, y), wanted)
    torch.testing.assert_close(MoeCrossEntropyLoss(0.25, label_smoothing=0.1)(logits, y), wanted)
    torch.testing.assert_close(moe_env.aux_loss, auxiliary(routes, 0.1))
    total, count = MoeLoss(0.25, CrossEntropyLoss, with_count=True)(logits, y)
    assert count == 9
    plain = nn.functional.cross_entropy(logits, y) + 0.25 * auxiliary(routes, 0.1)
    torch.testing.assert_close(total / count, plain)
    assert MoeLoss(1.0, nn.CrossEntropyLoss, reduction="sum").reduction == "sum"  # a pipeline asks


@pytest.mark.unit
def test_bad_losses() -> None:
    with pytest.raises(ValueError, match=r"loss_fn is CrossEntropyLoss\(\); it must be the class of a loss"):
        MoeLoss(0.1, nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="loss_fn returned a dict"):
        MoeLoss(0.1, dict)


@pytest.mark.unit
def test_a_model_without_experts_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    loss = MoeLoss(0.1, nn.MSELoss)
    value = torch.ones(3)
    assert loss(value, 2 * value) == loss(value, 2 * value) == 1
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("no layer of colossalai.nn.moe has left") <= 1
    model = Classifier().eval()
    model(torch.randn(4, WIDTH))
    assert MOE_CONTEXT.has_losses, "an evaluation leaves zero, and nobody is told anything"
    assert MOE_CONTEXT.get_loss() == 0


@pytest.mark.unit
def test_recomputation_counts_once() -> None:
    torch.manual_seed(0)
    model = Classifier(z_loss_weight=0.1).double()
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    grads, losses = [], []
    for is_recomputed in (False, True):
        MOE_CONTEXT.reset_loss()
        model.zero_grad()
        result = checkpoint(model, False, x) if is_recomputed else model(x)
        loss = result.square().mean() + MOE_CONTEXT.get_loss()
        loss.backward()
        losses.append(MOE_CONTEXT.get_loss().item())  # after the backward: nothing was added by it
        grads.append([param.grad.clone() for param in model.parameters()])
    assert losses[0] == losses[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def through_an_engine() -> None:
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    assert moe_env.is_initialized()
    assert (moe_env.model_parallel_size, moe_env.data_parallel_size) == (2, 1)
    num_own, info = MOE_CONTEXT.get_info(6)
    assert (num_own, info.ep_size, info.dp_size, info.ep_axis.size) == (3, 2, 1, 2)
    with pytest.raises(ValueError, match="5 experts, which 2 ranks do not divide"):
        MOE_CONTEXT.get_info(5)
    MOE_CONTEXT.setup(42)
    model = Classifier()
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), MoeCrossEntropyLoss(1.0), verbose=False
    )
    assert [type(handler) for handler in engine.gradient_handlers] == [MoeGradientHandler]
    torch.manual_seed(gpc.get_global_rank())
    x, y = torch.randn(8, WIDTH), torch.randint(3, (8,))
    engine(x)
    first = MOE_CONTEXT.get_loss()
    engine.eval()
    for _ in range(3):
        engine(x)
    engine.train()
    logits = engine(x)
    assert torch.equal(MOE_CONTEXT.get_loss(), first)
    assert engine.criterion(logits, y) == nn.functional.cross_entropy(logits, y) + first
    gpc.destroy()
    colossalai.launch_from_torch({}, verbose=False)
    plain = nn.Linear(2, 2)
    engine, *_ = colossalai.initialize(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), nn.MSELoss(), verbose=False
    )
    assert not list(engine.gradient_handlers)
    gpc.destroy()
    assert not moe_env.is_initialized()
    assert (moe_env.model_parallel_size, moe_env.data_parallel_size) == (1, 1)


@pytest.mark.dist
def test_each_forward_begins_with_nothing() -> None:
    run_ranks(through_an_engine, 2)


def of_uneven_tokens() -> None:
    """The mean of the ranks' losses, and of their gradients, is that of all tokens; one rank has none."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    replicas = gpc.mesh.axis("dp")
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(count, NUM_EXPERTS, generator=generator, dtype=torch.float64) for count in (5, 0, 2, 7)
    ]
    router = TopKRouter(2)
    whole = torch.cat(parts).requires_grad_()
    truth = auxiliary([router(whole)], 0.3)
    truth.backward()
    mine = parts[replicas.rank].clone().requires_grad_()
    loss = auxiliary_loss(router(mine), replicas, z_weight=0.3)
    loss.backward()
    mean = colossalai.communication.all_reduce(loss.detach(), replicas) / replicas.size
    torch.testing.assert_close(mean, truth.detach(), atol=1e-12, rtol=0)
    wanted = whole.grad.split([len(part) for part in parts])[replicas.rank]
    torch.testing.assert_close(mine.grad / replicas.size, wanted, atol=1e-12, rtol=0)
    gpc.destroy()


@pytest.mark.dist
def test_the_auxiliary_loss_is_that_of_the_whole_batch() -> None:
    run_ranks(of_uneven_tokens, 4)


def biases(config: dict[str, Any]) -> list[float]:
    """Return the bias after three steps; each rank has its part of the batch."""
    colossalai.launch_from_torch({"recompute": ["ffn"], **config}, verbose=False)
    torch.manual_seed(0)
    model = Classifier(bias_update_rate=0.001, num_experts=NUM_EXPERTS)
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), MoeCrossEntropyLoss(), verbose=False
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):  # two microbatches for each step
        x, y = torch.randn(16, WIDTH, generator=generator), torch.randint(3, (16,), generator=generator)
        replicas = gpc.mesh.axis("dp")
        x, y = (tensor.chunk(replicas.size)[replicas.rank] for tensor in (x, y))
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    found = engine.model.ffn.router.e_score_correction_bias
    assert found.dtype == torch.float32
    assert "ffn.router.e_score_correction_bias" in engine.model.state_dict()
    gpc.destroy()
    return found.tolist()


MOE = {"moe": {"size": 2}}
BESIDE: list[dict[str, Any]] = [
    {"parallel": {**MOE, "tensor": {"size": 2, "mode": "1d"}}},
    {"parallel": MOE, "zero": {"stage": 3}},
]
FURTHER: list[dict[str, Any]] = [{"parallel": MOE}, {"parallel": MOE, "zero": {"stage": 1}}]


@pytest.mark.dist
@pytest.mark.parametrize("configs", [BESIDE, further(FURTHER)])
def test_the_bias_follows_the_load_of_all_ranks(configs: list[dict[str, Any]]) -> None:
    accumulating = {"gradient_accumulation": 2}
    (alone,) = run_ranks(biases, 1, accumulating)
    assert alone != [0.0] * NUM_EXPERTS
    assert all(abs(value) < 0.0031 for value in alone)
    for found in run_each(4, biases, [({**accumulating, **config},) for config in configs]):
        assert found == [alone] * 4
    low = {"fp16": {"mode": "naive", "initial_scale": 2.0**8}}
    for found in run_ranks(biases, 2, {"parallel": MOE, **accumulating, **low}):
        assert found != [0.0] * NUM_EXPERTS
