"""What we save opens with `from_pretrained`, and what `save_pretrained` writes opens with `load_model`."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.checkpoint_io import load_model, save_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=53, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


TOKENS = torch.arange(6)[None]


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_sharded_folder_opens(use_safetensors: bool, tmp_path: Path) -> None:
    model = gpt2(1)
    save_model(model, tmp_path, shard=True, size_per_shard=0.005, use_safetensors=use_safetensors)
    assert len(list(tmp_path.glob("*-of-*"))) > 2
    opened, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.lm_head.weight is opened.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(opened.eval()(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("max_shard_size", ["5GB", "5KB"])
def test_a_folder_of_transformers_loads(max_shard_size: str, tmp_path: Path) -> None:
    model, other = gpt2(1), gpt2(2)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    load_model(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
