"""Parts of a training: data, model, optimizer, and the booster that joins them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from a3m import A3MFamilies, find_files
from alignment import Alignment, collate
from data import SyntheticFamilies
from model import ContactModel
from torch import nn
from torch.utils.data import Dataset

from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Config
from colossalai.nn.lr_scheduler import LinearWarmupLR


@dataclass(frozen=True, kw_only=True)
class Training:
    """Components of a training.

    Attributes:
        booster: The booster.
        model: The boosted model.
        optimizer: Its optimizer.
        scheduler: The learning rate schedule.
        train_loader: Batches to train on, of this rank.
        evaluation_loader: Batches to evaluate on, of this rank.
        batch_size: Families of a step of all ranks.
        evaluate_every: Number of steps.
    """

    booster: Booster
    model: nn.Module
    optimizer: Any
    scheduler: LinearWarmupLR
    train_loader: Any
    evaluation_loader: Any
    batch_size: int
    evaluate_every: int

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole training."""
        return len(self.train_loader)


def build_training(config: Config, data: Path | None) -> Training:
    """Build a training at its first step, after the launch.

    Raises:
        FileNotFoundError: `data` has no alignments with structures.
        ValueError: A value of the config is out of range.
    """
    plugin = HybridParallelPlugin(
        tp_size=dist.get_world_size() if config.DAP_SIZE == "all" else config.DAP_SIZE,
        tp_mode="dap",
        zero_stage=config.ZERO_STAGE,
        precision=config.PRECISION,
        max_norm=config.MAX_NORM,
        recompute=config.RECOMPUTE_BLOCKS,
    )
    booster = Booster(plugin=plugin)  # before the model, whose layers use the tensor mode
    num_replicas = booster.mesh.axis_size("dp")
    check(config, num_replicas)
    options: dict[str, Any] = {
        "batch_size": config.BATCH_SIZE // num_replicas,
        "collate_fn": partial(collate, num_sequences=config.NUM_SEQUENCES),
    }
    train_families, evaluation_families = datasets(config, data)
    train_loader = plugin.prepare_dataloader(train_families, drop_last=True, **options)
    evaluation_loader = plugin.prepare_dataloader(evaluation_families, **options)
    torch.manual_seed(config.SEED)  # the same model on all ranks
    model = ContactModel(
        c_m=config.C_M,
        c_z=config.C_Z,
        c_e=config.C_E,
        num_clusters=config.CLUSTERS,
        num_blocks=config.BLOCKS,
        num_extra_blocks=config.EXTRA_BLOCKS,
        num_recycles=config.RECYCLES,
        main=config.MAIN_OPTIONS,
        extra=config.EXTRA_OPTIONS,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config.LEARNING_RATE)
    scheduler = LinearWarmupLR(
        optimizer,
        total_steps=len(train_loader),
        warmup_steps=min(config.WARMUP_STEPS, len(train_loader)),
    )
    boosted, boosted_optimizer, *_ = booster.boost(model, optimizer)
    return Training(
        booster=booster,
        model=boosted,
        optimizer=boosted_optimizer,
        scheduler=scheduler,
        train_loader=train_loader,
        evaluation_loader=evaluation_loader,
        batch_size=config.BATCH_SIZE,
        evaluate_every=-(-len(train_loader) // config.EVALUATIONS),
    )


def check(config: Config, num_replicas: int) -> None:
    """Refuse values that do not fit each other."""
    if config.BATCH_SIZE % num_replicas:
        raise ValueError(
            f"BATCH_SIZE is {config.BATCH_SIZE}; {num_replicas} data-parallel ranks need a multiple of it"
        )
    if config.NUM_SEQUENCES <= config.CLUSTERS:
        raise ValueError(
            f"NUM_SEQUENCES is {config.NUM_SEQUENCES}; it must exceed CLUSTERS ({config.CLUSTERS}): the "
            "extra stack takes the further sequences"
        )
    if config.TRAINING_FAMILIES < config.BATCH_SIZE:
        raise ValueError(
            f"TRAINING_FAMILIES is {config.TRAINING_FAMILIES}; a step has BATCH_SIZE ({config.BATCH_SIZE})"
        )


def datasets(config: Config, data: Path | None) -> tuple[Dataset[Alignment], Dataset[Alignment]]:
    """Return the training and the evaluation families: drawn, or the last tenth of the files to evaluate."""
    length, num_evaluated = config.TRAINING_FAMILIES, config.EVALUATION_FAMILIES
    if data is not None:
        options: dict[str, Any] = {
            "seed": config.SEED, "num_sequences": config.NUM_SEQUENCES, "crop": config.CROP
        }  # fmt: skip
        files = find_files(data)
        begin = min(len(files) - len(files) // 10, len(files) - 1)
        held_out = files[begin:]
        return (
            A3MFamilies(files[:begin], length, masked=config.MASKED, **options),
            A3MFamilies(held_out, min(num_evaluated, len(held_out)), **options),
        )
    options = {
        "seed": config.SEED,
        "lengths": config.LENGTHS,
        "num_sequences": config.NUM_SEQUENCES,
        "coupling": config.COUPLING,
        "mutated": config.MUTATED,
    }
    return (
        SyntheticFamilies(length, masked=config.MASKED, **options),
        SyntheticFamilies(num_evaluated, begin=length, **options),
    )
