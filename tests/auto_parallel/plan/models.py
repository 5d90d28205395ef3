"""Small models for plans, and the arguments of their forwards."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.auto_parallel.machine._machine import MachineProfile, shipped_profile
from colossalai.auto_parallel.machine._rates import ByteCurve, FlopRate, OpRate
from colossalai.device import AlphaBeta
from colossalai.model_zoo.bert import Bert, BertConfig
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.model_zoo.resnet import ResNet
from colossalai.model_zoo.vit import ViT, ViTConfig
from tests.shardformer.models import bert as bert_of_transformers
from tests.shardformer.models import gpt2_of_four_blocks as gpt2
from tests.shardformer.models import llama
from tests.shardformer.models import mixtral_of_eight as mixtral

VOCAB, LENGTH, NUM_CLASSES = 24, 6, 4
SIZES = {"hidden_size": 16, "num_layers": 4, "num_attention_heads": 4}
RATES = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES, **RATES))


def gpt_of_a_frozen_half() -> nn.Module:
    """Return a GPT whose embedding and first two blocks are frozen."""
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("embedding", "blocks.0.", "blocks.1.")))
    return model


def bert() -> nn.Module:
    return Bert(BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES, **RATES))


def vit() -> nn.Module:
    return ViT(ViTConfig(image_size=8, patch_size=4, num_classes=NUM_CLASSES, **SIZES, **RATES))


def resnet() -> nn.Module:
    return ResNet((1, 1), num_classes=NUM_CLASSES, small_input=True, width=8)


def _masked_loss(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _zoo_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of the zoo is built for the mode that is in force."""
    loss: Tensor = GPTLMLoss()(logits, labels)
    return loss


LOSSES: dict[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]] = {
    gpt: _zoo_loss,
    gpt_of_a_frozen_half: _zoo_loss,
    bert: _masked_loss,
    bert_of_transformers: _masked_loss,
    gpt2: _masked_loss,
    llama: _masked_loss,
    mixtral: _masked_loss,
    vit: nn.functional.cross_entropy,
    resnet: nn.functional.cross_entropy,
}


def batches_of(build: Callable[[], nn.Module], batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return three batches of inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    if build in (vit, resnet):
        return [
            (
                torch.randn(batch, 3, 8, 8, generator=generator) + 1.0,
                torch.randint(NUM_CLASSES, (batch,), generator=generator),
            )
            for _ in range(3)
        ]
    ids = torch.randint(VOCAB, (3, batch, LENGTH), generator=generator)
    return [(each, each) for each in ids]


def arguments_of(build: Callable[[], nn.Module], batch: int) -> dict[str, Tensor]:
    """Return the arguments of a forward, without memory."""
    name = {vit: "images", resnet: "images"}.get(build, "input_ids")
    return {name: batches_of(build, batch)[0][0].to("meta")}


def arguments_in_double(build: Callable[[], nn.Module], batch: int) -> dict[str, Tensor]:
    """Return the arguments of a forward in float64, without memory."""
    given = arguments_of(build, batch)
    return {name: value.double() if value.is_floating_point() else value for name, value in given.items()}


@cache
def slow_machine(*, link_bytes_per_s: float = 1e9) -> MachineProfile:
    """Return a machine whose operations take so long that sharing small models pays: 10 MFLOP/s, 10 MB/s.

    Args:
        link_bytes_per_s: Of a link between ranks, without latency.
    """
    profile = shipped_profile()
    curve = ByteCurve((1e6,), (0.1,))
    operations = {
        kind: {
            dtype: {
                direction: OpRate(0.0, curve, None if rate.flops is None else FlopRate(1e7))
                for direction, rate in of_dtype.items()
            }
            for dtype, of_dtype in of_kind.items()
        }
        for kind, of_kind in profile.rates.operations.items()
    }
    line = AlphaBeta(0.0, 1 / link_bytes_per_s)
    links = tuple(replace(each, lines=dict.fromkeys(each.lines, line)) for each in profile.links)
    optimizers = {
        name: replace(rate, overhead=0.0, per_tensor=0.0, curve=ByteCurve((1e6,), (0.01,)))
        for name, rate in profile.rates.optimizers.items()
    }
    rates = replace(profile.rates, operations=operations, optimizers=optimizers)
    return replace(profile, name="slow", links=links, rates=rates)
