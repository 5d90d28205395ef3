"""Checkpoints that earlier versions wrote load, in each form; `earlier/make.py` wrote them."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.checkpoint_io.earlier.make import EXTRA, GPT_SIZES, dataset, linear_model
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

ARCHIVES = sorted((Path(__file__).parent / "earlier").glob("*.tar.xz"))
MODEL_FORMS = (
    *("model.pt", "model.safetensors", "prefix.safetensors", "shards_bin", "shards_safetensors"),
    *("shards_variant", "slices"),
)
OPTIMIZER_FORMS = ("optimizer.pt", "optimizer_shards", "optimizer_slices")


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_every_form_loads(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    run_ranks(_load_all, 1, tmp_path)


def test_there_are_earlier_checkpoints() -> None:
    assert ARCHIVES


class Job:
    """A boosted model of linear layers, with nothing of what the checkpoints hold."""

    def __init__(self, plugin: Any = None) -> None:
        torch.manual_seed(1)
        self.booster = Booster(plugin=plugin or TorchDDPPlugin())
        model = linear_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = self.booster.plugin.prepare_dataloader(dataset(), batch_size=4, shuffle=True)
        boosted = self.booster.boost(model, optimizer, None, loader, scheduler)
        self.model, self.optimizer, _, self.loader, self.scheduler = boosted

    def states(self) -> dict[str, dict[str, Any]]:
        names = {param: name for name, param in self.model.unwrap().named_parameters()}
        return {names[param]: state for param, state in self.optimizer.unwrap().state.items()}


def _load_all(folder: Path) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for form in MODEL_FORMS:
        job = Job()
        variant = "fp32" if form == "shards_variant" else None
        job.booster.load_model(job.model, folder / form, variant=variant)
        _assert_same(dict(job.model.unwrap().state_dict()), expected["model"], form)
    for form in OPTIMIZER_FORMS:
        job = Job()
        job.booster.load_optimizer(job.optimizer, folder / form)
        _assert_same_states(job, expected, form)
    job = Job()
    job.booster.load_lr_scheduler(job.scheduler, folder / "scheduler.pt")
    assert job.scheduler.state_dict()["_last_lr"] == expected["scheduler"]
    job = Job()
    assert load_checkpoint(folder / "checkpoint.pt", job.model, job.optimizer, job.scheduler) == 7
    _assert_same(dict(job.model.unwrap().state_dict()), expected["model"], "checkpoint.pt")
    _assert_same_states(job, expected, "checkpoint.pt")
    for form in ("data", "background", "fsdp", "zero1", "zero2_bf16"):
        _assert_training_state(folder / form, expected)
    _assert_gpt(folder)


def _assert_training_state(folder: Path, expected: dict[str, Any]) -> None:
    low = folder.name == "zero2_bf16"
    job = Job(LowLevelZeroPlugin(stage=2, precision="bf16") if low else None)
    resumed = job.booster.load(folder, job.model, job.optimizer, job.scheduler, job.loader)
    assert resumed is not None
    assert (resumed.step, resumed.epoch) == (2, 0)
    assert resumed.extra["best"] == EXTRA["best"]
    assert resumed.extra["words"] == EXTRA["words"]
    assert torch.equal(resumed.extra["table"], EXTRA["table"])
    assert job.scheduler.state_dict()["_last_lr"] == expected["scheduler"]
    assert len(list(job.loader)) == 2  # 8 of the 16 samples were seen
    if low:  # its steps were other ones: weights of 8 bits cannot say more than that they are near
        for name, value in job.model.unwrap().state_dict().items():
            assert value.dtype == torch.bfloat16
            assert torch.allclose(value.float(), expected["model"][name], atol=0.02), name
        return
    tolerance = 0.0 if folder.name in ("data", "background") else 1e-6
    _assert_same(dict(job.model.unwrap().state_dict()), expected["model"], folder.name, tolerance)
    _assert_same_states(job, expected, folder.name, tolerance)


def _assert_gpt(folder: Path) -> None:
    saved = []
    for name in ("gpt_tensor", "gpt_pipeline"):
        for form in (name, f"{name}.safetensors"):
            booster = Booster()
            torch.manual_seed(2)
            model = GPT(GPT_SIZES)
            model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
            if form == name:
                assert booster.load(folder / form, model, optimizer).step == 1
            else:
                booster.load_model(model, folder / form)
            saved.append({key: value.clone() for key, value in model.unwrap().state_dict().items()})
    for other in saved[1:]:
        _assert_same(other, saved[0], "GPT", 1e-5)


def _assert_same_states(job: Job, expected: dict[str, Any], form: str, tolerance: float = 0.0) -> None:
    states = job.states()
    assert states.keys() == expected["optimizer"].keys()
    for name, state in states.items():
        _assert_same(state, expected["optimizer"][name], f"{form}: {name}", tolerance)
    assert job.optimizer.param_groups[0]["lr"] == expected["scheduler"][0]


def _assert_same(values: dict[str, Any], expected: dict[str, Any], form: str, tolerance: float = 0.0) -> None:
    assert values.keys() == expected.keys(), form
    for name, value in values.items():
        assert isinstance(value, torch.Tensor)
        wanted = expected[name]
        assert value.dtype == wanted.dtype
        assert torch.allclose(value, wanted, rtol=0, atol=tolerance), f"{form}: {name}"


class Scaled(nn.Module):
    """A layer with buffers that 16 bits round, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", 1 + torch.rand(4))
        self.register_buffer("count", torch.tensor(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


PLANS = {
    "zero": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16")),
    "gemini": lambda: Booster(plugin=GeminiPlugin(precision="bf16")),
    "fsdp": lambda: Booster(plugin=TorchFSDPPlugin(), mixed_precision="bf16"),
    "pp": lambda: Booster(
        plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="bf16_master")
    ),
}
FORMS = {
    "x.pt": {},
    "x.safetensors": {},
    "shards": {"shard": True, "size_per_shard": 0.0001, "use_safetensors": True},
    "slices": {"gather_dtensor": False},
}


class Run:
    """A boosted model whose buffers have 16 bits, as in earlier versions, or 32."""

    def __init__(self, plan: str, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.booster = PLANS[plan]()
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Scaled() for _ in range(4))))
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(model.parameters()))
        for part in self.model.unwrap().modules():
            if "scale" in part._buffers and dtype != torch.float32:
                low = {"scale": part._buffers["scale"].to(dtype)}
                vars(part)["_buffers"] = {**dict(part._buffers.items()), **low}
        assert {buffer.dtype for buffer in self.model.unwrap().buffers()} == {dtype, torch.int64}

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of what this rank holds."""
        state = self.model.data.state_dict(self.model.unwrap())
        local = {
            name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()
        }
        return {name: value.clone() for name, value in local.items()}


def _convert_buffers(folder: Path, plan: str, saved: torch.dtype, wanted: torch.dtype) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    source = Run(plan, 1, saved)
    expected = {
        name: value.to(wanted) if name.endswith("scale") else value for name, value in source.values().items()
    }

    def loads(action: Callable[[Run], object]) -> None:
        target = Run(plan, 2, wanted)
        action(target)
        _assert_same(target.values(), expected, plan)

    for form, options in FORMS.items():
        source.booster.save_model(source.model, folder / form, **options)
        loads(lambda target, form=form: target.booster.load_model(target.model, folder / form))
    source.booster.save(folder / "run", source.model, source.optimizer, step=1)
    loads(lambda target: target.booster.load(folder / "run", target.model, target.optimizer))
    save_checkpoint(folder / "checkpoint.pt", 3, source.model, source.optimizer)
    loads(lambda target: load_checkpoint(folder / "checkpoint.pt", target.model, target.optimizer))
    state = source.model.state_dict()
    loads(lambda target: target.model.load_state_dict(state))
    gpc.destroy()


@pytest.mark.parametrize("plan", ["zero", "pp", *map(further, ("gemini", "fsdp"))])
@pytest.mark.parametrize(
    ("saved", "wanted"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.every_cell
def test_buffers_of_16_bits_load_into_float32_and_back(
    plan: str, saved: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    run_ranks(_convert_buffers, 2, tmp_path, plan, saved, wanted)
