"""Plans have no pipeline for models with a row of blocks that stages would train wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel._make import pose_problem
from colossalai.auto_parallel._parts import parts_of_model
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel.trace._trace import trace_model
from tests.auto_parallel.plan.models import (
    arguments_of,
    gpt,
    gpt2,
    gpt_of_a_frozen_half,
    llama,
    slow_machine,
    vit,
)

pytestmark = pytest.mark.unit

WIDTH = 8


class RowOfBlocks(nn.Module):
    """A row of blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(2 * self.stem(x)))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RunsTwice(RowOfBlocks):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class ReturnsHidden(RowOfBlocks):
    def run(self, x: Tensor) -> Any:
        self.hidden = []
        for block in self.blocks:
            x = block(x)
            self.hidden.append(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(self.stem(x))), *self.hidden


class AddsStem(RowOfBlocks):
    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        return self.head(self.run(x) + x)


class WithToken(RowOfBlocks):
    """What the stem returns is shorter than what the blocks take."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.stem(x)], 1)
        return self.head(self.run(x)[:, 0])


class RegistersLate(RowOfBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.second_stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.run(self.second_stem(self.stem(x))))


class HasPenalty(RowOfBlocks):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + sum(block[0].weight.square().mean() for block in self.blocks)


class TypesOfTokens(RowOfBlocks):
    """A layer before the blocks that is registered behind them, and runs with an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(4, WIDTH)
        self.types = nn.Embedding(2, WIDTH)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Any:
        x = self.stem(input_ids)
        return self.head(self.run(x if token_type_ids is None else x + self.types(token_type_ids)))


def most_stages(build: Callable[[], nn.Module], **meta_args: Tensor) -> int:
    problem = pose_problem(
        build(),
        meta_args,
        world_size=2,
        optimizer="sgd",
        precision="fp32",
        profile=slow_machine(),
        limits=SearchLimits(),
    )
    return max(setting.pipeline for setting in problem.settings)


@pytest.mark.parametrize(
    "build",
    [RunsTwice, ReturnsHidden, AddsStem, WithToken, RegistersLate, HasPenalty],
    ids=lambda it: it.__name__,
)
def test_no_pipeline(build: Callable[[], nn.Module]) -> None:
    assert most_stages(build, x=torch.zeros(8, 3, WIDTH)) == 1


def test_no_pipeline_where_a_guess_shows_less() -> None:
    tokens = torch.zeros(8, 3, dtype=torch.long)
    assert most_stages(TypesOfTokens, input_ids=tokens) == 2
    assert most_stages(TypesOfTokens, input_ids=tokens, token_type_ids=tokens) == 1


def test_a_pipeline() -> None:
    """A stage computes what is between stem and blocks itself."""
    ids = torch.zeros(8, 6, dtype=torch.long)
    assert most_stages(RowOfBlocks, x=torch.zeros(8, 3, WIDTH)) == 2
    assert most_stages(gpt, input_ids=ids) == 2
    assert most_stages(vit, images=torch.zeros(8, 3, 8, 8)) == 2
    pytest.importorskip("transformers")
    assert most_stages(gpt2, input_ids=ids, attention_mask=torch.ones_like(ids)) == 2


def test_frozen_blocks_are_in_the_chain() -> None:
    """What a frozen block hands on has no gradient, and is what the next one computes on all the same."""
    model = gpt_of_a_frozen_half()
    trace = trace_model(model, arguments_of(gpt, 8))
    parts = parts_of_model(trace, model)
    assert len(parts.blocks) == len(parts.inputs) == 4
    assert parts.inputs[1:] == parts.outputs[:-1]
    assert parts.can_be_stages


def test_a_model_with_adapters_is_traced_without_its_cache_and_cut_into_stages() -> None:
    """Before the blocks all is frozen, and positions are handed to every block."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(), config)
    trace = trace_model(model, arguments_of(llama, 8))
    assert trace.is_exact
    assert parts_of_model(trace, model).can_be_stages
