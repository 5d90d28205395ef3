"""Train a ResNet on handwritten digits with the Trainer and its hooks.

    colossalai run --nproc_per_node 2 examples/images/train_trainer.py

The config file names the hyper-parameters and the features of the system.
"""

import sys

from build import build_engine, parse_args
from data import GOAL

from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks


def main() -> None:
    engine, train_dataloader, test_dataloader, lr_scheduler = build_engine(parse_args(__doc__))
    logger = get_dist_logger()
    trainer = Trainer(engine=engine, logger=logger)
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=[
            hooks.LossHook(),
            hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
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
