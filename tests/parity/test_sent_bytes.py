"""What ranks that share sequences send and hold, as one rank of a job of any size counts it."""

import pytest
import torch

import colossalai
from colossalai.communication import ledger
from tests.harness.fake_job import fake_job
from tests.model_zoo.tiny import SHAPE, build, criterion_of
from tests.parity.table import MODES, size_of
from tests.parity.tasks import RING, SEQ, masked_batch

pytestmark = pytest.mark.mesh

BATCH = 4


@pytest.mark.parametrize(("size", "mode", "num_ranks"), [(2, "1d", 4), (4, None, 4), (4, "1d", 256)])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_a_step_sends_what_the_page_says(attention: str, size: int, mode: str | None, num_ranks: int) -> None:
    """Of n bytes of keys of a layer on a rank; a padding mask has a byte for each position."""
    tp = size_of(mode)
    n = BATCH * SEQ // size * SHAPE["hidden_size"] // tp * 4
    mask_bytes, layers = BATCH * SEQ // size, SHAPE["num_layers"]
    parallel = {"sequence": {"size": size, "attention": attention}}
    parallel |= {"tensor": MODES[mode]} if mode else {}
    ids, mask, labels = masked_batch("gpt", 0)
    with fake_job({"parallel": parallel}, num_ranks, rank=num_ranks - 1):
        model = build("gpt", max_position_embeddings=SEQ, vocab_parallel_limit=1, num_attention_heads=8)
        criterion = criterion_of("gpt")
        with ledger() as forward:
            loss = criterion(model(ids, mask), labels)
        with ledger() as backward:
            loss.backward()
    of_loss = 2 * (size - 1) / size * 4  # the sum of a number over the ranks
    if attention == "ring":
        sent = (size - 1) * (2 * n + mask_bytes), (size - 1) * (4 * n + mask_bytes)
        counts = (size - 1) * 3, (size - 1) * 5
    else:
        sent = 4 * n * (size - 1) / size + (size - 1) * mask_bytes, 4 * n * (size - 1) / size
        counts = 3, 2
    assert forward.num_bytes(axis="sp") == layers * sent[0] + of_loss
    assert backward.num_bytes(axis="sp") == layers * sent[1]
    assert forward.count(axis="sp") == layers * counts[0] + 1
    assert backward.count(axis="sp") == layers * counts[1]


@pytest.mark.parametrize(("stage", "size", "num_ranks"), [(1, 2, 4), (2, 4, 4), (2, 4, 256)])
def test_slices_run_along_the_ranks_that_share_a_sequence(stage: int, size: int, num_ranks: int) -> None:
    config = {"parallel": {"tensor": {"size": size, "mode": "sequence"}}, "zero": {"stage": stage}}
    with fake_job(config, num_ranks, rank=1):
        model = RING.place(RING.build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        colossalai.initialize(model, optimizer, verbose=False)
        held = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        whole = sum(param.numel() for param in model.parameters())
    assert 0 < held <= whole / num_ranks + 4
