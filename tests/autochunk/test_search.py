"""The search for regions: repeated blocks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.autochunk import autochunk
from colossalai.autochunk._flow import candidates_of
from colossalai.autochunk._profile import GraphProfiler
from colossalai.autochunk._search import RegionSearch
from colossalai.autochunk._trace import trace
from colossalai.model_zoo.evoformer import Evoformer
from tests.autochunk.models import EagerBlock, model_of, random

pytestmark = pytest.mark.unit


def test_blocks_are_solved_alike() -> None:
    """Repeated blocks have the same regions, and are searched once."""
    torch.manual_seed(0)
    regions = []
    for depth in (3, 6):
        model = nn.Sequential(*(model_of("eager")[0][0] for _ in range(depth)))
        chunked = autochunk(model, torch.randn(2, 64, 32, dtype=torch.float64), memory_ratio=0.4)
        regions.append([(each.extent, each.size) for each in chunked.plan.regions])
    per_block = len(regions[0]) // 3
    assert regions[1][per_block : 2 * per_block] == regions[1][2 * per_block : 3 * per_block]
    assert len(regions[1]) == 2 * len(regions[0])


class Copies(nn.Module):
    """Repeated operations, of which the last copy is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(64))

    def forward(self, x: Tensor) -> Tensor:
        """Return (32, 8) of the same."""
        for repetition in range(24):
            y = (x[..., None] * self.weight).tanh().sum(-1)
            copied = y.t().reshape(-1)
            copied = copied.add_(1.0) if repetition == 23 else copied * 0.5
            x = y.sin() + copied[:1]
        return x


def repeated(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    if name == "copies":
        return Copies(), (random(32, 8),)
    if name == "eager":
        return nn.Sequential(*(EagerBlock() for _ in range(9))), (random(2, 64, 32),)
    heads = {"msa_heads": 2, "msa_head_dim": 8, "pair_heads": 2, "pair_head_dim": 4}
    model = Evoformer(c_m=16, c_z=8, num_blocks=3, outer_dim=8, triangle_dim=8, **heads)
    return model, model_of("evoformer")[1]


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("name", ["copies", "eager", "evoformer"])
def test_regions_of_equal_windows(name: str, inplace: bool) -> None:
    """Regions that were found for an earlier block are those that a search at the later one finds."""
    model, args = repeated(name)
    args, kwargs = (args, {}) if isinstance(args, tuple) else ((), args)
    traced = trace(model.double(), args, kwargs).module
    profile = GraphProfiler(traced, tree_leaves((args, kwargs))).profile(traced.graph)
    search = RegionSearch(profile, inplace=inplace)
    num_known = 0
    for last in range(len(profile.nodes)):
        if search._window(last) in search._found:
            num_known += 1
            known, found = vars(search._candidates(last)), vars(candidates_of(profile, last, inplace=inplace))
            for field, values in known.items():
                assert np.array_equal(values, found[field]), (profile.nodes[last], field)
        search._candidates(last)
    assert num_known > 40
