"""Whole tensors in memory are those that a checkpoint has, on every rank, from every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colossalai.checkpoint_io import gathered_weights, save_model
from colossalai.checkpoint_io.resharding import ShardedTensor, gathered
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.tensor import Box
from tests.checkpoint_io.layouts import FURTHER, LAYOUTS, Run, layout_of
from tests.ranks import run_ranks

QUICK = ("pp2-tp2", "gemini2-tp2")


def gather(name: str, folder: Path) -> float:
    """Compare what is gathered after a step with what is saved; return the bytes that this rank sent."""
    run = Run(layout_of(name), 1, 4)
    run.train(range(1))
    model = run.engine.model.unwrap()
    with ledger() as book:
        found = list(gathered_weights(model, gpc.mesh, device=torch.device("cpu")))
    whole = {name: tensor for names, tensor in found for name in names}
    save_model(model, folder / "model")
    saved = torch.load(folder / "model", weights_only=True)
    assert whole.keys() == saved.keys()
    for key, tensor in whole.items():
        assert tensor.dtype == saved[key].dtype
        assert torch.equal(tensor, saved[key]), key
    gpc.destroy()
    return book.num_bytes("broadcast")


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS | FURTHER],
)
def test_every_layout(name: str, tmp_path: Path) -> None:
    num_ranks = layout_of(name).num_ranks
    sent = run_ranks(gather, num_ranks, name, tmp_path)
    assert any(sent) == (name not in ("dp2", "zero1", "lamb-zero2", "hybrid", "sequence") and num_ranks > 1)


@pytest.mark.unit
def test_a_part_that_nobody_has_is_named() -> None:
    box = Box((0, 0), (2, 3))
    tensor = ShardedTensor((4, 3), torch.float32, {box: torch.zeros(2, 3)}, ranks_of={box: (0,)})
    with pytest.raises(ValueError, match=r"do not hold all of 'w', of shape \(4, 3\)"):
        next(gathered({"w": tensor}, Mesh({"dp": 1}, rank=0), device=torch.device("cpu")))
