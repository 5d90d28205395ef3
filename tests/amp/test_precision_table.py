"""Which precision goes with which plugin and mode: every cell of the table, on a tiny model."""

from pathlib import Path

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import precision_table
from colossalai.booster.mixed_precision._table import METHODS, PRECISIONS
from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context import global_context as gpc
from tests.model_zoo.axial import axial_lm
from tests.model_zoo.tiny import VOCAB, build, criterion_of
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/features/mixed_precision.md"
NUM_STEPS = 3
LENGTH = 8  # zigzag order cuts it into four
PLUGINS = {
    "TorchDDPPlugin": (2, TorchDDPPlugin),
    "LowLevelZeroPlugin 1": (2, lambda choice: LowLevelZeroPlugin(stage=1, precision=choice)),
    "LowLevelZeroPlugin 2": (2, lambda choice: LowLevelZeroPlugin(stage=2, precision=choice)),
    "TorchFSDPPlugin": (2, TorchFSDPPlugin),
    "tensor 1d": (2, lambda: HybridParallelPlugin(tp_size=2)),
    "tensor 2d": (4, lambda: HybridParallelPlugin(tp_size=4, tp_mode="2d")),
    "tensor 2.5d": (4, lambda: HybridParallelPlugin(tp_size=4, tp_mode="2.5d")),
    "tensor 3d": (8, lambda: HybridParallelPlugin(tp_size=8, tp_mode="3d")),
    "tensor dap": (2, lambda: HybridParallelPlugin(tp_size=2, tp_mode="dap")),
    "sequence ring": (2, lambda: HybridParallelPlugin(tp_size=2, sequence_parallel=True)),
    "sequence ulysses": (2, lambda: HybridParallelPlugin(sp_size=2, sequence_attention="ulysses")),
    "pipeline": (2, lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2)),
}
# Tests of these modes train in some precision, too, and tests/zero/test_precision.py trains in all.
FURTHER = (
    *("LowLevelZeroPlugin 1", "LowLevelZeroPlugin 2", "sequence ring", "sequence ulysses"),
    *("TorchDDPPlugin", "tensor 1d", "tensor 2d", "tensor 2.5d", "tensor 3d"),
)


def train(choice, column):
    """Return the losses of a few steps on one batch; the scale is one that needs no search."""
    plugin = PLUGINS[column][1]
    if "Zero" in column:  # which takes the precision itself
        booster = Booster(plugin=plugin(choice))
    else:
        booster = Booster(mixed_precision=choice, plugin=plugin())
    torch.manual_seed(0)
    num_layers = 2 if column == "pipeline" else 1  # a pipeline has two stages; the rest is the same per layer
    if column == "tensor dap":
        model = axial_lm(VOCAB)
    else:
        model = build("gpt", max_position_embeddings=LENGTH, num_layers=num_layers)
    criterion = criterion_of("gpt")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if optimizer.scaler.scale > 1:
        optimizer.scaler.scale = 64.0
    dp = gpc.mesh.axis("dp")
    ids = torch.randint(VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.chunk(dp.size)[dp.rank]
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        if model.pipeline is not None:
            loss = booster.execute_pipeline(iter([(ids, ids)]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(ids), ids)
            booster.backward(loss, optimizer)
        optimizer.step()
        assert optimizer.stepped
        losses.append(loss.item())
    return losses


def cells_of(column):
    """Run a column of the table in one job; a cell is its losses, or why it was refused."""
    colossalai.launch_from_torch(config={}, verbose=False)
    cells = {}
    for name, choice in PRECISIONS.items():
        try:
            cells[name] = train(choice, column)
        except ValueError as error:
            cells[name] = str(error)
    gpc.destroy()
    return cells


@pytest.mark.dist
@pytest.mark.parametrize(
    "column", [pytest.param(name, marks=[pytest.mark.long] * (name in FURTHER)) for name in PLUGINS]
)
def test_the_cells_of_a_column(column):
    rows = [line.strip("| ").split(" | ") for line in precision_table()]
    place = rows[0].index(column) + 1  # the corner is empty
    marks = {row[0]: row[place] for row in rows if row[0] in PRECISIONS}
    cells = run_ranks(cells_of, PLUGINS[column][0], column)[0]
    assert set(marks) == set(cells) == set(PRECISIONS)
    expected = cells["fp32"]
    assert expected[-1] < expected[0]
    for name, cell in cells.items():
        if marks[name] != "yes":
            assert "sharded parameters cannot be combined" in cell, name
        else:
            # bfloat16 keeps 8 bits: 0.4 % per operation, some ten in a row; float16 is eight times better
            assert cell == pytest.approx(expected, rel=0.04), name
            assert (cell == expected) == (name in ("fp32", "fp16_apex O0")), name


@pytest.mark.unit
def test_the_page_has_the_table():
    assert "\n".join(precision_table()) in PAGE.read_text()
    assert set(PLUGINS) == set(METHODS)
