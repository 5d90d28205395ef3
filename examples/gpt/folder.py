"""Folder of a run: its files, the run that owns it, and the final results."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from build import build_model
from data import TextData
from report import METRICS_FILE, PICTURE_FILE, TENSORBOARD_FOLDER, Report
from sample import sample_text
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from colossalai.checkpoint_io import latest_training_state, load_model
from colossalai.context import Config
from colossalai.model_zoo.gpt import GPT, to_hugging_face, to_hugging_face_config

CHECKPOINT_FOLDER = "checkpoints"
SERVED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
IDENTITY_FILE = "job.json"
SAMPLE_FILE = "sample.txt"
PROMPT = "def "
SAMPLE_TOKENS = 160

# Hyper-parameters that two runs must share for one to go on where the other has stopped.
IDENTITY_KEYS = (
    *("VOCAB_SIZE", "SEQ_LEN", "HIDDEN_SIZE", "NUM_LAYERS", "NUM_HEADS", "EMBEDDING_DROPOUT", "DROPOUT"),
    *("INIT_STD", "SEED", "TOTAL_STEPS", "WARMUP_STEPS", "LEARNING_RATE", "WEIGHT_DECAY"),
)


def default_folder(source: Path | None) -> Path:
    """One folder for each text."""
    return Path("runs/gpt") if source is None else Path("runs") / f"gpt-{source.resolve().stem}"


def remove_run(folder: Path) -> None:
    """Remove the files of an earlier run from a folder, and nothing else."""
    for name in (CHECKPOINT_FOLDER, TENSORBOARD_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS_FILE, PICTURE_FILE, SAMPLE_FILE, IDENTITY_FILE, *SERVED_FILES):
        (folder / name).unlink(missing_ok=True)


def claim(folder: Path, data: TextData, config: Config, *, batch_size: int, is_new: bool) -> None:
    """Write down which training a new folder is for, or compare where it has checkpoints of one.

    Args:
        folder: The folder.
        data: The text.
        config: The hyper-parameters.
        batch_size: Sequences in an optimizer step, over all ranks.
        is_new: Whether the folder has no checkpoint.

    Raises:
        ValueError: The checkpoints are of a training with other hyper-parameters or another text.
    """
    mine = {
        "text": data.key,
        "sequences in a step": batch_size,
        **{key: config[key] for key in IDENTITY_KEYS},
    }
    if is_new:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{IDENTITY_FILE}.{os.getpid()}.tmp"
        draft.write_text(json.dumps(mine, indent=2))
        draft.replace(folder / IDENTITY_FILE)
    theirs: dict[str, Any] = json.loads((folder / IDENTITY_FILE).read_text())
    changed = [
        f"{key} was {theirs.get(key)}, is {value}" for key, value in mine.items() if theirs.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"{folder} holds the checkpoint of another training ({'; '.join(changed)}): start over with "
            "--fresh (make train FRESH=1), or choose another folder with --output"
        )


def write_results(folder: Path, data: TextData, config: Config, report: Report, *, loss: float) -> None:
    """Show the results, and where they are; the job has ended, and the process that reports goes on."""
    if not report.is_active:
        return
    checkpoint = latest_training_state(folder / CHECKPOINT_FOLDER)
    assert checkpoint is not None, "a training ends with a checkpoint"
    model = build_model(config)  # in one process, however it was spread in training
    load_model(model, checkpoint / "model")
    write_served(folder, model, data.tokenizer)
    sample = sample_text(
        model, data.tokenizer, prompt=PROMPT, num_tokens=SAMPLE_TOKENS, context=config.SEQ_LEN
    )
    (folder / SAMPLE_FILE).write_text(sample)
    report.draw(title=f"GPT after {config.TOTAL_STEPS} steps")
    report.say(f"\n{sample}\n")
    # The best model that ignores the context has the unigram entropy for a loss.
    tokens_per_byte = data.validation.size / data.validation_bytes
    for name, nats in (("validation loss", loss), ("unigram entropy", data.unigram_entropy)):
        bits = nats / math.log(2) * tokens_per_byte
        report.say(
            f"{name}  {nats:6.3f} nats per token  perplexity {math.exp(nats):7.1f}  {bits:.3f} bits per byte"
        )
    report.say(f"in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    report.say(f"colossalai serve {folder} answers requests with it")


def write_served(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Write the model next to its checkpoints for `transformers` and `colossalai serve`: as a GPT-2."""
    disable_progress_bar()  # one file, written in no time
    theirs = GPT2LMHeadModel(to_hugging_face_config(model.config))
    theirs.load_state_dict(to_hugging_face(model.state_dict(), model.config))
    theirs.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
