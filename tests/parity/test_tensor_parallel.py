"""A model of colossalai.nn layers trains in every tensor mode as one of torch layers does in one process."""

import types
from functools import partial

import pytest
import torch
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai.nn.layer import restart
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, check_parity
from tests.parity.subjects.tensor import MODES, through_engine
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

pytestmark = pytest.mark.dist

VOCAB, HIDDEN, SEQ, BATCH = 16, 8, 3, 8
TORCH = types.SimpleNamespace(
    Embedding=lambda *sizes, vocab_parallel_limit: nn.Embedding(*sizes),
    Linear=nn.Linear,
    LayerNorm=nn.LayerNorm,
)


class Block(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.norm = layers.LayerNorm(HIDDEN)
        self.up = layers.Linear(HIDDEN, 4 * HIDDEN)
        self.down = layers.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens in, logits out, with the head's weight tied to the embedding's or not."""

    def __init__(self, layers, *, tied, vocab_parallel, own_classes=None):
        super().__init__()
        limit = 1 if vocab_parallel else 10**6
        self.embedding = layers.Embedding(VOCAB, HIDDEN, vocab_parallel_limit=limit)
        self.blocks = nn.ModuleList(Block(layers) for _ in range(2))
        self.norm = layers.LayerNorm(HIDDEN)
        if layers is TORCH:
            self.head = nn.Linear(HIDDEN, VOCAB)
            if tied:
                self.head.weight = self.embedding.weight
        else:
            weight = self.embedding.weight if tied else None
            self.head = layers.Classifier(HIDDEN, VOCAB, weight, vocab_parallel_limit=limit)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, batch):
    ids, labels = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def build(twin, tied, vocab_parallel):
    restart(gpc.tensor_mode)
    model = Model(col_nn, tied=tied, vocab_parallel=vocab_parallel)
    if tied:  # torch draws a weight for the head before it is tied, ours draws none
        with torch.no_grad():
            model.head.bias.copy_(spec_of(model.head.bias).slice_of(twin.head.bias))
    return model


def train(tensor, data, tied, vocab_parallel, accumulation, extra=None):
    max_norm = None if tied else 0.3  # clipping hides gradients that are a multiple of the right ones
    config = {
        "parallel": {"data": data, "tensor": tensor},
        "clip_grad_norm": max_norm or 0.0,
        "gradient_accumulation": accumulation,
        **(extra or {}),
    }
    colossalai.launch_from_torch(config, verbose=False)
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH * data * accumulation, SEQ)
    batches = [tuple(torch.randint(VOCAB, shape, generator=generator) for _ in range(2)) for _ in range(3)]
    case = ParityCase(
        build_model=partial(double, tied=tied, vocab_parallel=vocab_parallel),
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=loss_of,
        batches=batches,
        max_norm=max_norm,
    )
    return check_parity(
        case,
        partial(
            through_engine,
            case,
            partial(build, tied=tied, vocab_parallel=vocab_parallel),
            partial(col_nn.CrossEntropyLoss, label_smoothing=0.1),
        ),
        slice_index=gpc.mesh.axis_rank("dp"),
        num_slices=data,
    )


def double(**options):
    torch.set_default_dtype(torch.float64)
    return Model(TORCH, **options)


# Mode, replicas, accumulation, whether the head is tied, whether the vocabulary is cut.
CELLS = [
    ("1d", 1, 1, True, True),
    ("1d", 2, 2, True, True),
    ("1d-4", 1, 1, False, False),
    ("2d", 1, 2, True, True),
    ("3d", 1, 2, True, True),
    *(
        further(name, 1, 1, tied, vocab_parallel)
        for name in MODES
        for tied in (True, False)
        for vocab_parallel in (True, False)
        if (name, tied, vocab_parallel) not in (("1d", True, True), ("1d-4", False, False))
    ),
    further("1d", 2, 1, True, True),
    further("2d", 2, 1, True, True),
    further("2.5d", 1, 2, True, True),
]


@pytest.mark.parametrize(
    ("num_ranks", "cells"), grouped(CELLS, lambda name, data, *_: MODES[name]["size"] * data)
)
def test_three_steps(num_ranks, cells):
    cells = [(MODES[name], data, *how, accumulation) for name, data, accumulation, *how in cells]
    for (_, data, *_, accumulation), losses in zip(
        cells, run_ranks(each_in_turn, num_ranks, train, cells)[0], strict=True
    ):
        assert losses[-1] < losses[0] or data * accumulation > 1


@pytest.mark.parametrize("name", ["1d", further("2d")])
def test_under_fully_sharded_data_parallelism(name):
    sharded = {"zero": {"stage": 3}}
    run_ranks(train, MODES[name]["size"] * 2, MODES[name], 2, True, True, 1, sharded)
