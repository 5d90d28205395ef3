"""Options of the training scripts that go on from another run, or name a part of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colossalai.chat.data import make_toy_data
from tests.chat.scripts.test_scripts import FOLDER
from tests.chat.tiny import causal, tokenizer
from tests.examples.scripts import run_script
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its tokenizer."""
    made = tmp_path_factory.mktemp("tiny")
    causal().float().save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("train_sft", ("--model_path", "{reward}"), "it has to be a language model, and is a reward model"),
        (
            "train_reward_model",
            ("--model_path", "{folder}"),
            "it has to be a reward model, and is a language",
        ),
        ("train_sft", ("--model_path", "{wide}"), "has hidden_size 64, and --pretrain .* has 32"),
        ("train_sft", ("--subset", "part"), r"rows\.json is a file: leave it out"),
        (
            "train_reward_model",
            ("--test", "True", "--max_datasets_size", "8"),
            "leave --max_datasets_size out",
        ),
        ("train_prompts", ("--rm_path", "{reward}", "--rm_model", "opt"), "--rm_model opt, and .* of llama"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    script: str, options: tuple[str, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    made = {name: tmp_path / name for name in ("reward", "wide")} | {"folder": folder}
    for name in ("reward", "wide"):
        config = json.loads((folder / "config.json").read_text())
        config |= (
            {"architectures": ["LlamaForSequenceClassification"]} if name == "reward" else {"hidden_size": 64}
        )
        made[name].mkdir()
        (made[name] / "config.json").write_text(json.dumps(config))
    stage: Any = "sft" if script == "train_sft" else "preference"
    rows = make_toy_data("copy", 8, 0, stage="prompts" if script == "train_prompts" else stage)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    dataset = "--prompt_dataset" if script == "train_prompts" else "--dataset"
    words = ("--model", "auto", "--pretrain", str(folder), dataset, str(tmp_path / "rows.json"))
    given = tuple(word.format(**made) for word in options)
    with pytest.raises(RanksError, match=said):
        run_ranks(
            run_script, 1, f"{FOLDER}/{script}.py", *words, *given, "--save_path", str(tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("script", ["train_sft", "train_reward_model"])
def test_a_run_goes_on_from_the_weights_of_another(script: str, folder: Path, tmp_path: Path) -> None:
    stage: Any = "sft" if script == "train_sft" else "preference"
    (tmp_path / "rows.json").write_text(json.dumps(make_toy_data("copy", 64, 0, stage=stage)))
    words = ("--model", "auto", "--pretrain", str(folder), "--dataset", str(tmp_path / "rows.json"))
    given = ("--strategy", "naive", "--max_epochs", "1", "--max_len", "64")
    further = {
        "first": ("--lr", "3e-3"),
        "second": ("--lr", "0", "--model_path", str(tmp_path / "first")),  # it stays as it was read
    }
    for name, options in further.items():
        out = ("--save_path", str(tmp_path / name))
        run_ranks(run_script, 1, f"{FOLDER}/{script}.py", *words, *given, *options, *out)
    base, first, second = (values_of(each) for each in (folder, *(tmp_path / name for name in further)))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], base[name]) for name in first.keys() & base.keys())


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters in a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
