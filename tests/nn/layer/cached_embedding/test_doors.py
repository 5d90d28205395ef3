"""Models with cached tables under plans have the values of one process by torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.nn.layer.cached_embedding import ParallelCachedEmbeddingBag
from colossalai.nn.optimizer import RowWiseAdagrad
from colossalai.nn.parallel import zero_model_wrapper, zero_optim_wrapper
from colossalai.zero import LowLevelZeroOptimizer
from tests.nn.layer.cached_embedding.rankers import (
    KINDS,
    PLUGINS,
    Batch,
    Ranker,
    batches,
    loss_of,
    make_rankers,
)
from tests.nn.layer.cached_embedding.tables import make_pair
from tests.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


def make_optimizers(name: str, model: Ranker) -> list[Optimizer]:
    """Return one optimizer of all parameters, or one of the dense layers and one of the tables."""
    params = [*model.parameters()]
    of_tables = {*model.tables.parameters()}
    if name in ("sgd", "adagrad"):
        return [SGD(params, lr=0.1) if name == "sgd" else Adagrad(params, lr=0.1)]
    dense = [param for param in params if param not in of_tables]
    tables = [param for param in params if param in of_tables]
    if name == "row_wise":
        return [Adam(dense, lr=0.01), RowWiseAdagrad(tables, lr=0.1)]
    return [AdamW(dense, lr=0.01), SparseAdam(tables, lr=0.01)]


def clip(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the gradients of an optimizer in one process, also sparse ones, and return the norm before."""
    params = [
        param for group in optimizer.param_groups for param in group["params"] if param.grad is not None
    ]
    for param in params:
        param.grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
    grads = [param.grad.values() if param.grad.is_sparse else param.grad for param in params]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for param in params:
        param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _clamped(param: nn.Parameter) -> Tensor:
    """Return a gradient with its elements between -0.01 and 0.01; a sparse one stays sparse."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return param.grad.clamp(-0.01, 0.01)
    grad = param.grad.coalesce()
    grad.values().clamp_(-0.01, 0.01)
    return grad


def whole(value: Any) -> Tensor:
    """Return a tensor of a state dict whole; FSDP has DTensors."""
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def check_equal(reference: nn.Module, state: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Check that a state dict has the values of a model in one process."""
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole(state[name]), value, rtol=tolerance, atol=tolerance, msg=name)


def step(reference: nn.Module, optimizers: list[Optimizer], batch: Batch) -> None:
    """Make a step in one process."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(reference(batch.ids, batch.dense), batch.targets).backward()
    for optimizer in optimizers:
        optimizer.step()


def train(plugin: str, kind: str, name: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS[plugin]())
    reference, raw = make_rankers(kind)
    wanted = make_optimizers(name, reference)
    model, optimizers, *_ = booster.boost(raw, make_optimizers(name, raw))
    for number, batch in enumerate(batches(8)):
        own = batch.own
        for optimizer in (*wanted, *optimizers):
            optimizer.zero_grad()
        loss_of(reference(batch.ids, batch.dense), batch.targets).backward()
        booster.backward(loss_of(model(own.ids, own.dense), own.targets), optimizers[0])
        if number == 3:
            for each in optimizers:
                each.clip_grad_by_value(0.01)
            for param in reference.parameters():
                param.grad = _clamped(param)
        if number > 3:
            norms = [each.clip_grad_by_norm(0.3) for each in optimizers]
            torch.testing.assert_close(torch.stack(norms), torch.stack([clip(each, 0.3) for each in wanted]))
        for optimizer in (*wanted, *optimizers):
            optimizer.step()
    check_equal(reference, model.state_dict())
    model.load_state_dict(reference.state_dict())  # whole, on all ranks
    check_equal(reference, model.state_dict(), 0.0)
    gpc.destroy()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins(plugin: str, kind: str, name: str) -> None:
    if (plugin, name) == ("fsdp", "adagrad"):  # which has states before its first step
        name = "row_wise" if kind != "columns" else "sparse_adam"
    run_ranks(train, 2, plugin, kind, name)


def train_tables_alone() -> None:
    """The model is a table, so its names have no prefix."""
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS["gemini"]())
    torch.manual_seed(0)
    bag = ParallelCachedEmbeddingBag(60, 4, mode="sum", sparse=True, cache_ratio=0.5)
    reference = nn.EmbeddingBag(60, 4, mode="sum", sparse=True)
    reference.load_state_dict(bag.state_dict())
    wanted = SGD(reference.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(bag, SGD(bag.parameters(), lr=0.1))
    ids = torch.arange(24).view(6, 4) * 7 % 60
    booster.backward(model(ids).square().mean(), optimizer)
    optimizer.step()
    reference(ids).square().mean().backward()
    wanted.step()
    assert [*model.state_dict()] == ["weight"]
    check_equal(reference, model.state_dict())
    gpc.destroy()


def test_a_table_that_is_the_whole_model() -> None:
    run_ranks(train_tables_alone, 2)


def accumulate(kind: str) -> None:
    colossalai.launch_from_torch({"zero": {"stage": 1}, "gradient_accumulation": 2, "clip_grad_norm": 0.3})
    reference, raw = make_rankers(kind, cache_ratio=0.7)
    [optimizer] = make_optimizers("adagrad", reference)
    engine, *_ = colossalai.initialize(raw, make_optimizers("adagrad", raw)[0], loss_of)
    for number, batch in enumerate(batches(8)):
        own = batch.own
        engine.zero_grad()
        engine.backward(engine.criterion(engine(own.ids, own.dense), own.targets))
        engine.step()
        (loss_of(reference(batch.ids, batch.dense), batch.targets) / 2).backward()
        if number % 2:
            clip(optimizer, 0.3)
            optimizer.step()
            optimizer.zero_grad()
    check_equal(reference, engine.model.state_dict())
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_clipping_by_an_engine(kind: str) -> None:
    run_ranks(accumulate, 2, kind)


def wrap(kind: str) -> None:
    for stage in (1, 3):
        colossalai.launch_from_torch({})
        reference, raw = make_rankers(kind)
        model = zero_model_wrapper(raw, zero_stage=stage, precision="fp32")
        optimizer = zero_optim_wrapper(model, SGD(raw.parameters(), lr=0.1))
        wanted = [SGD(reference.parameters(), lr=0.1)]
        for batch in batches(5):
            own = batch.own
            optimizer.zero_grad()
            optimizer.backward(loss_of(model(own.ids, own.dense), own.targets))
            optimizer.step()
            step(reference, wanted, batch)
        check_equal(reference, model.state_dict())
        gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_wrappers_of_zero(kind: str) -> None:
    run_ranks(wrap, 2, kind)


def share_layers(kind: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", zero_stage=2))
    reference, raw = make_rankers(kind)
    wanted = make_optimizers("adagrad", reference)
    model, optimizer, *_ = booster.boost(raw, make_optimizers("adagrad", raw)[0])
    rank = booster.mesh.axis_rank("dp")
    for batch in batches(5):
        dense, targets = (each.tensor_split(2)[rank] for each in batch[1:])
        optimizer.zero_grad()
        booster.backward(loss_of(model(batch.ids, dense), targets), optimizer)
        optimizer.step()
        step(reference, wanted, batch)
    check_equal(reference, model.state_dict())
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_layers(kind: str) -> None:
    run_ranks(share_layers, 4, kind)


class _Scores(nn.Module):
    """Sums of bags with factors, which a precision casts."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor, factors: Tensor) -> Tensor:
        scores: Tensor = self.top(self.tables(ids, None, factors))
        return scores


def train_in_16_bits(plugin: str, options: dict[str, Any]) -> None:
    """The table and its gradients have 32 bits, the dense layers get outputs of 16 bits."""
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS[plugin](**options))
    reference, tables = make_pair(mode="sum")
    wanted, raw = _Scores(reference), _Scores(tables)
    wanted.load_state_dict(raw.state_dict())
    dtypes: list[torch.dtype] = []
    raw.top.register_forward_pre_hook(lambda layer, args: dtypes.append(args[0].dtype))
    plain = SGD(wanted.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(raw, SGD(raw.parameters(), lr=0.05))
    steps = []
    for number in range(8):
        ids = torch.arange(24).view(6, 4) * (number + 1) % 400
        factors = torch.linspace(0.1, 1, 24).view(6, 4)
        for module, each in ((wanted, plain), (model, optimizer)):
            loss = (module(ids, factors) - 1).square().mean()
            each.zero_grad()  # after the forward: also the gradient of a step that was skipped
            booster.backward(loss, each) if each is optimizer else loss.backward()
        optimizer.step()
        steps.append(optimizer.stepped)
        if optimizer.stepped:
            plain.step()
    assert {*dtypes} == {next(iter(model.top.parameters())).dtype} or plugin == "fsdp"
    assert tables.weight.dtype == torch.float32
    assert steps.count(True) >= 4
    assert all(steps) == ("initial_scale" not in options)
    check_equal(reference, {"weight": tables.weight}, 0.02)
    gpc.destroy()


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("zero2", {"precision": "bf16"}),
        ("zero1", {"precision": "fp16", "initial_scale": 2**17, "hysteresis": 1}),
        ("gemini", {"precision": "bf16"}),
        ("fsdp", {"param_dtype": torch.bfloat16}),
    ],
)
def test_16_bits(plugin: str, options: dict[str, Any]) -> None:
    run_ranks(train_in_16_bits, 1, plugin, options)


def make_mistakes(kind: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=TorchDDPPlugin())
    _, model = make_rankers(kind)
    for optimizer in (Adam(model.parameters()), SGD(model.parameters(), lr=0.1, momentum=0.9)):
        with pytest.raises(ValueError, match=r"(is not known to change only the|momentum=0.9 changes every)"):
            booster.boost(model, optimizer)
    momentum = 0.9 * (dist.get_rank() == 0)  # all ranks raise
    with pytest.raises(ValueError, match=r"momentum=0.9 changes every row"):
        booster.boost(model, SGD(model.parameters(), lr=0.1, momentum=momentum))
    if kind == "columns":
        bag = next(iter(model.tables.children()))
        before = bag.weight.clone()
        with pytest.raises(ValueError, match=r"is a tensor and no torch.nn.Parameter: .* whole table"):
            LowLevelZeroOptimizer(SGD([bag.weight], lr=0.1))
        assert torch.equal(bag.weight, before)
        with pytest.raises(ValueError, match="RowWiseAdagrad has one sum for each row"):
            booster.boost(model, make_optimizers("row_wise", model))
    with (
        LazyInitContext(),
        pytest.raises(RuntimeError, match=r"are a LazyTensor, .* build it before LazyInit"),
    ):
        make_rankers(kind)
    alone = nn.Sequential(make_pair()[1], nn.Linear(8, 1))
    with pytest.raises(
        ValueError, match=r"0\.weight is the cache of CachedEmbeddingBag\(400, 8\), a table of one process"
    ):
        booster.boost(alone, SGD(alone.parameters(), lr=0.1))
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"))
    with pytest.raises(ValueError, match="and tensor parallelism cannot be combined: 2 ranks have the same"):
        ParallelCachedEmbeddingBag(10, 4, weight_path="table.safetensors")
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] divide, and the data-parallel ranks are \[\d\]:"):
        booster.boost(model, SGD(model.parameters(), lr=0.1))
    gpc.destroy()
    colossalai.launch_from_torch({})
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=2)
    booster = Booster(plugin=plugin)
    _, model = make_rankers(kind)
    with pytest.raises(ValueError, match="cached tables and pipelines cannot be combined"):
        booster.boost(model, SGD(model.parameters(), lr=0.1), loss_of)
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(kind: str) -> None:
    run_ranks(make_mistakes, 2, kind)


def refuse_ranks() -> None:
    colossalai.launch_from_torch({})
    model = DistributedDataParallel(nn.Sequential(make_pair(sparse=False)[1], nn.Linear(8, 1)))
    with pytest.raises(
        RuntimeError, match=r"CachedEmbeddingBag\(400, 8\) is in a job of 2 ranks, .* in one process"
    ):
        model(torch.tensor([[1, 2]]))
    gpc.destroy()


def test_ranks_are_refused() -> None:
    run_ranks(refuse_ranks, 2)
