"""A GPT is saved in one tensor mode and goes on in another, also where its vocabulary is padded."""

import pytest
import torch

import colossalai
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.model_zoo.tiny import BATCH, build, criterion_of, make_batch
from tests.parity.table import MODES
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

SEQUENCE = {"size": 2, "mode": "sequence"}
VOCAB = 13  # no number of ranks divides it


def go_on(tensor, seed, source, target):
    """Load a checkpoint, if there is one, and return the losses of three steps; or save after the first."""
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}} if tensor else {}, verbose=False)
    torch.manual_seed(seed)
    model = build("gpt", vocab_size=VOCAB, vocab_parallel_limit=1, max_position_embeddings=8, num_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, *_ = colossalai.initialize(model, optimizer, criterion_of("gpt"), verbose=False)
    if source is not None:
        load_checkpoint(source, engine.model, engine.optimizer)
    losses = []
    for step in range(3):
        ids = make_batch("gpt", BATCH, step, VOCAB)[0].repeat(1, 2)[:, :8]
        engine.zero_grad()
        loss = engine.criterion(engine(ids), ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if target is not None:
            save_checkpoint(target, 1, engine.model, engine.optimizer)
            break
    return losses


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MODES["1d"], None),
        further(MODES["2d"], MODES["1d-4"]),
        further(MODES["2d"], SEQUENCE),
        further(SEQUENCE, MODES["1d"]),
        further(MODES["3d"], MODES["1d-4"]),
        further(None, MODES["2.5d"]),
    ],
)
def test_saved_in_one_mode_loaded_in_another(first, second, tmp_path):
    file = tmp_path / "gpt.pt"
    sizes = [tensor["size"] if tensor else 1 for tensor in (first, second)]
    run_ranks(go_on, sizes[0], first, 1, None, file)
    expected = run_ranks(go_on, sizes[0], first, 2, file, None)
    found = run_ranks(go_on, sizes[1], second, 3, file, None)
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
