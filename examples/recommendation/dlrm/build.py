"""Parts of a training: data, model, the two optimizers, and the booster that joins them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from criteo import CriteoClicks
from data import Clicks, SyntheticClicks
from embeddings import Tables
from model import DLRM
from torch import nn
from torch.utils.data import Dataset, Subset

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.context import Config
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.optimizer import RowWiseAdagrad

PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
}
ROWS_OPTIMIZERS: dict[str, Any] = {"RowWiseAdagrad": RowWiseAdagrad, "SparseAdam": torch.optim.SparseAdam}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Components of a training.

    Attributes:
        booster: The booster.
        model: The boosted model.
        tables: The tables of the model.
        optimizers: Boosted, of the dense layers and of the rows.
        schedulers: Their learning rate schedules.
        train_loader: Batches to train on, of this rank.
        evaluation_loader: Batches to evaluate on, of this rank.
        batch_size: Samples of a step of all ranks.
        evaluate_every: Number of steps.
    """

    booster: Booster
    model: nn.Module
    tables: Tables
    optimizers: Sequence[Any]
    schedulers: Sequence[LinearWarmupLR]
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
        FileNotFoundError: `data` does not exist.
        ValueError: A name of the config is unknown, or the data does not fit it.
    """
    torch.manual_seed(config.SEED)  # the same model on all ranks
    plugin = PLUGINS[config.PLUGIN]()
    booster = Booster(plugin=plugin)
    num_ranks = booster.mesh.axis_size("dp")
    train_clicks, evaluation_clicks = datasets(config, data)
    options = {"batch_size": config.BATCH_SIZE // num_ranks, "collate_fn": Clicks._make}
    train_loader = plugin.prepare_dataloader(train_clicks, drop_last=True, **options)
    evaluation_loader = plugin.prepare_dataloader(evaluation_clicks, **options)
    # A batch has many of the rows of a small table, and must fit.
    least = config.LEAST_CACHED_ROWS
    cached_rows = [max(round(size * config.CACHE_RATIO), min(size, least)) for size in config.TABLE_SIZES]
    tables = Tables(config.TABLES, config.TABLE_SIZES, dim=config.EMBEDDING_DIM, cached_rows=cached_rows)
    model = DLRM(
        tables, num_dense=config.NUM_DENSE, bottom_sizes=config.BOTTOM_SIZES, top_sizes=config.TOP_SIZES
    )
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    dense = torch.optim.AdamW(layers, lr=config.DENSE_LEARNING_RATE)
    rows = ROWS_OPTIMIZERS[config.ROWS_OPTIMIZER]([*tables.parameters()], lr=config.ROWS_LEARNING_RATE)
    steps = {"total_steps": len(train_loader), "warmup_steps": min(config.WARMUP_STEPS, len(train_loader))}
    schedulers = [LinearWarmupLR(optimizer, **steps) for optimizer in (dense, rows)]
    boosted, optimizers, *_ = booster.boost(model, [dense, rows])
    return Training(
        booster=booster,
        model=boosted,
        tables=tables,
        optimizers=optimizers,
        schedulers=schedulers,
        train_loader=train_loader,
        evaluation_loader=evaluation_loader,
        batch_size=options["batch_size"] * num_ranks,
        evaluate_every=-(-len(train_loader) // config.EVALUATIONS),
    )


def datasets(config: Config, data: Path | None) -> tuple[Dataset[Clicks], Dataset[Clicks]]:
    """Return the training and the evaluation samples: drawn, or the last tenth of a file for evaluation."""
    if data is not None:
        clicks = CriteoClicks(data, config.TABLE_SIZES)
        begin = len(clicks) - len(clicks) // 10
        return Subset(clicks, range(begin)), Subset(clicks, range(begin, len(clicks)))
    options = {
        "num_dense": config.NUM_DENSE,
        "seed": config.SEED,
        "exponent": config.EXPONENT,
        "interactions": config.INTERACTIONS,
    }
    train = SyntheticClicks(config.TABLE_SIZES, length=config.TRAINING_SAMPLES, **options)
    begin = config.TRAINING_SAMPLES
    return train, SyntheticClicks(
        config.TABLE_SIZES, length=config.EVALUATION_SAMPLES, begin=begin, **options
    )
