"""Parts of a training: model, optimizer, loaders, and the engine that has them."""

from dataclasses import dataclass
from typing import Any

import torch
from data import TextData, TokenWindows
from torch import Tensor
from torch.utils.data import Dataset, Subset

import colossalai
from colossalai.context import Config, ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.utils import get_dataloader


@dataclass(kw_only=True)
class Training:
    """Components of a training.

    Attributes:
        engine: The engine.
        train_loader: Batches to train on.
        probe_loader: A fixed part of the validation text, for validation during the training.
        validation_loader: The whole validation text.
        lr_scheduler: Steps with the optimizer.
    """

    engine: Engine
    train_loader: Any
    probe_loader: Any
    validation_loader: Any
    lr_scheduler: Any


def build_training(data: TextData, config: Config) -> Training:
    """Build a training for the launched job, at its first step.

    Raises:
        ValueError: The text is too short.
    """
    model = build_model(config)
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
    return Training(
        engine=engine,
        train_loader=train_loader,
        probe_loader=probe_loader,
        validation_loader=get_dataloader(spread(held_out, len(held_out)), batch_size=config.BATCH_SIZE),
        lr_scheduler=lr_scheduler,
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
