"""A transformer block trained on cut sequences, through both doors, as one process trains it."""

from functools import partial

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context import ParallelMode, get_current_mode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import ring_attention, zigzag_positions
from colossalai.testing import ParityCase, Subject, check_parity, full_gradients, full_parameters
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

SEQ, HIDDEN, HEADS, CLASSES = 16, 12, 2, 5
CONFIGS = {
    "ddp": {},
    "handler": {"gradient_handler": [{"type": "SequenceParallelGradientHandler"}]},
    "fsdp": {"zero": {"stage": 3}},
}
PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}


class Block(nn.Module):
    """A causal pre-norm block; whole attention until it is given a ring."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN)
        )
        self.ring = None
        self.dropout = 0.0

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.ring is None:
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            mixed = ring_attention(*heads, axis=self.ring, causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.positions = nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids, at):
        x = self.embed(ids) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def criterion(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compute_loss(model, batch):
    return criterion(model(batch[0], torch.arange(SEQ)), batch[1])


def make_case(max_norm):
    generator = torch.Generator().manual_seed(2)
    batches = [
        tuple(torch.randint(CLASSES, (4, SEQ), generator=generator) for _ in range(2)) for _ in range(3)
    ]
    return ParityCase(
        build_model=Model,
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=compute_loss,
        batches=batches,
        max_norm=max_norm,
    )


def cut(batch):
    at = zigzag_positions(SEQ, gpc.axis(ParallelMode.SEQUENCE))
    return batch[0][:, at], at, batch[1][:, at]


def through_engine(case, model):
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    # Ranks hold different tokens: dropout draws on each of them masks of its own.
    assert get_current_mode() == ParallelMode.TENSOR

    def step(batch):
        engine.zero_grad()
        ids, at, labels = cut(batch)
        loss = engine.criterion(engine(ids, at), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return subject(engine.model, step)


def through_booster(case, method, model):
    booster = Booster(plugin=PLUGINS[method]())
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, *_ = booster.boost(model, optimizer)

    def step(batch):
        optimizer.zero_grad()
        ids, at, labels = cut(batch)
        loss = criterion(model(ids, at), labels)
        booster.backward(loss, optimizer)
        if case.max_norm is not None:
            optimizer.clip_grad_by_norm(case.max_norm)
        optimizer.step()
        return loss.detach()

    return subject(model, step)


def subject(model, step):
    return Subject(
        step=step, gradients=lambda: full_gradients(model), parameters=lambda: full_parameters(model)
    )


def with_ring(apply, model):
    for block in model.blocks:
        block.ring = gpc.axis(ParallelMode.SEQUENCE)
    return apply(model)


def parity(method, max_norm, sequence):
    parallel = {"tensor": {"size": sequence, "mode": "sequence"}}
    colossalai.launch_from_torch(
        {"parallel": parallel, "clip_grad_norm": max_norm or 0.0, **CONFIGS[method]}, verbose=False
    )
    case = make_case(max_norm)
    slices = {
        "slice_index": gpc.get_local_rank(ParallelMode.DATA),
        "num_slices": gpc.get_world_size(ParallelMode.DATA),
    }
    losses = check_parity(case, partial(with_ring, partial(through_engine, case)), **slices)
    if method in PLUGINS:
        assert losses == check_parity(
            case, partial(with_ring, partial(through_booster, case, method)), **slices
        )
    assert losses[-1] < losses[0]


@pytest.mark.long  # with models of the zoo in tests/model_zoo/test_sequence_mode.py
@pytest.mark.parametrize(("world_size", "sequence", "max_norm"), [(2, 2, None), (4, 2, 0.3), (4, 4, None)])
@pytest.mark.parametrize("method", ["ddp", "handler", further("fsdp")])
def test_cut_sequences_against_one_process(method, world_size, sequence, max_norm):
    run_ranks(parity, world_size, method, max_norm, sequence)


def dropped_gradients(recompute):
    config = {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}, "recompute": recompute}
    colossalai.launch_from_torch(config, verbose=False)
    case = make_case(None)
    model = Model()
    for block in model.blocks:
        block.ring, block.dropout = gpc.axis(ParallelMode.SEQUENCE), 0.5
    subject = through_engine(case, model)
    losses = [subject.step(batch).item() for batch in case.batches]
    return losses, {name: grad.tolist() for name, grad in subject.gradients().items()}


def test_recomputation_draws_the_same_dropout():
    found = run_ranks(dropped_gradients, 2, False)
    assert found == run_ranks(dropped_gradients, 2, True)
    assert found[0][1] == found[1][1]
    assert found[0][0] != found[1][0]
