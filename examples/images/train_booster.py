"""Train a ResNet on handwritten digits with the Booster and a loop of your own.

    colossalai run --nproc_per_node 2 examples/images/train_booster.py

With --precision bf16 in mixed precision, with --plugin torch_fsdp with
parameters cut over the ranks.
"""

import argparse
import sys
from typing import Any

import torch
from data import GOAL, NUM_CLASSES, load_images
from model import LIBRARIES, build_model
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_current_device

BATCH_SIZE = 32  # images in a batch of one rank
PLUGINS = {"torch_ddp": TorchDDPPlugin, "torch_fsdp": TorchFSDPPlugin}


def main() -> None:
    args = parse_args()
    colossalai.launch_from_torch()
    coordinator = DistCoordinator()

    train_dataset, test_dataset = load_images()
    plugin = PLUGINS[args.plugin]()
    booster = Booster(mixed_precision=args.precision, plugin=plugin)
    train_dataloader = plugin.prepare_dataloader(
        train_dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True
    )
    test_dataloader = torch.utils.data.DataLoader(test_dataset, batch_size=BATCH_SIZE)
    model = build_model(num_classes=NUM_CLASSES, library=args.library)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=args.epochs)
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), train_dataloader, lr_scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_dataloader:
            loss = criterion(model(images.to(get_current_device())), labels.to(get_current_device()))
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        lr_scheduler.step()
        accuracy = evaluate(model, test_dataloader)
        coordinator.print_on_master(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy:.1%}")
    if args.save:
        booster.save_model(model, args.save)
    gpc.destroy()
    if accuracy <= GOAL:
        sys.exit(f"test accuracy {accuracy:.1%} is not above {GOAL:.0%}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("fp16", "bf16"), help="mixed precision (default: float32)")
    parser.add_argument("--plugin", choices=PLUGINS, default="torch_ddp", help="plugin for parallel training")
    parser.add_argument("--library", choices=LIBRARIES, default="model_zoo", help="library of the network")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training images")
    parser.add_argument("--save", help="file for the trained weights")
    return parser.parse_args()


@torch.no_grad()
def evaluate(model: nn.Module, dataloader: Any) -> float:
    model.eval()
    num_correct = num_images = 0
    for images, labels in dataloader:
        predictions = model(images.to(get_current_device())).argmax(dim=-1).cpu()
        num_correct += int((predictions == labels).sum())
        num_images += len(labels)
    return num_correct / num_images


if __name__ == "__main__":
    main()
