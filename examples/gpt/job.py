"""What a training works with: model, optimizer, loaders, engine, and all that a checkpoint holds."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from colossalai.cluster.dist_coordinator import priority_execution
from data import TextData, TokenWindows
from torch import Tensor
from torch.utils.data import Dataset, Subset

import colossalai
from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_model,
    load_training_state,
    save_training_state,
)
from colossalai.context import Config, ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.tensor import spec_of
from colossalai.utils import get_dataloader

CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINTS_KEPT = 2
IDENTITY_FILE = "job.json"

# Hyper-parameters that two runs must share for one to go on where the other has stopped.
IDENTITY_KEYS = (
    *("VOCAB_SIZE", "SEQ_LEN", "HIDDEN_SIZE", "NUM_LAYERS", "NUM_HEADS", "EMBEDDING_DROPOUT", "DROPOUT"),
    *("INIT_STD", "SEED", "TOTAL_STEPS", "WARMUP_STEPS", "LEARNING_RATE", "WEIGHT_DECAY"),
)


@dataclass(kw_only=True)
class Job:
    """A training between two steps.

    Attributes:
        engine: The engine.
        train_loader: Batches to train on.
        probe_loader: A fixed part of the validation text, for validation on the way.
        validation_loader: The whole validation text.
        lr_scheduler: Steps with the optimizer.
        state: All that a checkpoint holds.
        folder: Where the run leaves its files.
        num_params: Number of parameters of the whole model.
        tokens_in_step: Number of tokens in an optimizer step, over all ranks.
        step: Optimizer steps made.
    """

    engine: Engine
    train_loader: Any
    probe_loader: Any
    validation_loader: Any
    lr_scheduler: Any
    state: TrainingState
    folder: Path
    num_params: int
    tokens_in_step: int
    step: int = 0

    def save(self) -> None:
        """Write a checkpoint; until it is complete, the one before counts."""
        save_training_state(
            self.folder / CHECKPOINT_FOLDER, self.state, step=self.step, keep_last=CHECKPOINTS_KEPT
        )

    def resume(self, data: TextData) -> None:
        """Go back to the newest complete checkpoint, if there is one.

        Raises:
            ValueError: The checkpoint is of a training with other hyper-parameters or another text.
        """
        checkpoint = latest_training_state(self.folder / CHECKPOINT_FOLDER)
        mine = identity(data, gpc.config)
        with priority_execution():  # the others find what rank 0 has written, or is there already
            if checkpoint is None:
                write_identity(self.folder, mine)
            check_identity(self.folder, mine)
        if checkpoint is not None:
            self.step = load_training_state(checkpoint, self.state)["step"]


def build_job(data: TextData, folder: Path) -> Job:
    """Build a training from the config of the launched job, at its first step.

    Raises:
        ValueError: The text is too short.
    """
    config = gpc.config
    model = build_model(config)
    num_params = count_parameters(model)
    optimizer = build_optimizer(model, config)
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer, total_steps=config.TOTAL_STEPS, warmup_steps=config.WARMUP_STEPS
    )
    windows = TokenWindows(data.train, length=config.SEQ_LEN)
    held_out = TokenWindows(data.validation, length=config.SEQ_LEN)
    train_loader = get_dataloader(
        windows, shuffle=True, seed=config.SEED, batch_size=config.BATCH_SIZE, drop_last=True
    )
    if len(train_loader) == 0:
        raise ValueError(
            f"{len(windows)} sequences of text do not fill a batch on every rank: bring more text, or lower "
            f"BATCH_SIZE={config.BATCH_SIZE}"
        )
    engine, train_loader, probe_loader, lr_scheduler = colossalai.initialize(
        model,
        optimizer,
        GPTLMLoss(with_count=True),  # right also for texts with labels of -100
        train_loader,
        get_dataloader(spread(held_out, config.VALIDATION_WINDOWS), batch_size=config.BATCH_SIZE),
        lr_scheduler,
    )
    state = TrainingState(
        model=engine.model.unwrap(),
        optimizer=engine.optimizer,
        param_names=engine.optimizer.param_names,
        lr_scheduler=lr_scheduler,
        dataloader=train_loader,
        scaler=engine.optimizer.scaler,
    )
    return Job(
        engine=engine,
        train_loader=train_loader,
        probe_loader=probe_loader,
        validation_loader=get_dataloader(spread(held_out, len(held_out)), batch_size=config.BATCH_SIZE),
        lr_scheduler=lr_scheduler,
        state=state,
        folder=folder,
        num_params=num_params,
        tokens_in_step=global_batch_size(config) * config.SEQ_LEN,
    )


def build_model(config: Config) -> GPT:
    return GPT(
        GPTConfig(
            vocab_size=config.VOCAB_SIZE,
            max_position_embeddings=config.SEQ_LEN,
            hidden_size=config.HIDDEN_SIZE,
            num_layers=config.NUM_LAYERS,
            num_attention_heads=config.NUM_HEADS,
            embedding_dropout=config.EMBEDDING_DROPOUT,
            dropout=config.DROPOUT,
            attention_dropout=config.DROPOUT,
            init_std=config.INIT_STD,
        )
    )


def count_parameters(model: GPT) -> int:
    """Count the parameters of a whole model, of which a tensor-parallel rank may hold slices."""
    specs = [(param, spec_of(param)) for param in model.parameters()]
    return sum(math.prod(spec.whole_shape) if spec else param.numel() for param, spec in specs)


def trained_model(folder: Path, config: Config) -> GPT:
    """Return the model of the newest checkpoint in one process, however it was spread in training."""
    checkpoint = latest_training_state(folder / CHECKPOINT_FOLDER)
    assert checkpoint is not None, "a training ends with a checkpoint"
    model = build_model(config)
    load_model(model, checkpoint / "model")
    return model


def build_optimizer(model: GPT, config: Config) -> torch.optim.Optimizer:
    """AdamW; biases and norms do not decay."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.LEARNING_RATE, betas=config.BETAS, fused=True)


def spread(windows: TokenWindows, count: int) -> Dataset[tuple[Tensor, Tensor]]:
    """Take about `count` windows at even distances: as many for each data-parallel rank, none twice."""
    num_replicas = gpc.get_world_size(ParallelMode.DATA)
    count = min(count, len(windows))
    count = max(count - count % num_replicas, 1)
    return Subset(windows, [index * len(windows) // count for index in range(count)])


def global_batch_size(config: Config) -> int:
    """Sequences in an optimizer step, over all ranks."""
    accumulation_steps = config.get("gradient_accumulation") or 1
    return config.BATCH_SIZE * accumulation_steps * gpc.get_world_size(ParallelMode.DATA)


def identity(data: TextData, config: Config) -> dict[str, Any]:
    """Say what makes this training this training."""
    values = {key: config[key] for key in IDENTITY_KEYS}
    return {"text": data.key, "sequences in a step": global_batch_size(config), **values}


def write_identity(folder: Path, mine: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{IDENTITY_FILE}.{os.getpid()}.tmp"
    draft.write_text(json.dumps(mine, indent=2))
    draft.replace(folder / IDENTITY_FILE)


def check_identity(folder: Path, mine: dict[str, Any]) -> None:
    theirs = json.loads((folder / IDENTITY_FILE).read_text())
    changed = [
        f"{key} was {theirs.get(key)}, is {value}" for key, value in mine.items() if theirs.get(key) != value
    ]
    if changed:
        raise ValueError(
            f"{folder} holds the checkpoint of another training ({'; '.join(changed)}): start over with "
            "--fresh (make train FRESH=1), or choose another folder with --output"
        )
