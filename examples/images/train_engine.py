"""Train a ResNet on handwritten digits with the Engine: the loop is your own.

    colossalai run --nproc_per_node 2 examples/images/train_engine.py

The config file names the hyper-parameters and the features of the system.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from build import build_engine, parse_args
from data import GOAL

from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger


def main() -> None:
    engine, train_dataloader, test_dataloader, lr_scheduler = build_engine(parse_args(__doc__))
    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        for images, labels in train_dataloader:
            engine.zero_grad()
            outputs = engine(images.to(engine.device))
            loss = engine.criterion(outputs, labels.to(engine.device))
            engine.backward(loss)
            engine.step()
        lr_scheduler.step()
        accuracy = evaluate(engine, test_dataloader)
        get_dist_logger().info(
            f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy:.1%}", ranks=[0]
        )
    gpc.destroy()
    if accuracy <= GOAL:
        sys.exit(f"test accuracy {accuracy:.1%} is not above {GOAL:.0%}")


@torch.no_grad()
def evaluate(engine: Engine, dataloader: Any) -> float:
    """Return the share of images, over all ranks, that are recognised."""
    engine.eval()
    counts = torch.zeros(2, device=engine.device)
    for images, labels in dataloader:
        predictions = engine(images.to(engine.device)).argmax(dim=-1)
        counts[0] += (predictions == labels.to(engine.device)).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
