"""`colossalai plan`: models of folders and functions, and options that are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from colossalai.cli import main

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        **{"model_type": "bert", "architectures": ["BertForMaskedLM"], "intermediate_size": 16},
        **{**TINY, "max_position_embeddings": 8},
    },
    "bloom": {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 1, "n_head": 2}
    | {"hidden_size": 16, "vocab_size": 32},
    "t5": {
        **{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 1, "d_ff": 16},
        **{"d_model": 16, "d_kv": 8, "num_heads": 2, "vocab_size": 32, "decoder_start_token_id": 0},
    },
    "vit": {
        **{"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8},
        **{"patch_size": 4, "intermediate_size": 16, **TINY},
    },
    "whisper": {
        **{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 32},
        **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
        **{"decoder_attention_heads": 2, "pad_token_id": 0},
    },
    "heads": {"model_type": "bert", **TINY, "num_attention_heads": 3},
}
FUNCTIONS = """
import torch
from torch import nn
def outline(): return nn.Linear(4, 4), {"input": torch.zeros(8, 4)}
def alone(): return nn.Linear(4, 4)
def nothing(): return None
def listed(): return nn.Linear(4, 4), [torch.zeros(8, 4)]
def three(): return nn.Linear(4, 4), {}, 3
def sized(width): return nn.Linear(width, width)
def broken(): return torch.no_such_layer(4)
number = 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan_functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan_broken.py").write_text("raise RuntimeError('not today')\n")


def said_by(*words: str) -> tuple[int, str]:
    """Return the exit status of `colossalai plan`, and what it printed with the lines joined."""
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bert --seq 9", "--seq 9: BertForMaskedLM has max_position_embeddings=8; give at most 8"),
        ("bloom", "the configuration of BloomForCausalLM has no longest sequence: give --seq"),
        ("vit --seq 8", "--seq 8: ViTForImageClassification takes images, not sequences; leave --seq out"),
        ("vit-lite --seq 8", "--seq 8: vit-lite takes images, not sequences; leave --seq out"),
        ("whisper", "the forward of WhisperForConditionalGeneration takes input_features, whose shape"),
        ("heads", "'heads/config.json' is not the configuration of a model of transformers: The hidden size"),
        ("empty", "there is no file 'empty/config.json': give a folder with the config.json of a model"),
        ("no/config.json", "there is no file 'no/config.json'"),
        ("plan_functions:outline --batch 16", "--batch 16: plan_functions:outline returns the arguments"),
        ("plan_functions:outline --seq 16", "--seq 16: plan_functions:outline returns the arguments of the"),
        ("plan_functions:alone", "plan_functions:alone returns a model alone: give --seq"),
        ("plan_functions:nothing", "plan_functions:nothing returns a NoneType; it must return a torch.nn"),
        ("plan_functions:listed", "plan_functions:listed returns a tuple of Linear, list; it must return"),
        ("plan_functions:three", "plan_functions:three returns a tuple of Linear, dict, int; it must return"),
        ("plan_functions:sized", "is called without arguments: missing a required argument: 'width'"),
        ("plan_functions:number", "module 'plan_functions' has no function 'number'"),
        ("plan_functions:absent", "module 'plan_functions' has no 'absent'"),
        ("plan_functions:broken", "plan_functions:broken fails: AttributeError: module 'torch' has no attr"),
        ("plan_broken:model", "plan_broken cannot be imported: RuntimeError: not today"),
        ("plan_nowhere:model", "there is no plan_nowhere:model here: No module named 'plan_nowhere'"),
        (":model", "there is no :model here: a full name of a module is needed"),
        ("plan_functions:outline --output no/plan.json", "there is no folder 'no' to write 'plan.json' into"),
        (
            "plan_functions:outline --output /dev/full",
            "the plan cannot be written to '/dev/full': No space left",
        ),
        ("plan_functions:outline --budget 4XB", "--budget 4XB: give bytes, such as 268435456"),
        ("--diff a b --seq 3", "--diff compares two files of plans; leave --world-size, --seq out"),
        ("bert --diff a b", "--diff compares two files of plans; leave MODEL, --world-size out"),
    ],
)
def test_a_mistake_is_named(words: str, said: str) -> None:
    status, printed = said_by(*words.split(), "--world-size", "2")
    assert said in printed
    assert status == 2


@pytest.mark.unit
@pytest.mark.parametrize("words", ["bloom --seq 8", "t5 --seq 8", "bert/config.json --batch 4"])
def test_models_of_configurations(words: str) -> None:
    status, printed = said_by(*words.split(), "--world-size", "2")
    assert status == 0, printed
    assert "A step is predicted to take" in printed


@pytest.mark.unit
def test_lines_fit_a_terminal() -> None:
    """80 columns, whatever is second."""
    words = ["plan", "bert", "--world-size", "8", "--batch", "32", "--precision", "bf16_master"]
    printed = CliRunner().invoke(main, words).output
    assert [line for line in printed.splitlines() if len(line) >= 80] == []
