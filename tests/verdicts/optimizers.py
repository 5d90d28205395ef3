"""Optimizers beside methods that leave a rank parts of parameters: the runs behind a row of their table."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import transformers.optimization
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import colossalai
import colossalai.nn.optimizer as own
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.runtime import ModelWrapper
from colossalai.shardformer import Rule, register_rule
from colossalai.tensor import spec_of
from colossalai.testing import full_parameters
from tests.parity.experts.tasks import Tower
from tests.shardformer import models

Build = Callable[[Iterable[nn.Parameter]], Optimizer]

TOLERANCE = 1e-10  # in float64, which leaves room for another order of summation, and for nothing else
DECAY: Any = {"lr": 0.01, "weight_decay": 0.1}


def muon(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return Muon, which takes matrices only."""
    return torch.optim.Muon([param for param in params if param.dim() == 2], **DECAY)


def row_wise(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return RowWiseAdagrad, which takes parameters of rows only."""
    return own.RowWiseAdagrad([param for param in params if param.dim() > 1])


def sparse(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return SparseAdam of the first parameter, which is the table of `Words`."""
    return torch.optim.SparseAdam([next(iter(params))], lr=0.01)


OPTIMIZERS: dict[str, Build] = {
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, **DECAY),
    "Adagrad": partial(torch.optim.Adagrad, **DECAY),
    "Adam": partial(torch.optim.Adam, amsgrad=True, **DECAY),
    "AdamW": partial(torch.optim.AdamW, **DECAY),
    "Adamax": partial(torch.optim.Adamax, **DECAY),
    "ASGD": partial(torch.optim.ASGD, t0=1, **DECAY),
    "LBFGS": torch.optim.LBFGS,
    "Muon": muon,
    "NAdam": partial(torch.optim.NAdam, **DECAY),
    "RAdam": partial(torch.optim.RAdam, **DECAY),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True, **DECAY),
    "Rprop": torch.optim.Rprop,
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, **DECAY),
    "SparseAdam": sparse,
    "CPUAdam": partial(own.CPUAdam, **DECAY),
    "FusedAdam": partial(own.FusedAdam, **DECAY),
    "FusedLAMB": partial(own.FusedLAMB, max_grad_norm=0.1, **DECAY),
    "FusedSGD": partial(own.FusedSGD, momentum=0.9, **DECAY),
    "HybridAdam": partial(own.HybridAdam, **DECAY),
    "Lamb": partial(own.Lamb, **DECAY),
    "Lars": partial(own.Lars, lr=0.1, momentum=0.9, eeta=0.05, weight_decay=0.1),
    "RowWiseAdagrad": row_wise,
    "transformers.Adafactor": lambda params: transformers.optimization.Adafactor(list(params)),
}

PLUGINS: dict[str, Callable[[], Any]] = {
    "tp": partial(HybridParallelPlugin, tp_size=2, pp_size=1, zero_stage=0, precision="fp32"),
    "ep": partial(HybridParallelPlugin, ep_size=2, pp_size=1, zero_stage=0, precision="fp32"),
    "ZeRO 1": partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "ZeRO 2": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "Gemini": partial(GeminiPlugin, precision="fp32", min_chunk_size_mb=0.002),
    "FSDP": TorchFSDPPlugin,
}
SETTINGS = {"SparseAdam": "sparse="}
"""What an error names, if not the class of the optimizer."""
COLUMNS = tuple(PLUGINS)


def classes_of(module: ModuleType) -> list[str]:
    """Return the names of the optimizer classes of a module, other than those that it imports."""
    kinds = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind)}
    own_kinds = {name: kind for name, kind in kinds.items() if kind.__module__.startswith(module.__name__)}
    return [name for name, kind in own_kinds.items() if issubclass(kind, Optimizer) and kind is not Optimizer]


def run(column: str, label: str) -> str:
    """Train with an optimizer and a method on two ranks, as one process does; return the verdict.

    Raises:
        AssertionError: A parameter differs from that of one process, or what is refused is not named or has
            changed something.
    """
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[column]())
    torch.manual_seed(0)
    register_rule(Words, Rule(embeddings=("table",)))
    raw: Any = gpt()
    if column == "ep" or label == "SparseAdam":
        raw = (Words() if label == "SparseAdam" else Tower()).double()
    twin = copy.deepcopy(raw)
    optimizer, twin_optimizer = (OPTIMIZERS[label](trained(each)) for each in (raw, twin))
    params, refusal = dict(raw.named_parameters()), ""
    try:
        model, boosted, *_ = booster.boost(raw, optimizer)
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    if refusal:
        assert SETTINGS.get(label, type(optimizer).__name__) in refusal, refusal
        for (name, param), now in zip(params.items(), raw.parameters(), strict=True):
            assert now is param, name
            assert torch.equal(param, twin.get_parameter(name)), name
        return "refused"
    start = [param.detach().clone() for param in trained(twin)]
    part, num_parts = gpc.mesh.axis("dp").rank, gpc.mesh.axis_size("dp")
    for step in range(3):
        twin_optimizer.zero_grad()
        loss_of(twin, step, 0, 1).backward()
        twin_optimizer.step()
        boosted.zero_grad()
        booster.backward(loss_of(model, step, part, num_parts), boosted)
        boosted.step()
        compare(model, raw, twin)
    has_moved = [not torch.equal(param, old) for param, old in zip(trained(twin), start, strict=True)]
    assert any(has_moved), "the optimizer does nothing"
    assert column not in ("tp", "ep") or any(map(spec_of, raw.parameters())), "nothing is cut"
    return "equal"


class Words(nn.Module):
    """An embedding whose gradients are sparse, before experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 5, sparse=True)
        self.tower = Tower()

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.table(ids))


def gpt() -> nn.Module:
    """Return a GPT-2 whose biases of keys are frozen: rounding is all of their gradients."""
    model: Any = models.gpt2(vocab_size=13, n_layer=1).double()
    model.transformer.h[0].attn.c_attn.bias.requires_grad_(False)
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def loss_of(model: Any, step: int, part: int, num_parts: int) -> Tensor:
    """Return the mean loss over a part of the batch."""
    raw = model.unwrap() if isinstance(model, ModelWrapper) else model
    ids = tokens(step).chunk(num_parts)[part]
    if isinstance(raw, Words):
        return model(ids.flatten()).square().mean()
    if isinstance(raw, Tower):
        return model(ids[:, 1:].double().cos()).square().mean()
    return model(input_ids=ids, labels=ids).loss


def compare(model: Any, raw: nn.Module, twin: nn.Module) -> None:
    """Compare the slices of this rank with those of the twin's parameters."""
    is_fsdp = any(isinstance(param, DTensor) for param in raw.parameters())
    with torch.no_grad(), nullcontext() if is_fsdp else model.gathered():
        found = full_parameters(raw)
        for name, expected in twin.named_parameters():
            spec = spec_of(raw.get_parameter(name))
            expected = expected.detach() if spec is None else spec.slice_of(expected.detach())
            value = found[name].as_subclass(Tensor)
            far = (value - expected).abs().max().item()
            assert far < TOLERANCE, (name, far)
