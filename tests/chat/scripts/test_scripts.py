"""The documented scripts, with the documented options, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.chat.data import make_toy_data
from colossalai.core import global_context as gpc
from tests.chat.tiny import causal, tokenizer
from tests.examples.scripts import run_script
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist

FOLDER = "../applications/Chat/examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a base model, and rows for each stage."""
    causal().float().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data.json").write_text(json.dumps(make_toy_data("sums", 48, 0)))
    pairs = make_toy_data("sums", 40, 0, stage="preference")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    return tmp_path


def run_scripts(commands: list[tuple[str, ...]]) -> None:
    """Run scripts one after the other, each when all ranks have ended the one before."""
    for script, *words in commands:
        run_script(f"{FOLDER}/{script}.py", *words)
        dist.barrier()
        gpc.destroy()


def command(folder: Path, script: str, out: str, *options: str, base: str = "base") -> tuple[str, ...]:
    data = "data.json" if script == "train_sft" else "pairs.jsonl"
    given = {"pretrain": folder / base, "dataset": folder / data, "save_path": folder / out}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return script, *words, "--max_len", "64", "--lr", "3e-3", "--log_interval", "2", *options


def run(folder: Path, script: str, out: str, *options: str, num_ranks: int = 2) -> None:
    run_ranks(run_scripts, num_ranks, [command(folder, script, out, *options)])


def losses_of(folder: Path, out: str) -> list[float]:
    lines = (folder / out / "log" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_all_stages_one_after_the_other(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    llama = ("--model", "llama")
    sft = (*llama, "--max_epochs", "1", "--max_datasets_size", "32", "--accumulation_steps", "2")
    log_exp = ("--strategy", "ddp", "--loss_fn", "log_exp", "--test", "True", "--max_epochs", "2")
    tensor = ("--plugin", "HybridParallelPlugin(tp_size=2)")
    prompts = make_toy_data("sums", 16, 1, stage="prompts")
    (folder / "prompts.json").write_text(json.dumps(prompts))
    ppo = {
        "pretrain": "coati",
        "rm_path": "rm",
        "prompt_dataset": "prompts.json",
        "pretrain_dataset": "data.json",
        "save_path": "ppo",
    }
    ppo_words = [word for name, value in ppo.items() for word in (f"--{name}", str(folder / value))]
    sizes = ("--num_episodes", "1", "--max_timesteps", "4", "--update_timesteps", "2", "--max_epochs", "2")
    answers = ("--experience_batch_size", "4", "--train_batch_size", "4", "--max_new_tokens", "8")
    common = ("--model", "llama", "--max_len", "32", "--log_interval", "2")
    (folder / "rewards.py").write_text("def digits(prompt, answer, row):\n    return len(answer) / 8\n")
    grpo = {
        "pretrain": "coati",
        "dataset": "prompts.json",
        "save_path": "grpo",
        "reward": "rewards.py:digits",
    }
    grpo_words = [word for name, value in grpo.items() for word in (f"--{name}", str(folder / value))]
    few = ("--group_size", "4", "--batch_size", "4", "--max_new_tokens", "8")
    few = (*few, "--kl_coef", "0.05", "--max_kl", "10", "--async", "1")
    commands = [
        command(folder, "train_sft", "coati", *sft, "--need_optim_ckpt", "True"),
        command(folder, "train_reward_model", "rm", *llama, *log_exp, base="coati"),
        command(folder, "train_dpo", "dpo", "--model", "auto", *tensor, "--max_epochs", "1", base="coati"),
        ("train_prompts", *ppo_words, *sizes, *answers, *common),
        ("train_grpo", *grpo_words, *few, *common),
    ]
    run_ranks(run_scripts, 2, commands)
    assert len(losses_of(folder, "coati")) == 2  # 32 rows, 2 ranks, batches of 4, 2 of them a step
    AutoModelForCausalLM.from_pretrained(folder / "coati")
    assert list((folder / "coati" / "optimizer").iterdir())
    assert len(losses_of(folder, "rm")) == 8
    AutoModelForSequenceClassification.from_pretrained(folder / "rm")
    assert len(losses_of(folder, "dpo")) == 10
    assert len(losses_of(folder, "ppo")) == 8  # 2 updates of 2 passes in 2 parts
    AutoModelForCausalLM.from_pretrained(folder / "ppo")
    assert len(losses_of(folder, "grpo")) == 2
    printed = capfd.readouterr().out
    assert f"the model is in {folder}/dpo, its curves in {folder}/dpo/log" in printed
    assert "step 2: loss " in printed


@pytest.mark.long
def test_strategies_give_the_same_losses(folder: Path) -> None:
    found = {}
    for strategy in ("ddp", "colossalai_zero2", "colossalai_zero2_cpu", "colossalai_gemini"):
        run(folder, "train_sft", strategy, "--model", "llama", "--strategy", strategy, "--max_epochs", "1")
        found[strategy] = losses_of(folder, strategy)
    for strategy, losses in found.items():
        assert losses == pytest.approx(found["ddp"], rel=1e-4), strategy
    one = ("--model", "llama", "--strategy", "naive", "--batch_size", "8", "--max_epochs", "1")
    run(folder, "train_sft", "naive", *one, "--grad_checkpoint", num_ranks=1)
    assert losses_of(folder, "naive") == pytest.approx(found["ddp"], rel=1e-4)
    run(folder, "train_sft", "packed", *one, "--pack", num_ranks=1)
    assert len(losses_of(folder, "packed")) < len(found["ddp"])


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        ("--strategy", "ddp"),
        ("--strategy", "colossalai_zero2"),
        ("--strategy", "colossalai_gemini"),
        ("--plugin", "TorchFSDPPlugin()"),
        ("--plugin", "HybridParallelPlugin(tp_size=2)"),
        ("--plugin", "HybridParallelPlugin(pp_size=2, num_microbatches=2)"),
    ],
)
def test_adapters_are_saved_as_peft_has_them(folder: Path, plan: tuple[str, str]) -> None:
    from peft import AutoPeftModelForCausalLM

    options = ("--model", "llama", *plan, "--lora_rank", "4", "--max_epochs", "1")
    run(folder, "train_sft", "adapters", *options)
    opened: Any = AutoPeftModelForCausalLM.from_pretrained(folder / "adapters")
    changed = [each for name, each in opened.named_parameters() if "lora_B" in name]
    assert changed
    assert all(bool(each.any()) for each in changed)


@pytest.mark.long
def test_adapters_in_all_stages(folder: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForSequenceClassification

    lora = ("--model", "llama", "--lora_rank", "4", "--max_epochs", "1")
    run(folder, "train_reward_model", "rm", *lora, "--plugin", "HybridParallelPlugin(tp_size=2)")
    AutoModelForSequenceClassification.from_pretrained(folder / "rm")
    (folder / "prompts.json").write_text(json.dumps(make_toy_data("sums", 8, 1, stage="prompts")))
    (folder / "rewards.py").write_text("def digits(prompt, answer, row):\n    return len(answer) / 8\n")
    common = ("--max_len", "32", "--max_new_tokens", "8", "--kl_coef", "0.1", *lora)
    for script, given in (
        ("train_prompts", {"prompt_dataset": "prompts.json", "rm_path": "rm"}),
        ("train_grpo", {"dataset": "prompts.json", "reward": "rewards.py:digits"}),
    ):
        named = {**given, "pretrain": "base", "save_path": script}
        words = [word for name, value in named.items() for word in (f"--{name}", str(folder / value))]
        few = ("--group_size", "4") if script == "train_grpo" else ("--num_episodes", "1")
        run_ranks(run_script, 2, f"{FOLDER}/{script}.py", *words, *few, *common)
        AutoPeftModelForCausalLM.from_pretrained(folder / script)


@pytest.mark.long
def test_a_stage_goes_on_from_the_adapters_of_another(folder: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    lora = ("--model", "llama", "--strategy", "naive", "--lora_rank", "4", "--max_epochs", "1")
    run(folder, "train_sft", "coati", *lora, num_ranks=1)
    still = (*lora, "--lr", "0")  # it stays as it was read
    commands = [command(folder, "train_dpo", out, *still, base="coati") for out in ("dpo", "again")]
    commands[1] = (*commands[1], "--model_path", str(folder / "coati"))
    run_ranks(run_scripts, 1, commands)
    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(folder / "coati")
    expected = adapted.merge_and_unload().state_dict()
    base = AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()
    assert any(not torch.equal(expected[name], base[name]) for name in base)
    for out in ("dpo", "again"):  # whole: adapters of a model that no folder has could not be opened
        found = AutoModelForCausalLM.from_pretrained(folder / out).state_dict()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), r"--model bloom, and .*base has a model of llama: give --model llama or auto"),
        (("--model", "auto", "--strategy", "naive"), "naive is one process"),
        (("--model", "auto", "--plugin", "Nothing()"), r"write it as HybridParallelPlugin\(tp_size=2\)"),
        (("--model", "auto", "--plugin", "print('x')"), "it is not a call with named arguments"),
        (("--model", "auto", "--plugin", "TorchFSDPPlugin()", "--grad_checkpoint"), "give recompute=True"),
        (("--model", "auto", "--save_interval", "5"), "--save_interval without --resume"),
    ],
)
def test_mistakes_are_told(folder: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(RanksError, match=words):
        run(folder, "train_sft", "out", *options, num_ranks=2 if "naive" in options else 1)
    assert not (folder / "out").exists()
