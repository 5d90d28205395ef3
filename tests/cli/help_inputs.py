"""Small files and folders under the names that the examples of `colossalai ... --help` read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from colossalai.auto_parallel import make_plan
from colossalai.checkpoint_io import TrainingState, save_model, save_training_state
from tests.inference.adapters.made import save_adapter
from tests.serving.served_folder import save_tiny

KEY = "swordfish-on-a-stick-81"
OPT_CONFIG = """\
model_class = "path/to/opt-125m"
server_host = "127.0.0.1"
"""
RESNET = """\
import torch

def make_resnet():
    return torch.nn.Conv2d(3, 8, 3), {"input": torch.zeros(4, 3, 8, 8, device="meta")}
"""
WINDOW = 4096  # the longest sequence of the examples


def _text(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(text)


def _model(*left_out: str) -> nn.Module:
    torch.manual_seed(0)
    modules = {"first": nn.Linear(4, 8), "second": nn.Linear(8, 4)}
    return nn.ModuleDict({name: module for name, module in modules.items() if name not in left_out})


def _weights(*left_out: str, **options: Any) -> Callable[[Path], Any]:
    return lambda file: save_model(_model(*left_out), file, **options)


def _state(folder: Path) -> None:
    model = _model()
    state = TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters()))
    assert save_training_state(folder.parent, state, step=120) == folder


def _dcp(folder: Path) -> None:
    dcp.save({"model": _model().state_dict()}, checkpoint_id=folder, no_dist=True)


def _llama(folder: Path) -> None:
    save_tiny(folder, max_position_embeddings=WINDOW, initializer_range=0.02)


def _config(file: Path) -> None:
    folder = file.with_name("of_config")
    _llama(folder)
    shutil.copy(folder / "config.json", file)


def _adapter(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    _llama(folder.with_name("base"))
    model = AutoModelForCausalLM.from_pretrained(folder.with_name("base"))
    save_adapter(folder, model, seed=1, r=4, lora_alpha=8, target_modules=["q_proj"])


def _plan(file: Path) -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    make_plan(model, {"input": x}, world_size=2).save(file)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "train.py": _text(""),
    "package/train.py": _text(""),
    "config.py": _text("seed = 1\n"),
    "config.yaml": _text("seed: 1\n"),
    "hosts": _text("host1\nhost2\nhost3\n"),
    "key.txt": _text(f"{KEY}\n"),
    "mine.csv": _text("0F0,0B0\n"),
    "mymodels.py": _text(RESNET),
    "opt_config.py": _text(OPT_CONFIG),
    "path/to/config.json": _config,
    "path/to/model": _llama,
    "path/to/opt-125m": lambda folder: save_tiny(folder, family="OPT"),
    "adapters/sql": _adapter,
    "adapters/chat": _adapter,
    "plan.json": _plan,
    "other.json": _plan,
    "checkpoints/step-00000120": _state,
    "my-gpt2": _weights(shard=True, use_safetensors=True),
    "torch-dcp-folder": _dcp,
    "model.safetensors": _weights(use_safetensors=True),
    "stage0.pt": _weights("second"),
    "stage1.pt": _weights("first"),
    "one.pt": _weights(),
    "other.pt": _weights(),
}
# Words that name files in another way, and files that name others.
_ALSO = {"mymodels:make_resnet": "mymodels.py", "package.train": "package/train.py"}
_ALSO |= {"opt_config.py": "path/to/opt-125m"}
_WRITTEN_BY = ("--output", "--json", "--plot", "--trace", ">")


def make_inputs(words: list[str], folder: Path) -> None:
    """Make the files that an example names, but for those which it writes."""
    read = words[:-1] if words[:2] == ["checkpoint", "merge"] else list(words)
    if words[:2] == ["checkpoint", "convert"]:
        del read[3]
    for place, word in enumerate(read):
        if place > 0 and read[place - 1] in _WRITTEN_BY:
            continue
        name = word.rpartition("=")[2]  # of NAME=DIR
        for each in (name, _ALSO.get(name)):
            if each in MAKERS and not (folder / each).exists():
                (folder / each).parent.mkdir(parents=True, exist_ok=True)
                MAKERS[each](folder / each)
