"""The small parts of the GPT example: records of an earlier run, sampled text, the default config."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from colossalai.context import Config
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.examples.scripts import EXAMPLES, example_module

pytestmark = pytest.mark.unit

progress = example_module("gpt/progress.py")
report = example_module("gpt/report.py")
sample = example_module("gpt/sample.py")


def test_records_after_the_checkpoint_and_a_cut_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "validation_loss": 3}\n{"step": 3}\n{"ste')
    kept = report.keep_metrics(path, last_step=2)
    assert kept == [{"step": 1}, {"step": 2}, {"step": 2, "validation_loss": 3}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_has_an_estimate_and_pictures_take_a_bounded_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, drawn = Clock(), []

    def draw(records: list[dict[str, float]], path: Path, **options: object) -> None:
        clock.now += 1.0
        drawn.append((records[-1]["step"], path.name))

    monkeypatch.setitem(sys.modules, "plot", SimpleNamespace(draw_losses=draw))
    mine = report.FileReport(tmp_path, first_step=10, total_steps=410, unigram_entropy=1.0, clock=clock)
    for step in range(11, 411):
        clock.now += 1.0
        mine.train(step, loss=1.0, lr=0.1, num_tokens=8)
    mine.close()
    assert capsys.readouterr().out.splitlines()[0] == "step 11/410  loss 1.000  8 tokens/s  6:39 left"
    assert drawn == [(step, "loss.png") for step in (30, 130, 230, 330)]


def test_the_bar_has_all_figures_at_80_columns() -> None:
    bar = progress.Bar(0, 1800)
    bar.advance(1, loss=7.634, speed=151234.0, seconds_left=3725.0)
    bar.close()
    screen = io.StringIO()
    Console(width=80, file=screen).print(bar._progress.get_renderable())
    (line,) = screen.getvalue().splitlines()
    assert len(line) <= 80
    assert line.endswith("1/1800 loss 7.634  151,234 tokens/s  1:02:05 left")


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
