"""The norm of all gradients, and what clipping by it leaves, is that of one process under every layout."""

from itertools import starmap
from typing import Any

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from tests.parity.experts.tasks import moe_layers
from tests.parity.training import SEED
from tests.ranks import run_ranks
from tests.tiers import further

TP = {"tensor": {"size": 2, "mode": "1d"}}
PP = {"pipeline": {"size": 2, "partition": "uniform"}}
# By number of ranks: the expert-parallel size, further parallelism, the stage of ZeRO.
LAYOUTS: dict[int, list[tuple[int, dict[str, Any], int]]] = {
    4: [(2, TP, 0), (2, PP, 1)],
}
FURTHER: dict[int, list[tuple[int, dict[str, Any], int]]] = {
    2: [(1, {}, 1), (2, {}, 3), (2, {}, 0), (2, {}, 1), (2, {}, 2)],
    4: [(2, {}, 2), (2, {}, 0), (4, {}, 0), (2, {}, 1), (2, {}, 3), (2, PP, 0)],
    8: [(2, {**TP, **PP}, 0), (2, TP, 1)],
}


def norms(layouts: list[tuple[int, dict[str, Any], int]]) -> list[list[float]]:
    """Return for each layout the norms that clipping reports, and those of one process."""
    torch.set_default_dtype(torch.float64)
    task, found = moe_layers("top2", "ffn"), []
    for ep_size, more, stage in layouts:
        torch.manual_seed(SEED)
        plain = task.build()
        config: dict[str, Any] = {"parallel": {"moe": ep_size, **more}}
        config |= {"zero": {"stage": stage}} if stage else {}
        config |= {"NUM_MICRO_BATCHES": 2} if "pipeline" in more else {}
        colossalai.launch_from_torch(config, verbose=False)
        batch = task.batches()[0]
        task.loss(plain, batch).backward()
        torch.manual_seed(SEED)
        model = task.place(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = colossalai.initialize(model, optimizer, task.criterion(), verbose=False)
        mine = tuple(part.chunk(gpc.data_parallel_size)[gpc.mesh.axis_rank("dp")] for part in batch)
        for norm_type in (2.0, float("inf")):
            truth = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()], norm_type)
            engine.zero_grad()
            engine.execute_schedule(iter([mine]), return_output_label=False)
            first = float(engine.optimizer.clip_grad_by_norm(0.05, norm_type))
            again = float(engine.optimizer.clip_grad_by_norm(0.05, norm_type))
            found.append([first, float(truth), again])
        gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "layouts"), [*LAYOUTS.items(), *starmap(further, FURTHER.items())])
def test_norms_are_those_of_one_process(
    num_ranks: int, layouts: list[tuple[int, dict[str, Any], int]]
) -> None:
    twice = [layout for layout in layouts for _ in range(2)]
    for of_rank in run_ranks(norms, num_ranks, layouts):
        for layout, (found, truth, again) in zip(twice, of_rank, strict=True):
            assert truth > 0.055, "clipping has something to do"
            assert found == pytest.approx(truth, rel=1e-10), layout
            assert again == pytest.approx(0.05, rel=1e-4), layout
