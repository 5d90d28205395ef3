"""Stages cut by the user's own hand, or by a call, with the schedule as an object."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.builder import build_pipeline_model
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.pipeline import PipelineSharedModuleWrapper
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.training import slice_of_batch, subject_of
from tests.ranks import run_ranks
from tests.turns import each_in_turn

pytestmark = pytest.mark.dist

VOCAB = 24


class Layers(nn.Sequential):
    """Six layers of their own widths; no two cuts have the same shapes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 8), nn.Linear(8, 3)
        )


def layer_case() -> ParityCase:
    generator = torch.Generator().manual_seed(2)
    return ParityCase(
        build_model=Layers,
        build_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        compute_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batches=[
            (torch.randn(10, 5, generator=generator), torch.randn(10, 3, generator=generator))
            for _ in range(3)
        ],
    )


def sequential(num_chunks: int, uneven: int) -> None:
    """Cut an `nn.Sequential`; the schedule is an object; ten samples in `uneven` microbatches."""
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, verbose=False)
    case = layer_case()

    def apply(model: nn.Module) -> Subject:
        part = build_pipeline_model(model, num_chunks=num_chunks)
        schedule = (
            InterleavedPipelineSchedule(uneven, num_chunks) if num_chunks > 1 else PipelineSchedule(uneven)
        )
        optimizer = case.build_optimizer(part.parameters())
        engine, *_ = colossalai.initialize(
            part, optimizer, nn.functional.mse_loss, schedule=schedule, verbose=False
        )

        def step(batch: tuple[Tensor, ...]) -> Tensor:
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter([batch]))
            assert (output is None) == (not gpc.is_pipeline_last_stage()) == (label is None)
            assert output is None or output.shape == (10, 3)
            engine.step()
            return loss

        return subject_of(None, engine.model, engine.optimizer, step)

    check_parity(case, apply, **slice_of_batch())


def test_a_sequential_with_a_smaller_last_microbatch() -> None:
    """By number of chunks and of microbatches."""
    run_ranks(each_in_turn, 2, sequential, [(1, 4), (1, 3), (2, 2), (3, 4)])


class HandMade(nn.Module):
    """A stage as users write it: `first` embeds, `last` has the head, which shares the embedding's weight."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 6) if first else None
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB, bias=False) if last else None

    def forward(self, hidden=None, input_ids=None, attention_mask=None):
        if self.embedding is not None:
            hidden = self.embedding(input_ids)
        hidden = torch.tanh(self.block(hidden)) * attention_mask[..., None]
        return hidden if self.head is None else self.head(hidden)


class Whole(nn.Module):
    """What the two stages are together."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([HandMade(first=True, last=False), HandMade(first=False, last=True)])
        self.stages[1].head.weight = self.stages[0].embedding.weight

    def forward(self, input_ids, attention_mask):
        hidden = self.stages[0](input_ids=input_ids, attention_mask=attention_mask)
        return self.stages[1](hidden, attention_mask=attention_mask)


def hand_made() -> None:
    config = {
        "parallel": {"pipeline": 2},
        "NUM_MICRO_BATCHES": 2,
        "gradient_handler": [{"type": "PipelineSharedModuleGradientHandler"}],
        "clip_grad_norm": 0.1,
    }
    colossalai.launch_from_torch(config, verbose=False)
    stage = gpc.mesh.axis_rank("pp")
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (3, 8, 5), generator=generator)
    masks = torch.randint(2, (3, 8, 5), generator=generator).double()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    case = ParityCase(
        build_model=Whole,
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=lambda model, batch: loss_of(model(batch[0], batch[1]), batch[0]),
        batches=[*zip(ids, masks, strict=True)],
        max_norm=0.1,
    )

    def apply(model: nn.Module) -> Subject:
        own = model.stages[stage]
        shared = (own.head or own.embedding).weight
        wrapper = PipelineSharedModuleWrapper([0, 1])
        if stage == 1:  # what the wrapper makes equal
            own.head.weight = nn.Parameter(torch.zeros_like(shared))
        wrapper.register_module(own.head if stage == 1 else own.embedding)
        optimizer = case.build_optimizer(own.parameters())
        engine, *_ = colossalai.initialize(own, optimizer, loss_of, verbose=False)

        def step(batch: tuple[Tensor, ...]) -> Tensor:
            engine.zero_grad()
            data = {"input_ids": batch[0], "attention_mask": batch[1]}
            _, _, loss = engine.execute_schedule(iter([(data, batch[0])]))
            engine.step()
            return loss

        def named(kind: str) -> dict[str, Tensor]:
            renamed = {"head.weight": "stages.0.embedding.weight"}
            return {
                renamed.get(name, f"stages.{stage}.{name}"): getattr(param, kind).detach().clone()
                for name, param in engine.model.unwrap().named_parameters()
            }

        return Subject(step=step, gradients=lambda: named("grad"), parameters=lambda: named("data"))

    check_parity(case, apply, slice_index=0, num_slices=1)


def test_stages_made_by_hand_with_shared_weights_and_keyword_data() -> None:
    run_ranks(hand_made, 2)
