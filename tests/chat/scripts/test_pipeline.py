"""The documented pipeline from a base model to a served assistant, by its scripts and shell scripts.

The dialogue: a model is told to copy letters, and may begin with "yes" or with "no". SFT teaches both alike,
comparisons prefer "yes", and after PPO held-out questions are answered so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.chat import load_reward_model
from colossalai.chat.data import encode_preference, encode_prompt, make_toy_data, make_toy_tokenizer
from colossalai.inference import LLM, SamplingParams
from tests.chat.scripts.test_scripts import FOLDER
from tests.examples.scripts import EXAMPLES, run_script
from tests.launcher.command import START_S, Command, path_with_command
from tests.ranks import run_ranks
from tests.serving.dialogues.test_dialogues import events_of
from tests.serving.served_folder import ServedFolder

pytestmark = pytest.mark.dist

NUM_HELD_OUT = 48
SCRIPTS = EXAMPLES.parent / "applications" / "Chat"
LLAMA = ("--model", "llama", "--max_len", "64", "--log_interval", "20")


def question(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}]


def answered(row: dict[str, Any], word: str) -> list[dict[str, str]]:
    return [*question(row), {"role": "assistant", "content": f"{word} {row['answer']}"}]


def rows_of(stage: str, count: int, *, seed: int = 0, split: Any = "train") -> list[dict[str, Any]]:
    """Return rows of the dialogue in the documented format of a stage."""
    rows = make_toy_data("copy", count, seed, split=split)
    if stage == "sft":
        return [{"messages": answered(row, ("yes", "no")[number % 2])} for number, row in enumerate(rows)]
    if stage == "preference":
        return [{"chosen": answered(row, "yes"), "rejected": answered(row, "no")} for row in rows]
    return [{"messages": question(row)} for row in rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a base model, and rows for each stage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_toy_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for stage, count in (("sft", 400), ("preference", 200), ("prompts", 200)):
        (tmp_path / f"{stage}.json").write_text(json.dumps(rows_of(stage, count)))
    return tmp_path


def run(folder: Path, script: str, *options: str, **paths: str) -> list[dict[str, float]]:
    """Run a script on two ranks; return its records."""
    words = [word for name, value in paths.items() for word in (f"--{name}", str(folder / value))]
    run_ranks(run_script, 2, f"{FOLDER}/{script}.py", *words, *LLAMA, *options)
    lines = (folder / paths["save_path"] / "log" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def scores(reward: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what a reward model says of each text."""
    with torch.no_grad():
        return torch.stack([reward(torch.tensor([list(ids)]))[0, -1] for ids in texts])


def pair_accuracy(folder: Path) -> float:
    """Return in how many held-out comparisons the reward model prefers what was chosen."""
    tokenizer = make_toy_tokenizer()
    reward = load_reward_model(folder / "rm", dtype=torch.float32).eval()
    pairs = [
        encode_preference(row, tokenizer, 64)
        for row in rows_of("preference", NUM_HELD_OUT, seed=1, split="test")
    ]
    chosen, rejected = (scores(reward, [each[side].input_ids for each in pairs]) for side in (0, 1))
    return float((chosen > rejected).float().mean())


def rewards_of(folder: Path, name: str) -> torch.Tensor:
    """Return the rewards of a model's answers to the held-out prompts, drawn with seeds."""
    llm = LLM(str(folder / name), kv_memory=2**24)
    reward = load_reward_model(folder / "rm", dtype=torch.float32).eval()
    prompts = [
        encode_prompt(row, llm.tokenizer, 64)
        for row in rows_of("prompts", NUM_HELD_OUT, seed=1, split="test")
    ]
    params = [SamplingParams(max_tokens=16, seed=number) for number in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    return scores(
        reward, [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServedFolder]]:
    """Return a function that starts inference/server.py on a free port; it is ended after the test."""
    with ExitStack() as ends:

        def begin(*words: str) -> ServedFolder:
            place = tmp_path / "server"
            place.mkdir()
            with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as err:
                process = subprocess.Popen(
                    [sys.executable, str(SCRIPTS / "inference" / "server.py"), *words, "--http_port", "0"],
                    cwd=place,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            command = Command(process, place)
            ends.callback(command.end)
            return ServedFolder(command).wait_until_ready()

        yield begin


def test_a_base_model_becomes_a_served_assistant(folder: Path, serve: Callable[..., ServedFolder]) -> None:
    paths = {"dataset": "sft.json", "pretrain": "base", "save_path": "coati"}
    losses = run(folder, "train_sft", "--max_epochs", "3", "--lr", "3e-3", **paths)
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]

    paths = {"dataset": "preference.json", "pretrain": "coati", "save_path": "rm"}
    run(folder, "train_reward_model", "--max_epochs", "1", "--lr", "1e-3", **paths)
    assert pair_accuracy(folder) >= 0.9

    paths = {"prompt_dataset": "prompts.json", "pretrain": "coati", "rm_path": "rm", "save_path": "ppo"}
    sizes = ("--num_episodes", "1", "--max_timesteps", "16", "--update_timesteps", "1", "--max_epochs", "2")
    batch = ("--experience_batch_size", "16", "--train_batch_size", "16", "--max_new_tokens", "16")
    run(folder, "train_prompts", *sizes, *batch, "--lr", "1e-3", **paths)
    before, after = rewards_of(folder, "coati"), rewards_of(folder, "ppo")
    rises = after - before
    error = rises.std() / len(rises) ** 0.5
    assert rises.mean() > 3 * error, (before.mean(), after.mean(), error)

    served = serve(str(folder / "ppo"), "--quant", "8bit")
    rows = make_toy_data("copy", 8, 2, split="test")
    bodies = [{"history": [{"instruction": row["prompt"], "response": ""}], "temperature": 0} for row in rows]
    answers = [served.post("/generate", **body, max_new_tokens=16).json()["response"] for body in bodies]
    assert sum(answer.startswith("yes ") for answer in answers) >= 7, answers
    streamed = events_of(served.post("/generate/stream", **bodies[0], max_new_tokens=16).text)
    assert "".join(data for name, data in streamed if name == "generate") == answers[0]
    assert streamed[-1] == ("end", "")
    assert served.end() == 0


@pytest.mark.long
def test_the_shell_scripts_run_from_any_folder(folder: Path) -> None:
    """One after another, with the model before as PRETRAIN, and further options behind."""
    stages = (
        ("train_sft", {"PRETRAIN": "base"}, ("--max_datasets_size", "64"), "coati"),
        ("train_rm", {"PRETRAIN": "coati", "NPROC": "2"}, ("--test", "True", "--max_epochs", "1"), "rm"),
        (
            "train_prompts",
            {"PRETRAIN": "coati", "PRETRAIN_DATASET": "sft.json"},
            (
                "--num_episodes",
                "1",
                "--max_timesteps",
                "1",
                "--update_timesteps",
                "1",
                "--max_new_tokens",
                "8",
            ),
            "ppo",
        ),
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for script, variables, options, made in stages:
        done = subprocess.run(
            ["bash", str(SCRIPTS / "examples" / f"{script}.sh"), "--max_len", "64", *options],
            cwd=folder,
            env={**environment, "PATH": path_with_command(), **variables},
            capture_output=True,
            text=True,
            timeout=2 * START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the model is in {made}, its curves in {made}/log" in done.stdout
        assert (folder / made / "model.safetensors.index.json").is_file()
        assert (folder / made / "made_up.json").is_file()
