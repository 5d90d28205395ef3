"""Models with experts: saved under any layout and loaded under any other, and from and to transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.layer.moe import load_moe_model, save_moe_model
from tests.checkpoint_io.layouts import IS_FULL, layout_of, load, mean_losses, save
from tests.parity.experts.tasks import moe_net
from tests.ranks import run_ranks
from tests.shardformer.models import deepseek_v3, gpt_oss, mixtral_of_eight, qwen2_moe, qwen3_moe
from tests.tiers import further

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
# Each layout with one whose file it loads: a ring, so that every layout is saved and loaded.
RING = ["ep1", "ep2", "ep4-zero1", "ep2-zero2", "ep2-tp2", "ep2-fsdp", "ep2-pp2", "ep2-gemini"]
PAIRS = [(source, RING[(place + 1) % len(RING)]) for place, source in enumerate(RING)]
if IS_FULL:
    PAIRS = [(source, name) for source in RING for name in RING]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("ep2-zero2", ("ep2-tp2", "ep1")),
        *(further(source, (name,)) for source, name in PAIRS if (source, name) != ("ep2-zero2", "ep2-tp2")),
        further("ep2-fsdp", ("ep4-zero1", "ep1")),
    ],
)
def test_saved_and_loaded(source: str, names: tuple[str, ...], tmp_path: Path) -> None:
    losses = mean_losses(run_ranks(save, layout_of(source).num_ranks, source, tmp_path))
    for name in names:
        of_ranks = run_ranks(load, layout_of(name).num_ranks, name, [source], tmp_path)
        found = mean_losses([of_rank[source] for of_rank in of_ranks])
        assert found == pytest.approx(losses, rel=TOLERANCE)


def boosted(build: Callable[[], nn.Module], seed: int) -> tuple[Booster, Any]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(ep_size=2))
    torch.manual_seed(seed)
    model, *_ = booster.boost(build())
    return booster, model


def from_folder(build: Callable[[], nn.Module], folder: str) -> None:
    """Load what transformers wrote, and write what transformers opens."""
    booster, model = boosted(build, seed=7)
    booster.load_model(model, f"{folder}/theirs")
    booster.save_model(model, f"{folder}/ours", shard=True, use_safetensors=True)
    gpc.destroy()


@pytest.mark.parametrize(
    "build", [mixtral_of_eight, gpt_oss, *map(further, (qwen3_moe, qwen2_moe, deepseek_v3))]
)
def test_folders_of_transformers(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Single experts and fused ones; each rank takes its own, and nothing is lost on the way back."""
    theirs = build()
    theirs.save_pretrained(tmp_path / "theirs")
    run_ranks(from_folder, 2, build, str(tmp_path))
    again = type(theirs).from_pretrained(tmp_path / "ours")
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def misfit(folder: str) -> None:
    booster, model = boosted(mixtral_of_eight, seed=7)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight"):
        booster.load_model(model, folder)
    assert all(torch.equal(param, kept) for param, kept in zip(model.parameters(), before, strict=True))
    gpc.destroy()


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    mixtral_of_eight().save_pretrained(tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    del tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, path, {"format": "pt"})
    run_ranks(misfit, 2, str(tmp_path))


def documented(folder: str, ep_size: int, is_saved: bool) -> list[float]:
    """Save a model of layers with experts, or load it into one that differs; return its outputs."""
    colossalai.launch_from_torch({"parallel": {"moe": {"size": ep_size}}}, verbose=False)
    torch.manual_seed(1 if is_saved else 2)
    model = moe_net("top2").double()
    if is_saved:
        save_moe_model(model, folder)
    else:
        assert load_moe_model(model, folder).is_clean
    outputs = model.eval()(torch.ones(2, 3, 5, dtype=torch.float64)).flatten().tolist()
    gpc.destroy()
    return outputs


def test_by_the_documented_names(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    (expected,) = run_ranks(documented, 1, path, 1, True)
    for size in (2, 4):
        assert run_ranks(documented, size, path, size, False) == [expected] * size
    (alone, *_) = run_ranks(documented, 2, path, 2, True)
    assert alone == expected
    moe_net("top2").double().load_state_dict(torch.load(path))  # in one process, by torch alone
