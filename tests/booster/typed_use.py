"""What mypy knows of a loop with `Booster`; nothing here is run."""

from typing import Any, assert_type

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from colossalai.amp import OptimizerWrapper
from colossalai.booster import Booster
from colossalai.runtime import ModelWrapper


def one_optimizer(booster: Booster, net: nn.Module, loader: DataLoader[Any]) -> None:
    adam = torch.optim.AdamW(net.parameters())
    model, optimizer, criterion, batches, scheduler = booster.boost(
        net, adam, nn.CrossEntropyLoss(), loader, StepLR(adam, 1)
    )
    assert_type(model, ModelWrapper)
    assert_type(optimizer, OptimizerWrapper)
    assert_type(criterion, nn.CrossEntropyLoss)
    assert_type(batches, DataLoader[Any])
    assert_type(scheduler, StepLR)
    booster.save("states", model, optimizer, scheduler, step=1)
    assert_type(booster.gather_for_metrics([torch.ones(1)]), list[torch.Tensor])
    output = booster.execute_pipeline(iter(batches), model, criterion, optimizer)
    assert_type(output["loss"], torch.Tensor | None)


def what_is_left_out_is_none(booster: Booster, net: nn.Module) -> None:
    model, *rest = booster.boost(net)
    assert_type(model, ModelWrapper)
    assert_type(rest, list[None])


def several_optimizers(booster: Booster, net: nn.Module, adam: torch.optim.AdamW) -> None:
    _, listed, *_ = booster.boost(net, [adam])
    assert_type(listed, list[OptimizerWrapper])
    _, paired, *_ = booster.boost(net, (adam, torch.optim.SGD(net.parameters())))
    assert_type(paired, tuple[OptimizerWrapper, ...])
