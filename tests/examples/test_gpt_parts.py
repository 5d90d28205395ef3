"""The small parts of the GPT example: records of an earlier run, sampled text, the default config."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from colossalai.context import Config
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.examples.scripts import EXAMPLES, example_module

pytestmark = pytest.mark.unit

report = example_module("gpt/report.py")
sample = example_module("gpt/sample.py")


def test_records_after_the_checkpoint_and_a_cut_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "validation_loss": 3}\n{"step": 3}\n{"ste')
    kept = report.keep_metrics(path, last_step=2)
    assert kept == [{"step": 1}, {"step": 2}, {"step": 2, "validation_loss": 3}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


def test_sampling_continues_the_prompt_and_leaves_the_training_alone() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shape = GPTConfig(
        vocab_size=256, hidden_size=8, num_layers=1, num_attention_heads=1, max_position_embeddings=8
    )
    model = GPT(shape).train()
    before = torch.get_rng_state()
    texts = {
        sample.sample_text(model, tokenizer, prompt="abc", num_tokens=20, context=8, seed=seed)
        for seed in (0, 0, 1)
    }
    assert all(text.startswith("abc") and len(text) > 3 for text in texts)
    assert len(texts) == 2
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_config_builds_about_five_million_parameters() -> None:
    config = Config.from_file(EXAMPLES / "gpt" / "config.py")
    with torch.device("meta"):
        model = GPT(
            GPTConfig(
                vocab_size=config.VOCAB_SIZE,
                max_position_embeddings=config.SEQ_LEN,
                hidden_size=config.HIDDEN_SIZE,
                num_layers=config.NUM_LAYERS,
                num_attention_heads=config.NUM_HEADS,
            )
        )
    assert 4.5e6 < sum(param.numel() for param in model.parameters()) < 6e6
    assert config.EMBEDDING_DROPOUT > 0
