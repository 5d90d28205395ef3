"""Common parts of the two examples with a config: the arguments, the launch, and an engine with its data."""

import argparse
from pathlib import Path
from typing import Any

import torch
from data import NUM_CLASSES, load_images
from model import LIBRARIES, build_model
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_dataloader


def parse_args(description: str | None) -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = description, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(config=str(Path(__file__).with_name("config.py")))
    parser.add_argument("--library", choices=LIBRARIES, default="model_zoo", help="library of the network")
    return parser.parse_args()


def build_engine(args: argparse.Namespace) -> tuple[Engine, Any, Any, Any]:
    """Launch, and return engine, training loader, test loader and learning rate scheduler (by the epoch)."""
    colossalai.launch_from_torch(args.config, backend=args.backend)
    config = gpc.config
    train_dataset, test_dataset = load_images()
    train_dataloader = get_dataloader(
        train_dataset, shuffle=True, batch_size=config.BATCH_SIZE, drop_last=True
    )
    test_dataloader = get_dataloader(test_dataset, batch_size=config.BATCH_SIZE)
    model = build_model(num_classes=NUM_CLASSES, library=args.library)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.LEARNING_RATE, momentum=0.9, weight_decay=config.WEIGHT_DECAY
    )
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=config.NUM_EPOCHS)
    return colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), train_dataloader, test_dataloader, lr_scheduler
    )
