"""The norm of all gradients, and what clipping by it leaves, is that of one process under every layout."""

import os
from functools import partial
from typing import Any

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from tests.parity.subjects import moe
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks

TP = {"tensor": {"size": 2, "mode": "1d"}}
PP = {"pipeline": {"size": 2, "partition": "uniform"}}
# By number of ranks: the expert-parallel size, further parallelism, the stage of ZeRO.
LAYOUTS: dict[int, list[tuple[int, dict[str, Any], int]]] = {
    2: [(2, {}, 0), (1, {}, 1), (2, {}, 1), (2, {}, 2), (2, {}, 3)],
    4: [(4, {}, 0), (2, {}, 0), (2, {}, 1), (2, {}, 2), (2, {}, 3), (2, TP, 0), (2, PP, 0), (2, PP, 1)],
    8: [(2, {**TP, **PP}, 0), (2, TP, 1)],
}
ROUTER = "top2"


def norms(layouts: list[tuple[int, dict[str, Any], int]]) -> list[list[float]]:
    """Return for each layout the norms that clipping reports, and those of one process."""
    found = []
    for ep_size, more, stage in layouts:
        for norm_type in (2.0, float("inf")):
            torch.manual_seed(7)
            plain = moe.Net(ROUTER, "ffn").double()
            config: dict[str, Any] = {"parallel": {"moe": ep_size, **more}}
            config |= {"zero": {"stage": stage}} if stage else {}
            config |= {"NUM_MICRO_BATCHES": 2} if "pipeline" in more else {}
            num_ranks = int(os.environ["WORLD_SIZE"])
            num_parts = num_ranks // (2 ** len(more))
            x, y = (part.double() if part.is_floating_point() else part for part in moe.make_batches(1)[0])
            loss_of = moe.make_loss(num_parts, 2 if "pipeline" in more else 1, moe.z_weight_of(ROUTER))
            loss_of(plain, (x, y)).backward()
            truth = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()], norm_type)
            colossalai.launch_from_torch(config, verbose=False)
            model = moe.cut_copy(plain, partial(moe.Net, ROUTER, "ffn"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = colossalai.initialize(model, optimizer, moe.criterion(), verbose=False)
            place = slice_of_batch()
            mine = (x.chunk(num_parts)[place["slice_index"]], y.chunk(num_parts)[place["slice_index"]])
            engine.zero_grad()
            engine.execute_schedule(iter([mine]), return_output_label=False)
            first = float(engine.optimizer.clip_grad_by_norm(0.05, norm_type))
            again = float(engine.optimizer.clip_grad_by_norm(0.05, norm_type))
            found.append([first, float(truth), again])
            gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_norms_are_those_of_one_process(num_ranks: int) -> None:
    layouts = [layout for layout in LAYOUTS[num_ranks] for _ in range(2)]
    for of_rank in run_ranks(norms, num_ranks, LAYOUTS[num_ranks]):
        for layout, (found, truth, again) in zip(layouts, of_rank, strict=True):
            assert truth > 0.055, "clipping has something to do"
            assert found == pytest.approx(truth, rel=1e-10), layout
            assert again == pytest.approx(0.05, rel=1e-4), layout
