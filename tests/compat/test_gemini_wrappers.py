"""Gemini by its documented doors without Booster: scripts, values, refusals."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging import version
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.gemini import ChunkManager, GeminiManager
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.parallel import GeminiDDP, ZeroDDP
from colossalai.tensor import ReplicaSpec
from colossalai.utils import get_current_device
from colossalai.utils.model.colo_init_context import ColoInitContext
from colossalai.zero import (
    GeminiAdamOptimizer,
    ZeroModel,
    ZeroOptimizer,
    post_process_colo_init_ctx,
    zero_model_wrapper,
    zero_optim_wrapper,
)
from colossalai.zero.gemini import ChunkSizes, get_static_torch_model
from colossalai.zero.gemini.chunk import init_chunk_manager
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.gemini.nets import HardNet, batch, twins

pytestmark = pytest.mark.dist

STEPS = 3
SMALL = {
    "search_range_mb": 0.001,
    "min_chunk_size_mb": 0.002,
    "hidden_dim": 16,
}  # about 2100 elements a chunk


class GPTLMLoss(nn.Module):
    """The loss of the documented scripts."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the next token."""
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def launch() -> tuple[int, int]:
    colossalai.launch_from_torch({}, verbose=False)
    return dist.get_rank(), dist.get_world_size()


def part_of(tensors: tuple[torch.Tensor, ...], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[4 * rank : 4 * rank + 4] for tensor in tensors)


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def documented_script(fraction: float, folder: str, precision: str | None) -> list[float]:
    """The script of the page on states on disk, with the device of this rank; return the losses."""
    rank, num_ranks = launch()
    with ColoInitContext(device=get_current_device()):
        model = gpt2()
    criterion = GPTLMLoss()
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_fraction=fraction, nvme_offload_dir=folder
    )
    gemini_config = {
        "strict_ddp_mode": True,
        "device": get_current_device(),
        "placement_policy": "cpu",
        "pin_memory": True,
        "hidden_dim": model.config.n_embd,
        **SMALL,
    }
    given = {} if precision is None else {"precision": precision}
    model = zero_model_wrapper(model, zero_stage=3, gemini_config=gemini_config, **given)
    optimizer = zero_optim_wrapper(model, optimizer, initial_scale=2**5)
    assert isinstance(model, GeminiDDP)
    assert next(model.parameters()).dtype is (torch.float16 if precision is None else torch.float32)
    losses = []
    data = torch.randint(64, (2 * num_ranks, 16), generator=torch.Generator().manual_seed(1))
    input_ids = data.chunk(num_ranks)[rank]
    for _ in range(STEPS):
        outputs = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        loss = criterion(outputs.logits, input_ids)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tokens = model.generate(input_ids[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 6)
    if fraction:
        assert any(Path(folder).rglob("*"))
    gpc.destroy()
    return losses


def documented_scripts(folder: str) -> list[list[float]]:
    """Run it with states in memory, with states on disk, and in float32."""
    cases = ((0.0, f"{folder}/a", None), (1.0, f"{folder}/b", None), (0.0, folder, "fp32"))
    return [documented_script(*case) for case in cases]


def plain_losses(num_ranks: int) -> list[float]:
    """The same in one process, in float32; the losses of rank 0."""
    model = gpt2()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    data = torch.randint(64, (2 * num_ranks, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        parts = [GPTLMLoss()(model(part).logits, part) for part in data.chunk(num_ranks)]
        (sum(parts) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts[0].item())
    return losses


@pytest.mark.parametrize("num_ranks", [further(1), 2])
def test_the_documented_script_runs_with_states_in_memory_and_on_disk(num_ranks: int, tmp_path: Path) -> None:
    wanted = plain_losses(num_ranks)
    first, on_disk, exact = run_ranks(documented_scripts, num_ranks, str(tmp_path))[0]
    assert first == on_disk
    assert first == pytest.approx(wanted, abs=0.02)  # float16
    assert first[-1] < first[0]
    assert exact == pytest.approx(wanted, abs=1e-5)


def _by_ddp(net: nn.Module) -> tuple[ZeroModel, Any]:
    model = GeminiDDP(net, get_current_device(), precision="fp32", **SMALL)
    return model, GeminiAdamOptimizer(model, lr=0.01, clipping_norm=1.0)


def _by_manager(net: nn.Module) -> tuple[ZeroModel, Any]:
    chunks = init_chunk_manager(model=net, init_device=get_current_device(), **SMALL)
    model = ZeroDDP(net, GeminiManager("cpu", chunks), precision="fp32")
    return model, ZeroOptimizer(HybridAdam(model.parameters(), lr=0.01), model, clipping_norm=1.0)


def _by_exact_size(net: nn.Module) -> tuple[ZeroModel, Any]:
    chunk_size = ChunkManager.search_chunk_size(net, 4096, 32)
    device = GeminiManager.get_default_device("cpu")
    chunks = ChunkManager(chunk_size, None, enable_distributed_storage=True, init_device=device)
    model = ZeroDDP(net, GeminiManager("cpu", chunks), precision="fp32")
    return model, ZeroOptimizer(HybridAdam(model.parameters(), lr=0.01), model, clipping_norm=1.0)


def _by_functions(net: nn.Module) -> tuple[ZeroModel, Any]:
    model = zero_model_wrapper(net, zero_stage=3, gemini_config=SMALL, precision="fp32")
    return model, zero_optim_wrapper(model, HybridAdam(net.parameters(), lr=0.01), max_norm=1.0)


DOORS: dict[str, Callable[[nn.Module], tuple[ZeroModel, Any]]] = {
    "GeminiDDP": _by_ddp,
    "ZeroDDP": _by_manager,
    "an exact size": _by_exact_size,
    "functions": _by_functions,
}


def all_doors() -> dict[str, float]:
    """Train through each door and on one process; return how far the parameters are apart."""
    rank, num_ranks = launch()
    far = {}
    for name, door in DOORS.items():
        net, twin = twins("once")
        model, optimizer = door(net)
        assert type(model).gathered is ZeroModel.gathered
        plain = HybridAdam(twin.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            optimizer.backward(model(*part_of(batch(num_ranks), rank)))
            optimizer.step()
            plain.zero_grad()
            losses = [twin(*part_of(batch(num_ranks), other)) for other in range(num_ranks)]
            (sum(losses) / num_ranks).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            plain.step()
        with model.gathered():
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            far[name] = max((a - b).abs().max().item() for a, b in pairs)
    gpc.destroy()
    return far


@pytest.mark.parametrize("num_ranks", [further(1), 2])
def test_every_door_trains_as_one_process(num_ranks: int) -> None:
    for far in run_ranks(all_doors, num_ranks):
        assert set(far) == set(DOORS)
        assert max(far.values()) < 1e-10, far


def values_of_a_model() -> None:  # noqa: PLR0915 - one run
    """Read, write, save, load and copy a model in chunks."""
    rank, num_ranks = launch()
    net, twin = twins("none")
    model = GeminiDDP(net, precision="fp32", **SMALL)
    optimizer = GeminiAdamOptimizer(model, lr=0.01)
    wanted = twin.state_dict()

    state = model.state_dict()
    assert list(state) == list(wanted)
    assert all(
        type(value) is torch.Tensor and torch.equal(value, wanted[name]) for name, value in state.items()
    )
    assert state._metadata == wanted._metadata
    chunks = {param.chunk_place.chunk: None for param in net.parameters()}
    assert len(chunks) > 3
    assert num_ranks == 1 or sum(chunk.whole is not None for chunk in chunks) <= 2, "as many as in training"
    assert all(
        value is dict(net.named_parameters()).get(name, value)
        for name, value in model.state_dict(keep_vars=True).items()
    )

    with torch.no_grad(), model.gathered("reused", net.frozen, "blocks.0.scale", net.blocks[1].scale):
        assert torch.equal(net.reused.weight, twin.reused.weight)
        if rank == num_ranks - 1:
            net.reused.weight.fill_(2.0)
            net.blocks[1].scale.fill_(3.0)
    with model.gathered("reused.weight"):
        assert net.reused.weight.eq(2.0).all()
    for missing in ("reusd", nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="is not a module or parameter of this model"):
            model.gathered(missing).__enter__()

    optimizer.backward(model(*part_of(batch(num_ranks), rank)))
    optimizer.step()
    result = model.load_state_dict(wanted)
    assert not result.missing_keys
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"size mismatch for reused\.weight"):
        model.load_state_dict({**wanted, "reused.weight": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(wanted, assign=True)
    some = model.load_state_dict({"reused.weight": torch.ones(16, 16), "new": torch.ones(1)}, strict=False)
    assert some.unexpected_keys == ["new"]
    with model.gathered():
        assert net.reused.weight.eq(1.0).all()
        copied = copy.deepcopy(net)
        assert torch.equal(copied.norm.weight, twin.norm.weight)
    model.load_state_dict(wanted)

    static = get_static_torch_model(model, dtype=None)
    assert type(static) is HardNet
    if rank == 0:
        assert {type(param) for param in static.parameters()} == {nn.Parameter}
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in static.modules())
        assert [p.requires_grad for p in static.parameters()] == [p.requires_grad for p in twin.parameters()]
        static.train(), twin.train()
        assert torch.equal(static(*batch(1)), twin(*batch(1)))
    else:
        assert {param.device.type for param in static.parameters()} == {"meta"}
    everywhere = get_static_torch_model(net, get_current_device(), torch.float32, only_rank_0=False)
    assert torch.equal(everywhere.reused.weight, twin.reused.weight.float())
    assert everywhere.norm.running_mean.dtype is torch.float32
    with pytest.raises(ValueError, match=r"dtype is torch\.int64"):
        get_static_torch_model(model, dtype=torch.int64)
    gpc.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_are_read_written_saved_loaded_and_copied(num_ranks: int) -> None:
    run_ranks(values_of_a_model, num_ranks)


def masters_follow_loaded_values() -> None:
    """With float16 and masters: what is loaded trains on; the other stages have `gathered`, too."""
    rank, num_ranks = launch()
    net = HardNet()
    model = GeminiDDP(net, **SMALL)
    optimizer = GeminiAdamOptimizer(model, lr=1e-4, initial_scale=2**5)
    loss = model(*part_of(batch(num_ranks), rank))
    assert loss.dtype is torch.float32
    optimizer.backward(loss)
    optimizer.step()
    assert optimizer.scaler.scale == 2**5
    loaded = {
        name: torch.full_like(value, 0.5) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    assert loaded["reused.weight"].dtype is torch.float16
    model.load_state_dict(loaded)
    optimizer.zero_grad()
    optimizer.backward(model(*part_of(batch(num_ranks), rank)))
    optimizer.step()
    after = model.state_dict()["reused.weight"]
    assert (after - 0.5).abs().max() < 1e-3, "the masters were loaded, too"
    state = optimizer.state_dict()
    assert state["state"]
    optimizer.load_state_dict(state)

    low = GeminiDDP(nn.Linear(4, 4).bfloat16(), precision="fp32", force_outputs_fp32=True, verbose=True)
    assert low(torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.float32
    low = GeminiDDP(nn.Linear(4, 4).bfloat16(), precision="fp32")
    assert low(torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16

    plugin = GeminiPlugin(precision="fp32", **SMALL)
    boosted, *_ = Booster(plugin=plugin).boost(nn.Linear(4, 4))
    with torch.no_grad(), boosted.gathered("weight"):
        boosted.get_parameter("weight").fill_(float(rank))
    assert boosted.state_dict()["weight"].eq(0).all(), "what the lowest rank wrote"
    boosted.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
    assert boosted.state_dict()["weight"].eq(1).all()
    assert get_static_torch_model(boosted.unwrap(), only_rank_0=False).weight.eq(1).all()
    assert "pass the result of its unwrap" in refused(lambda: get_static_torch_model(boosted))
    assert "is already wrapped" in refused(lambda: GeminiDDP(boosted))

    stage_2 = zero_model_wrapper(nn.Linear(4, 4), 2, precision="fp32")
    with stage_2.gathered("weight"), stage_2.gathered():
        assert stage_2.state_dict()["weight"].shape == (4, 4)
    gpc.destroy()


def test_masters_follow_what_is_loaded() -> None:
    run_ranks(masters_follow_loaded_values, 2)


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def mistakes() -> list[tuple[str, str]]:
    """Return what is said of mistakes at the doors, with what it has to say."""
    launch()
    net = HardNet()
    fresh = lambda: nn.Linear(4, 4)  # noqa: E731
    model = GeminiDDP(net, precision="fp32")
    optimizer = GeminiAdamOptimizer(model)
    chunks = ChunkManager(64)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: GeminiDDP(fresh(), precision="fp8"), "precision is 'fp8'; it must be one of"),
        (lambda: GeminiDDP(fresh(), min_chunk_size_mb=-1), "min_chunk_size_mb=-1"),
        (lambda: GeminiDDP(fresh(), search_range_mb=-1), "search_range_mb=-1"),
        (lambda: GeminiDDP(fresh(), hidden_dim=0), "hidden_dim is 0"),
        (lambda: GeminiDDP(fresh(), memstats=object()), "memstats"),
        (lambda: GeminiDDP(fresh(), placement="cpu"), "has no argument 'placement': did you mean"),
        (lambda: GeminiDDP(fresh(), device="meta"), "this rank computes on cpu"),
        (lambda: GeminiDDP(fresh(), device="nonsense"), "is not a device"),
        (lambda: GeminiDDP("model"), "the model is a str"),
        (lambda: GeminiDDP(model), "is already wrapped"),
        (lambda: GeminiDDP(net), "is already wrapped"),
        (lambda: zero_model_wrapper(nn.Sequential(net), 2), "is already wrapped"),
        (lambda: GeminiDDP(nn.Linear(2, 2, device="meta")), "has no values yet"),
        (lambda: GeminiDDP(nn.Embedding(4, 4, sparse=True)), "sparse=False"),
        (lambda: zero_model_wrapper(fresh(), 4), "stage is 4"),
        (lambda: zero_model_wrapper(fresh(), 2, {}), "gemini_config is for stage 3"),
        (lambda: zero_model_wrapper(fresh(), 3, {"policy": 1}), "GeminiDDP has no argument 'policy'"),
        (lambda: zero_model_wrapper(fresh(), 3, cpu_offload=True), "cpu_offload: options of stages 1 and 2"),
        (
            lambda: zero_model_wrapper(fresh(), 3, {"precision": "fp16"}, precision="fp32"),
            "precision is 'fp32', and gemini_config has 'fp16'",
        ),
        (lambda: ZeroDDP(fresh(), chunks), "gemini_manager is a ChunkManager"),
        (lambda: GeminiManager("gpu", chunks), "placement_policy is 'gpu'; it must be one of"),
        (lambda: GeminiManager.get_default_device("gpu"), "placement_policy is 'gpu'"),
        (lambda: GeminiDDP(fresh(), placement_policy="gpu"), "placement_policy is 'gpu'"),
        (lambda: GeminiManager("cpu", 64), "chunk_manager is a int"),
        (lambda: GeminiManager("cpu", chunks, memstats=1), "memstats"),
        (lambda: ChunkManager(0), "chunk_size is 0"),
        (lambda: ChunkManager(64, process_group=object()), "process_group is given"),
        (lambda: ChunkManager(64, enable_distributed_storage=False), "enable_distributed_storage=False"),
        (lambda: ChunkManager.search_chunk_size(fresh(), 64, 0), "n_grids is 0"),
        (lambda: ChunkManager.search_chunk_size(fresh(), 4, 32), "at least as many elements as sizes"),
        (lambda: init_chunk_manager(fresh(), min_chunk_size_mb=0), "min_chunk_size_mb=0"),
        (lambda: ZeroOptimizer(HybridAdam(fresh().parameters()), fresh()), "the model is a Linear"),
        (lambda: GeminiAdamOptimizer(fresh()), "the model is a Linear"),
        (lambda: GeminiAdamOptimizer(model, rate=1), "has no argument 'rate'; it has lr, "),
        (lambda: GeminiAdamOptimizer(model), "is in two optimizers of one model"),
        (lambda: ZeroOptimizer(optimizer, model), "it must be a torch.optim.Optimizer that you built"),
        (
            lambda: ZeroOptimizer(HybridAdam(net.parameters()), model, gpu_margin_mem_ratio=2.0),
            "gpu_margin_mem_ratio is 2.0",
        ),
        (lambda: ColoInitContext(default_pg=object()), "default_pg is <object"),
        (lambda: ColoInitContext(default_dist_spec=object()), "default_dist_spec is <object"),
        (lambda: ColoInitContext(default_dist_spec=ReplicaSpec()), "and no default_pg"),
        (lambda: ColoInitContext(dtype=torch.int64), "dtype is torch.int64"),
        (lambda: ColoInitContext(device="nonsense"), "is not a device"),
        (lambda: post_process_colo_init_ctx(nn.Linear(2, 2, device="meta")), "has no values yet"),
    ]
    said = [(refused(call), wanted) for call, wanted in calls]
    gpc.destroy()
    return said


def test_mistakes_are_refused_at_the_door() -> None:
    (said,) = run_ranks(mistakes, 1)
    for text, wanted in said:
        assert wanted in text, (wanted, text)


@pytest.mark.unit
def test_models_are_built_on_the_device_and_in_the_dtype_asked_for() -> None:
    ctx = ColoInitContext(dtype=torch.bfloat16)
    for _ in range(2):
        with ctx:
            model = nn.BatchNorm1d(2)
        assert model.weight.dtype is model.running_mean.dtype is torch.bfloat16
        assert torch.get_default_dtype() is torch.float32
    with ColoInitContext(device="meta"):
        assert nn.Linear(2, 2).weight.is_meta
    with ColoInitContext(device=torch.device("cpu")):
        assert nn.Linear(2, 2).weight.dtype is torch.float32
    param = model.weight
    assert post_process_colo_init_ctx(model, dtype=torch.float64) is None
    assert model.weight is param
    assert param.dtype is torch.float64


@pytest.mark.unit
def test_sizes_of_chunks_as_values() -> None:
    assert version.parse(colossalai.__version__) > version.parse("0.1.10")
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    assert ChunkManager.search_chunk_size(model, 4 * 64 * 64, 4) == 4 * 64 * 64
    assert ChunkManager.search_chunk_size(model, 64 * 2**20, 32) == 4 * 64 * 64  # one, just large enough
    assert ChunkManager(100).sizes == ChunkSizes(100, 0, 1)
    assert init_chunk_manager(model, None, 64).sizes == ChunkSizes.in_mb(32, 64, 32)
    assert init_chunk_manager(model).sizes.interval == 1024
    for policy in ("cpu", "auto", "const", "nvme"):
        assert GeminiManager.get_default_device(policy) == torch.device("cpu")
    assert GeminiManager("auto", ChunkManager(100)).placement_policy == "auto"
