"""`MoeLoss` and what layers with experts leave for it: once, for each forward, of the tokens of all ranks."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.context import MOE_CONTEXT
from colossalai.context._process import ExpertForwards, process
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import MoeGradientHandler
from colossalai.global_variables import moe_env
from colossalai.logging import get_dist_logger
from colossalai.nn import CrossEntropyLoss, MoeCrossEntropyLoss, MoeLoss, checkpoint
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, TopKRouter, auxiliary_loss
from colossalai.tensor import nested_tensors
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from tests.parity.experts.tasks import auxiliary, collecting, moe_net, sequences
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


class Wrapped(nn.Module):
    """A wrapper as those of the doors, around a model that also returns what its layer gets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with MOE_CONTEXT.forward_of(self) as losses:
            hidden = 1 * x
            outputs = self.model(hidden), hidden
        MOE_CONTEXT.assign(losses, nested_tensors(outputs))
        return outputs


@pytest.mark.unit
def test_losses_are_freed_with_the_outputs() -> None:
    model = Wrapped(Classifier())
    logits, hidden = model(torch.randn(4, WIDTH, requires_grad=True))  # the loss depends on `hidden`
    assert MOE_CONTEXT.get_loss(logits) > 0
    term = weakref.ref(MOE_CONTEXT.losses_of([logits]).terms[0])
    MOE_CONTEXT.add_loss(logits.sum())
    MOE_CONTEXT.reset_loss()
    assert MOE_CONTEXT.get_loss(logits) == term()
    del logits
    assert term() is None
    del hidden
    with torch.no_grad():
        logits, hidden = model(torch.randn(4, WIDTH))
    term = weakref.ref(MOE_CONTEXT.losses_of([logits]).terms[0])
    MOE_CONTEXT.reset_loss()
    assert MOE_CONTEXT.get_loss(logits) == term()
    del logits, hidden
    assert term() is None


@pytest.mark.unit
def test_an_output_that_is_older_than_a_loss_leads_to_it() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Classifier(), Classifier()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    x = torch.randn(4, WIDTH)
    (first, second), _ = Wrapped(TwoHeads())(x)
    wanted = MOE_CONTEXT.get_loss()
    Wrapped(Classifier())(x)
    assert MOE_CONTEXT.get_loss(first) == MOE_CONTEXT.get_loss(second) == wanted != MOE_CONTEXT.get_loss()
    term = weakref.ref(MOE_CONTEXT.losses_of([first]).terms[0])
    del first, second, wanted
    assert term() is None


@pytest.mark.unit
def test_losses_of_a_model_within_another_belong_to_both() -> None:
    torch.manual_seed(0)
    inner, own = Wrapped(Classifier()), Classifier()
    x = torch.randn(4, WIDTH)
    parts = []

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            own(x)
            alone, _ = inner(x)
            parts.append((MOE_CONTEXT.get_loss(alone), MOE_CONTEXT.get_loss()))
            return alone

    result, _ = Wrapped(Outer())(x)
    ((of_inner, of_both),) = parts
    assert MOE_CONTEXT.get_loss(result) == MOE_CONTEXT.get_loss() == of_both
    assert 0 < of_inner < of_both
    with torch.no_grad():
        assert inner(x)[0] is not None
    assert MOE_CONTEXT.get_loss(result) == of_both
    assert MOE_CONTEXT.get_loss() == of_inner


@pytest.mark.unit
def test_losses_that_are_added_after_a_forward() -> None:
    wrapped, bare = Wrapped(Classifier()), Classifier()
    x = torch.randn(4, WIDTH)
    logits, _ = wrapped(x)
    first = MOE_CONTEXT.get_loss(logits)
    MOE_CONTEXT.add_loss(torch.tensor(1.0))  # the user's
    MOE_CONTEXT.add_loss(torch.tensor(2.0))
    assert MOE_CONTEXT.get_loss() == MOE_CONTEXT.get_loss(logits) == first + 1.0 + 2.0
    bare(x)
    assert MOE_CONTEXT.get_loss(logits) == first
    both = MOE_CONTEXT.get_loss()
    bare(x)  # without a wrapper forwards add up until a reset, as ever
    assert MOE_CONTEXT.get_loss() == 2 * both


@pytest.mark.unit
def test_a_criterion_that_could_mean_several_models_warns_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "experts", ExpertForwards())
    monkeypatch.setattr(get_dist_logger(), "_once", set())
    first, second = Wrapped(Classifier()), Wrapped(Classifier())
    x, y = torch.randn(4, WIDTH), torch.randint(3, (4,))
    criterion, text = MoeCrossEntropyLoss(), "several models have left some"
    logits, _ = first(x)
    criterion(logits.detach(), y)
    first.model(x)  # the same model without its wrapper
    criterion(logits.detach(), y)
    assert text not in capfd.readouterr().err
    second(x)
    criterion(logits, y)
    assert text not in capfd.readouterr().err
    for _ in range(2):
        criterion(logits.detach(), y)
    assert capfd.readouterr().err.count(text) == 1


def boosted(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return each model as `Booster.boost` gives it."""
    return [Booster(plugin=TorchDDPPlugin()).boost(model)[0] for model in models]


def wrapped_by_zero(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return each model as `zero_model_wrapper` gives it."""
    return [zero_model_wrapper(model, zero_stage=1, precision="fp32") for model in models]


def losses_of_two_models(wrap: Callable[[Sequence[nn.Module]], list[nn.Module]]) -> None:
    """Each criterion takes the loss of its own model's forward, however the calls are interleaved."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    raw = [Classifier(), Classifier(), nn.Linear(WIDTH, 3)]
    x, other, y = torch.randn(9, WIDTH), torch.randn(9, WIDTH), torch.randint(3, (9,))
    with collecting(raw[0]) as routes:
        raw[0](x), raw[0](other)
    wanted = [auxiliary([each], 0.0).item() for each in routes]
    assert wanted[0] != wanted[1]
    criterion = MoeCrossEntropyLoss(1.0)

    def extra(logits: Tensor) -> float:
        return (criterion(logits, y) - nn.functional.cross_entropy(logits, y)).item()

    raw += [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, WIDTH), Classifier())]
    first, second, dense, head, top = wrap(raw)
    for _ in range(2):  # losses of earlier steps do not add up
        logits, others, plain = first(x), second(other), dense(x)
        assert extra(logits) == pytest.approx(wanted[0], abs=1e-6)
        assert extra(plain) == pytest.approx(0, abs=1e-6)
        assert extra(logits.float()[:, :].view(9, 3)) == pytest.approx(wanted[0], abs=1e-6)
        criterion(logits, y).backward()
        assert all(param.grad is None for param in raw[1].parameters())
        assert extra(others) == pytest.approx(MOE_CONTEXT.get_loss(others).item(), abs=1e-6)
        logits, plain, later = first(x), dense(x), first(other)  # one model, two forwards before the losses
        assert extra(logits) == pytest.approx(wanted[0], abs=1e-6)
        assert extra(later) == pytest.approx(wanted[1], abs=1e-6)
        assert extra(logits * later) == pytest.approx(sum(wanted), abs=1e-6)  # as a contrastive loss does
        behind_first = head(first(x))
        second(other)
        assert extra(behind_first) == pytest.approx(wanted[0], abs=1e-6)
        assert extra(top(behind_first)) == pytest.approx(wanted[0] + MOE_CONTEXT.get_loss().item(), abs=1e-6)
        with torch.no_grad():
            logits, _ = first(x), second(other)
            assert extra(logits) == pytest.approx(wanted[0], abs=1e-6)
            assert extra(logits[:]) == pytest.approx(wanted[0], abs=1e-6)
        # The forward runs without a graph, which its output gets after it.
        logits, _ = recomputed(first, x.clone().requires_grad_(), use_reentrant=True), second(other)
        assert extra(logits) == pytest.approx(wanted[0], abs=1e-6)
    compiled = torch.compile(dense, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), dense(x))
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("wrap", [boosted, wrapped_by_zero])
def test_losses_belong_to_the_forward_that_made_them(wrap: Any) -> None:
    run_ranks(losses_of_two_models, 1, wrap)


def dense_models_and_late_experts(wrap: Callable[[Sequence[nn.Module]], list[nn.Module]]) -> None:
    """Dense models have no collector until the process has a layer of experts."""
    colossalai.launch_from_torch({}, verbose=False)
    (dense,) = wrap([nn.Linear(WIDTH, 3)])
    twins = [dense, copy.deepcopy(dense), pickle.loads(pickle.dumps(dense))]
    assert all(twin._collector is None for twin in twins)
    assert not process.experts.num_wrapped
    (experts,) = wrap([Classifier()])
    twins.append(copy.deepcopy(dense))
    x, y = torch.randn(9, WIDTH), torch.randint(3, (9,))
    for twin in twins:
        logits, plain = experts(x), twin(x)
        assert MoeCrossEntropyLoss(1.0)(plain, y) == nn.functional.cross_entropy(plain, y)
        assert MoeCrossEntropyLoss(1.0)(logits, y) > nn.functional.cross_entropy(logits, y)
    waiting = weakref.ref(wrap([nn.Linear(WIDTH, 3)])[0])
    gc.collect()
    assert waiting() is None
    gpc.destroy()


class Unannounced(nn.Module):
    """A layer of a user that adds a loss by itself."""

    def forward(self, x: Tensor) -> Tensor:
        MOE_CONTEXT.add_loss(x.square().mean())
        return 1 * x


def a_layer_of_a_user(wrap: Callable[[Sequence[nn.Module]], list[nn.Module]]) -> None:
    """A layer that was not announced works: wrapped models have collectors from its first loss on."""
    colossalai.launch_from_torch({}, verbose=False)
    model, dense = wrap([nn.Sequential(nn.Linear(WIDTH, 3), Unannounced()), nn.Linear(WIDTH, 3)])
    x, y = torch.randn(9, WIDTH), torch.randint(3, (9,))
    criterion = MoeCrossEntropyLoss(1.0)
    for _ in range(2):
        logits = model(x)
        wanted = nn.functional.cross_entropy(logits, y) + logits.square().mean()
        torch.testing.assert_close(criterion(logits, y), wanted)
    plain = dense(x)
    assert criterion(plain, y) == nn.functional.cross_entropy(plain, y)
    torch.testing.assert_close(criterion(logits, y), wanted)
    gpc.destroy()


def unpickled_experts(wrap: Callable[[Sequence[nn.Module]], list[nn.Module]], saved: bytes) -> None:
    """Layers whose constructors ran in another process are found by the wrapper."""
    colossalai.launch_from_torch({}, verbose=False)
    first, second = wrap(pickle.loads(saved))
    x, y = torch.randn(9, WIDTH), torch.randint(3, (9,))
    logits, _ = first(x), second(2 * x)
    loss = MoeCrossEntropyLoss(1.0)(logits, y)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, y) + MOE_CONTEXT.get_loss(first(x)))
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("wrap", [boosted, wrapped_by_zero])
def test_what_gets_a_collector(wrap: Any) -> None:
    run_ranks(dense_models_and_late_experts, 1, wrap)
    run_ranks(a_layer_of_a_user, 1, wrap)
    run_ranks(unpickled_experts, 1, wrap, pickle.dumps([Classifier(), Classifier()]))


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


def parts_of_batches(num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's parts."""
    generator, replicas = torch.Generator().manual_seed(0), gpc.mesh.axis("dp")
    for _ in range(num_batches):
        x, y = torch.randn(16, WIDTH, generator=generator), torch.randint(3, (16,), generator=generator)
        yield x.chunk(replicas.size)[replicas.rank], y.chunk(replicas.size)[replicas.rank]


def biases(config: dict[str, Any], num_batches: int = 6) -> list[float]:
    """Return the bias after some batches; each rank has its part of a batch."""
    colossalai.launch_from_torch({"recompute": ["ffn"], **config}, verbose=False)
    torch.manual_seed(0)
    model = Classifier(bias_update_rate=0.001, num_experts=NUM_EXPERTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = colossalai.initialize(model, optimizer, MoeCrossEntropyLoss(), verbose=False)
    for x, y in parts_of_batches(num_batches):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    found = engine.model.ffn.router.e_score_correction_bias
    assert found.dtype == torch.float32
    assert "ffn.router.e_score_correction_bias" in engine.model.state_dict()
    gpc.destroy()
    return found.tolist()


def biases_under_zero(stage: int) -> list[float]:
    """Return the bias after three steps of one microbatch, by the wrappers of ZeRO."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    torch.manual_seed(0)
    model = Classifier(bias_update_rate=0.001, num_experts=NUM_EXPERTS)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model.head, model.ffn)]
    model = zero_model_wrapper(model, stage, precision="fp32")
    optimizers = [zero_optim_wrapper(model, optimizer) for optimizer in optimizers]
    for x, y in parts_of_batches(3):
        optimizers[0].backward(MoeCrossEntropyLoss()(model(x), y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = model.ffn.router.e_score_correction_bias
    gpc.destroy()
    return found.tolist()


@pytest.mark.dist
def test_the_bias_moves_under_the_wrappers_of_zero() -> None:
    (alone,) = run_ranks(biases, 1, {}, 3)
    assert alone != [0.0] * NUM_EXPERTS
    for stage in (1, 3):
        assert run_ranks(biases_under_zero, 2, stage) == [alone] * 2


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


def losses_with_another_model() -> list[float]:
    """Return losses of a pipeline: by its criterion, and by one that runs another model before."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"))
    model = moe_net("top2", "ffn")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = moe_net("top2", "ffn", "one")
    criterion = MoeLoss(0.5, nn.CrossEntropyLoss)

    def behind_another(output: Tensor, label: Tensor) -> Tensor:
        with MOE_CONTEXT.forward_of(other) as losses:
            logits = other(torch.ones(4, 3, 5))
        MOE_CONTEXT.assign(losses, [logits])
        assert MOE_CONTEXT.get_loss(logits) == MOE_CONTEXT.get_loss() != MOE_CONTEXT.get_loss(output)
        return criterion(output, label)

    found = []
    for each in (criterion, behind_another):
        result = booster.execute_pipeline(iter([sequences(1)[0]]), model, each, optimizer)
        found.append(result["loss"].item())
    assert all(param.grad is None for param in other.parameters())
    gpc.destroy()
    return found


@pytest.mark.dist
def test_the_criterion_of_a_pipeline_can_run_another_model_with_experts() -> None:
    for alone, behind_another in run_ranks(losses_with_another_model, 2):
        assert alone == behind_another
