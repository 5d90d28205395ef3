"""Plans have no pipeline for models with a row of blocks that stages would train wrongly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel._make import pose_problem
from colossalai.auto_parallel._search import SearchLimits
from tests.auto_parallel.plan.models import gpt, gpt2, slow_machine, vit

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


def test_a_pipeline() -> None:
    """A stage computes what is between stem and blocks itself."""
    ids = torch.zeros(8, 6, dtype=torch.long)
    assert most_stages(RowOfBlocks, x=torch.zeros(8, 3, WIDTH)) == 2
    assert most_stages(gpt, input_ids=ids) == 2
    assert most_stages(vit, images=torch.zeros(8, 3, 8, 8)) == 2
    pytest.importorskip("transformers")
    assert most_stages(gpt2, input_ids=ids, attention_mask=torch.ones_like(ids)) == 2
