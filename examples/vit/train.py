r"""Train a vision transformer on digits, with the parallel methods of a config.

Examples:
    colossalai run --nproc_per_node 2 examples/vit/train.py \
      --config examples/vit/configs/data.py
    colossalai run --nproc_per_node 2 examples/vit/train.py \
      --config examples/vit/configs/pipeline.py
    colossalai run --nproc_per_node 4 examples/vit/train.py \
      --config examples/vit/configs/hybrid.py
"""

import argparse
import sys
from pathlib import Path

import torch

import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.model_zoo.vit import ViT, ViTConfig
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import get_dataloader

sys.path.append(str(Path(__file__).parent.parent / "images"))
from data import GOAL, NUM_CLASSES, load_images


def main() -> None:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(config=str(Path(__file__).with_name("configs") / "data.py"))
    args = parser.parse_args()
    colossalai.launch_from_torch(args.config, backend=args.backend)
    config = gpc.config
    train_dataset, test_dataset = load_images()
    train_dataloader = get_dataloader(
        train_dataset, shuffle=True, batch_size=config.BATCH_SIZE, drop_last=True
    )
    test_dataloader = get_dataloader(test_dataset, batch_size=config.TEST_BATCH_SIZE)
    model = ViT(
        ViTConfig(
            image_size=8,
            patch_size=config.PATCH_SIZE,
            num_channels=1,
            num_classes=NUM_CLASSES,
            hidden_size=config.HIDDEN_SIZE,
            num_layers=config.NUM_LAYERS,
            num_attention_heads=config.NUM_HEADS,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY
    )
    total_steps = config.NUM_EPOCHS * len(train_dataloader)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=total_steps, warmup_steps=total_steps // 10)
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        model, optimizer, CrossEntropyLoss(), train_dataloader, test_dataloader, lr_scheduler
    )
    logger = get_dist_logger()
    trainer = Trainer(engine=engine, logger=logger)
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=config.NUM_EPOCHS // 4,
        hooks=[
            hooks.LossHook(),
            hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=False),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            hooks.LogMetricByEpochHook(logger),
        ],
        display_progress=sys.stdout.isatty(),
    )
    accuracy = trainer.metrics["test"].epoch_values["Accuracy"]
    gpc.destroy()
    if accuracy <= GOAL:
        sys.exit(f"test accuracy {accuracy:.1%} is not above {GOAL:.0%}")


if __name__ == "__main__":
    main()
