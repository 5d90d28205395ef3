"""Checkpoints that earlier versions wrote load, in each form; `earlier/make.py` wrote them."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.model_zoo.gpt import GPT
from colossalai.utils import load_checkpoint
from tests.checkpoint_io.earlier.make import EXTRA, GPT_SIZES, dataset, linear_model
from tests.ranks import run_ranks

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
