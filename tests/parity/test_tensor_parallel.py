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
from colossalai.testing import ParityCase, Subject, check_parity
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

MODES = {
    "1d": {"size": 2, "mode": "1d"},
    "1d-4": {"size": 4, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}
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


def whole(param, tensor):
    spec = spec_of(param)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone() if spec is None else spec.whole(tensor.detach()).clone()


def through_engine(case, tied, vocab_parallel, twin):
    """Build the model anew in the job's mode; its start must be the twin's, and then it is trained."""
    torch.manual_seed(case.seed)
    torch.set_default_dtype(torch.float64)
    restart(gpc.tensor_mode)
    model = Model(col_nn, tied=tied, vocab_parallel=vocab_parallel)
    if tied:  # torch draws a weight for the head before it is tied, ours draws none
        with torch.no_grad():
            model.head.bias.copy_(spec_of(model.head.bias).slice_of(twin.head.bias))
    for name, param in model.named_parameters():
        assert torch.equal(whole(param, param), twin.get_parameter(name)), name
    criterion = col_nn.CrossEntropyLoss(label_smoothing=0.1)
    engine, *_ = colossalai.initialize(
        model, case.build_optimizer(model.parameters()), criterion, verbose=False
    )

    def step(batch):
        ids, labels = batch
        total = 0.0
        num_microbatches = engine.accumulation_steps
        for part, label in zip(ids.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True):
            engine.zero_grad()
            loss = engine.criterion(engine(part), label)
            engine.backward(loss)
            engine.step()
            total += loss.item() / num_microbatches
        return total

    return Subject(
        step=step,
        gradients=lambda: {name: whole(p, p.grad) for name, p in model.named_parameters()},
        parameters=lambda: {name: whole(p, p) for name, p in model.named_parameters()},
    )


def train(tensor, data, tied, vocab_parallel, accumulation, extra=None):
    config = {
        "parallel": {"data": data, "tensor": tensor},
        "clip_grad_norm": 0.3,
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
        max_norm=0.3,
    )
    return check_parity(
        case,
        partial(through_engine, case, tied, vocab_parallel),
        slice_index=gpc.mesh.axis_rank("dp"),
        num_slices=data,
    )


def double(**options):
    torch.set_default_dtype(torch.float64)
    return Model(TORCH, **options)


@pytest.mark.parametrize(("tied", "vocab_parallel"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", MODES)
def test_three_steps(name, tied, vocab_parallel):
    losses = run_ranks(train, MODES[name]["size"], MODES[name], 1, tied, vocab_parallel, 1)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("name", "data", "accumulation"), [("1d", 2, 1), ("2d", 2, 1), ("1d", 2, 2), ("2d", 1, 2)]
)
def test_with_data_parallelism_and_accumulation(name, data, accumulation):
    run_ranks(train, MODES[name]["size"] * data, MODES[name], data, True, True, accumulation)


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_under_fully_sharded_data_parallelism(name):
    sharded = {"zero": {"stage": 3}}
    run_ranks(train, MODES[name]["size"] * 2, MODES[name], 2, True, True, 1, sharded)
