"""Memory of a run: what is told at its start is what a rank holds after a step, and what fits is named."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.chat import GRPO, PPO, SFT, _memory, chat_data, with_value_head
from colossalai.chat._memory import note_memory
from colossalai.chat.data import make_toy_data
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.tiny import causal, rows_for, tokenizer
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

PLANS = {
    "ddp": TorchDDPPlugin,
    "zero 1": partial(LowLevelZeroPlugin, stage=1, precision="bf16"),
    "zero 2, fp32": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "gemini": partial(GeminiPlugin, precision="bf16"),
    "tp 2": partial(HybridParallelPlugin, tp_size=2),
    "tp 2, zero 1": partial(HybridParallelPlugin, tp_size=2, zero_stage=1),
    "pp 2": partial(HybridParallelPlugin, pp_size=2, num_microbatches=2),
}
CELLS = [("ddp", 1), ("tp 2, zero 1", 4)]
LONG_CELLS = [
    ("zero 1", 1), ("zero 1", 2), ("gemini", 1),
    ("ddp", 2), ("zero 2, fp32", 2), ("fsdp", 2), ("gemini", 2), ("tp 2", 2), ("pp 2", 2),
    ("ddp", 4), ("zero 1", 4), ("zero 2, fp32", 4), ("fsdp", 4), ("gemini", 4), ("tp 2", 4),
]  # fmt: skip


def here(tensor):
    """Return what this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def num_bytes(tensors):
    return sum(here(each).nbytes for each in tensors)


def sft_on_a_rank(name, folder):
    """Return what was told before the first step, and what is there after it."""
    colossalai.launch_from_torch({}, seed=0, verbose=False)
    booster = Booster(plugin=PLANS[name]())
    model = causal().float()
    whole = sum(param.numel() for param in model.parameters())
    result = SFT(max_length=64).fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        booster=booster,
        data=rows_for("sft", 8),
        tokenizer=tokenizer(),
        steps=1,
        batch_size=4,
        log=folder,
    )
    params = list(result.model.parameters())
    note = note_memory({"model": (result.model, result.optimizer)}, {}, booster=booster, engine=None)
    held = [param for group in result.optimizer.param_groups for param in group["params"]]
    in_model = {here(param).untyped_storage().data_ptr() for param in params}
    masters = [each for each in held if here(each).untyped_storage().data_ptr() not in in_model]
    states = [v for state in result.optimizer.state.values() for v in state.values() if v.dim()]
    found = {
        "parameters": num_bytes(params) if name != "gemini" else None,
        "gradients": num_bytes(param.grad for param in params if param.grad is not None),
        "master weights": num_bytes(masters),
        "optimizer states": num_bytes(states),
    }
    told = json.loads(Path(folder, "memory.json").read_text()) if gpc.get_global_rank() == 0 else None
    gpc.destroy()
    return whole, told, note, found


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG_CELLS)],
)
def test_what_is_told_is_what_a_step_leaves(name, num_ranks, tmp_path):
    ranks = run_ranks(sft_on_a_rank, num_ranks, name, str(tmp_path))
    (whole, told, note, _), *_ = ranks
    kinds = note.models["model"]
    assert told["models"]["model"] == kinds  # before the first step and after it
    assert told["fits"]
    assert told["plan_that_fits"] is None
    # Those of the rank that has least left; how much is free on the host changes from moment to moment.
    assert told["bytes"] in [sum(each.models["model"].values()) for _, _, each, _ in ranks]
    assert note.to_come == kinds["gradients"] + kinds.get("gradients in float32", 0)  # states are there
    # Of each kind all ranks together have what is told, however a cut falls; of chunks their ends beside.
    more = 0.05 if name == "gemini" else 0.0
    for kind in ("parameters", "master weights", "optimizer states"):
        if name == "gemini" and kind == "parameters":
            continue  # sections that no tensor of the model shows: see tests/zero/gemini
        found = sum(each[kind] for *_, each in ranks)
        wanted = sum(each.models["model"].get(kind, 0) for _, _, each, _ in ranks)
        assert wanted <= found <= wanted * (1 + more), kind
    if name in ("ddp", "fsdp", "tp 2", "pp 2"):  # those of ZeRO's buckets: tests/zero/test_memory.py
        assert sum(each["gradients"] for *_, each in ranks) == sum(
            each.models["model"]["gradients"] for _, _, each, _ in ranks
        )
    if name == "ddp":
        assert kinds == {"parameters": 4 * whole, "gradients": 4 * whole, "optimizer states": 8 * whole}
    if name == "zero 1":
        assert kinds["master weights"] == round(4 * whole / num_ranks)
        assert kinds["optimizer states"] == round(8 * whole / num_ranks)


def ppo_on_a_rank(folder):
    colossalai.launch_from_torch({}, seed=0, verbose=False)
    model = causal()
    critic, reward = (with_value_head(copy.deepcopy(model)) for _ in range(2))
    PPO(reward=reward, max_length=32, iterations=1).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        critic=critic,
        critic_optimizer=torch.optim.AdamW(critic.parameters(), lr=1e-3),
        reference=copy.deepcopy(model),
        booster=Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32")),
        data=chat_data(make_toy_data("sums", 8, 0, stage="prompts"), "prompts"),
        tokenizer=tokenizer(),
        sampling=SamplingParams(max_tokens=4),
        batch_size=2,
        steps=1,
        log=folder,
    )
    sizes = [sum(param.numel() for param in each.parameters()) for each in (causal(), reward)]
    gpc.destroy()
    return sizes


def test_all_models_of_ppo_are_told(tmp_path):
    (policy, value), _ = run_ranks(ppo_on_a_rank, 2, str(tmp_path))
    told = json.loads((tmp_path / "memory.json").read_text())
    models = told["models"]
    assert models["actor"] == {"parameters": 8 * policy, "gradients": 8 * policy}  # SGD keeps nothing
    assert models["critic"] == {
        "parameters": 8 * value, "gradients": 8 * value, "optimizer states": 16 * value // 2,
    }  # fmt: skip
    assert models["reference"] == {"frozen parameters": 8 * policy}
    assert models["reward"] == {"frozen parameters": 8 * value}
    # 2 answers at a time of 6 + 4 tokens (the longest prompt), 64 beside; 2 layers, 2 heads of 8 elements,
    # keys and values
    assert models["rollouts"] == {
        "keys and values": 8 * (2 * 2 * 2 * 8) * 2 * (10 + 64),
        "frozen parameters": 0,
    }
    assert told["bytes"] == sum(sum(kinds.values()) for kinds in models.values())
    assert told["bytes_to_come"] == 8 * policy + 8 * value + 8 * value + models["rollouts"]["keys and values"]
    assert told["fits"]


class RecordingLogger:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.warnings, self.infos = [], []

    def warning(self, message, **_):
        self.warnings.append(message)

    def info(self, message, **_):
        self.infos.append(message)


def short_of_memory(share, folder):
    """Train where there is a share of what a rank takes in all; return what is said."""
    colossalai.launch_from_torch({}, seed=0, verbose=False)
    heard = RecordingLogger()
    _memory.get_dist_logger = lambda: heard
    model = causal().float()
    whole = sum(param.numel() for param in model.parameters())
    # The other rank has enough: who lacks most is heard of on all.
    free = share * 16 * whole - 4 * whole if gpc.get_global_rank() == 1 else 2**40
    _memory.free_bytes = lambda device: int(free)
    SFT(max_length=64).fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        booster=Booster(plugin=TorchDDPPlugin()),
        data=rows_for("sft", 8),
        tokenizer=tokenizer(),
        steps=1,
        log=folder,
    )
    gpc.destroy()
    return heard.warnings, heard.infos


@pytest.mark.parametrize(
    ("share", "proposal"),
    [
        pytest.param(1.0, None, marks=pytest.mark.long),
        (10.5 / 16, "LowLevelZeroPlugin(stage=2, precision='fp32') takes less, and fits"),
        pytest.param(
            12.5 / 16, "LowLevelZeroPlugin(stage=1, precision='fp32') takes", marks=pytest.mark.long
        ),
        pytest.param(0.27, "none of the other plans", marks=pytest.mark.long),
    ],
)
def test_what_does_not_fit_is_said_with_the_plan_that_does(share, proposal, tmp_path):
    (warnings, infos), others = run_ranks(short_of_memory, 2, share, str(tmp_path))
    assert others == ([], [])
    assert len(infos) == 1
    assert "of it to come" in infos[0]
    told = json.loads((tmp_path / "memory.json").read_text())
    assert told["fits"] == (proposal is None)
    if proposal is None:
        assert not warnings
        return
    (warning,) = warnings
    assert "the first step will take" in warning
    assert proposal in warning
    assert (told["plan_that_fits"] or "none of the other plans") in warning


def silent_run():
    colossalai.launch_from_torch({}, seed=0, verbose=False)
    heard = RecordingLogger()
    _memory.get_dist_logger = lambda: heard
    model = causal().float()
    GRPO(reward=lambda prompt, answer, row: float(len(answer)), group_size=2, max_length=32).fit(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        booster=Booster(plugin=TorchDDPPlugin()),
        data=chat_data(make_toy_data("sums", 8, 0, stage="prompts"), "prompts"),
        tokenizer=tokenizer(),
        sampling=SamplingParams(max_tokens=4),
        batch_size=2,
        steps=1,
    )
    gpc.destroy()
    return heard.warnings, heard.infos


def test_without_a_log_or_a_bar_nothing_is_said():
    assert run_ranks(silent_run, 1) == [([], [])]


def grpo_with_reference(name, is_boosted):
    colossalai.launch_from_torch({}, seed=0, verbose=False)
    model, reference = causal(), causal()
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(1.01)
    booster = Booster(plugin=WITH_PARTS[name]())
    if is_boosted:
        reference, *_ = booster.boost(reference)
    result = GRPO(
        reward=lambda prompt, answer, row: float(len(answer)), group_size=2, max_length=32, kl_coef=0.1
    ).fit(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        booster=booster,
        data=chat_data(make_toy_data("sums", 8, 0, stage="prompts"), "prompts"),
        tokenizer=tokenizer(),
        sampling=SamplingParams(max_tokens=4),
        reference=reference,
        batch_size=2,
        steps=2,
    )
    gpc.destroy()
    return [record["kl_to_reference"] for record in result.records]


def whole_and_cut(name):
    return [grpo_with_reference(name, is_boosted) for is_boosted in (False, True)]


WITH_PARTS = {
    "fsdp": TorchFSDPPlugin,
    "gemini": partial(GeminiPlugin, precision="fp32"),
    "tp 2": PLANS["tp 2"],
}


@pytest.mark.parametrize(
    "name", ["gemini", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "tp 2"))]
)
def test_a_reference_may_be_cut_as_the_policy_is(name):
    whole, cut = run_ranks(whole_and_cut, 2, name)[0]
    assert whole[0] > 1e-7
    assert cut == pytest.approx(whole, rel=1e-6)
