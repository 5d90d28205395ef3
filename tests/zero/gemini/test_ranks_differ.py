"""Ranks that differ: no gather is taken for another one, and who waits in vain is told where others are."""

import itertools
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.zero._exchange import start_meeting
from colossalai.zero.gemini import Gemini
from tests.monitor.hanging import notices, num_notices, wait_for
from tests.ranks import RanksError, run_ranks
from tests.tiers import after_the_first, further
from tests.zero.gemini.nets import put, trained

pytestmark = pytest.mark.dist
PATIENCE_S, USERS_S = 0.5, Gemini().patience
SHORT_S = 0.2  # where nobody gives up
WIDTH = 8
CHUNK = WIDTH * WIDTH  # elements: one layer
SOON = {"chunk_size": CHUNK, "patience": PATIENCE_S}
FLOAT, HALF = torch.float64, torch.bfloat16
WAYS = [("gloo", FLOAT), ("shared_memory", FLOAT), ("shared_memory", HALF)]
"""Over gloo, through memory by a collective whose headers are compared, and by messages."""


class Layers(nn.Module):
    """Layers that are equally large, in an order that the caller may choose."""

    def __init__(self, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "abc":
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype))

    def forward(self, x: torch.Tensor, order: str = "abc") -> torch.Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x.sum()


def launch(backend: str, folder: Path) -> int:
    options = {"timeout": 900.0, "notice": 1.0, "folder": str(folder)}
    colossalai.launch_from_torch({"watchdog": options}, backend=backend, verbose=False)
    return dist.get_rank()


def inputs(dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.ones(1, WIDTH, dtype=dtype)


def uses_another_order(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    put(net := Layers(dtype), **SOON)
    with torch.no_grad():
        net(inputs(dtype), order="bac" if rank == 1 else "abc")


def uses_another_model(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    nets = [Layers(dtype), Layers(dtype)]
    for net in nets:
        put(net, **SOON)
    nets[rank](inputs(dtype))


def runs_one_forward_less(backend: str, folder: Path, dtype: torch.dtype) -> None:
    train_on_rank_0_once_more(launch(backend, folder), dtype, PATIENCE_S)


def runs_one_forward_less_as_users_do() -> None:
    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    train_on_rank_0_once_more(dist.get_rank(), FLOAT, USERS_S)


def train_on_rank_0_once_more(rank: int, dtype: torch.dtype, patience: float) -> None:
    net = Layers(dtype)
    step = trained(net, put(net, CHUNK, patience=patience), partial(torch.optim.SGD, lr=0.1))
    step((inputs(dtype),))
    for _ in range(2 - rank):
        loss = net(inputs(dtype))
    loss.backward()


def is_in_another_collective(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    put(net := Layers(dtype), **SOON)
    if rank == 0:
        net(inputs(dtype))
    dist.all_reduce(torch.ones(1))


def enters_gathered_later(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    applied = put(net := Layers(dtype), **SOON)
    if rank == 1:
        net(inputs(dtype))
    with applied.gathered():
        pass


def loads_before_the_others(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    applied, state = put(net := Layers(dtype), **SOON), Layers(dtype).state_dict()
    if rank == 1:
        applied.load_state_dict(net, state)
    net(inputs(dtype))


A, B, C = (f"chunk {number} ({name}.weight)" for number, name in enumerate("abc"))
CASES: dict[Callable[..., None], tuple[str, str]] = {  # what rank 0 and rank 1 are said to be in
    uses_another_order: (f"in gather #1 of {A}", f"in gather #1 of {B}"),
    uses_another_model: (f"in gather #1 of {A}", f"in gather #1 of {A} of model 2"),
    runs_one_forward_less: (f"in gather #7 of {A} after update 1", f"was last in gather #6 of {C}"),
    loads_before_the_others: (f"in gather #1 of {A}", f"in gather #1 of {A} after update 1"),
    is_in_another_collective: (f"in gather #1 of {A}", "all_reduce"),
    enters_gathered_later: ("all_reduce", f"in gather #4 of {A}"),
}

ALIKE = (uses_another_model, loads_before_the_others)  # two gathers that differ, as of another order


@pytest.mark.parametrize(("backend", "dtype"), WAYS)
@pytest.mark.parametrize("case", [further(case) if case in ALIKE else case for case in CASES])
def test_all_ranks_are_told_where_each_is(
    tmp_path: Path, case: Callable[..., None], backend: str, dtype: torch.dtype
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(case, 2, backend, tmp_path, dtype)
    text = str(caught.value)
    lines = [line for line in text.splitlines() if re.search("Error: .*(cannot end|do not agree)", line)]
    assert len(lines) == 2, text  # each rank ends with it
    for line, place in itertools.product(lines, CASES[case]):
        assert place in line
        assert "whole_modules=[...]" in line


def has_left(backend: str, folder: Path, dtype: torch.dtype) -> None:
    rank = launch(backend, folder)
    put(net := Layers(dtype), **SOON)
    if rank == 0:
        net(inputs(dtype))
    gpc.destroy()


@pytest.mark.parametrize(("backend", "dtype"), after_the_first(WAYS[::-1]))
def test_for_a_rank_that_has_left_nobody_waits(tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(has_left, 2, backend, tmp_path, dtype)
    assert f"This rank was in gather #1 of {A}. " in str(caught.value)
    assert "whole_modules=[...]" in str(caught.value)


@pytest.mark.long
def test_with_the_patience_that_users_have_it_ends_long_before_the_timeout_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the report
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"HangError: gather #7 .* cannot end: "):
        run_ranks(runs_one_forward_less_as_users_do, 2)
    assert USERS_S == 10.0
    assert time.monotonic() - start > USERS_S


def has_answered(num_reports: int) -> bool:
    return num_notices() >= num_reports


def is_slow(backend: str, folder: Path) -> tuple[list[str], float]:
    """Train; rank 1 comes when a line has said that it is waited for, and when it was asked again."""
    with notices(folder) as told:
        rank = launch(backend, folder)
        net, twin = Layers(), Layers()
        make = partial(torch.optim.SGD, lr=0.1)
        step, optimizer = (
            trained(net, applied := put(net, CHUNK, patience=SHORT_S), make),
            make(twin.parameters()),
        )
        for number in range(3):
            if rank == 1 and number == 1:
                wait_for(told)
                wait_for(partial(has_answered, num_notices() + 2))
            step((inputs(),))
            train(twin, optimizer)
        far = apart(net, twin, applied)
        gpc.destroy()
        return told(), far


@pytest.mark.parametrize("backend", [further("gloo"), "shared_memory"])
def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, backend: str) -> None:
    (lines, *far), (_, also_far) = run_ranks(is_slow, 2, backend, tmp_path)
    assert max(*far, also_far) < 1e-12
    about = [line for line in lines if " in gather #4 " in line]  # a busy machine may make others wait
    assert len(about) == 1, lines
    gather = r"gather #4 of chunk 0 \(a.weight\) after update 1 in a"
    said = (
        rf".*: rank 0 waits for \d+ s in {gather} \(.*\): rank 1 \(.*\) did not enter {gather}; it is at hang"
    )
    assert re.match(said, about[0]), about


def evaluates_more_often(backend: str) -> tuple[float, float, int]:
    """Run other numbers of forwards inside of `gathered`, in other orders; train before it and after it."""
    colossalai.launch_from_torch({}, backend=backend, verbose=False)
    net, twin = Layers(), Layers()
    make = partial(torch.optim.SGD, lr=0.1)
    step, optimizer = trained(net, applied := put(net, **SOON), make), make(twin.parameters())
    far = 0.0
    for _ in range(2):
        step((inputs(),))
        train(twin, optimizer)
        with applied.gathered(), torch.no_grad():
            gathers = applied.cache.num_gathers
            for order in ("abc", "cab", "b", "cc")[: 3 * dist.get_rank() + 1]:
                far = max(far, (net(inputs(), order) - twin(inputs(), order)).abs().item())
            gathers -= applied.cache.num_gathers
    return far, apart(net, twin, applied), gathers


@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_inside_of_gathered_ranks_may_differ(backend: str) -> None:
    for far, apart_at_the_end, gathers in run_ranks(evaluates_more_often, 2, backend):
        assert max(far, apart_at_the_end) < 1e-12
        assert gathers == 0


def train(twin: Layers, optimizer: torch.optim.Optimizer) -> None:
    """Train as `trained` does, in one process."""
    optimizer.zero_grad()
    twin(inputs()).backward()
    optimizer.step()


def apart(net: Layers, twin: Layers, applied: Any) -> float:
    with applied.gathered():
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        return max((mine - other).abs().max().item() for mine, other in pairs)


def meets_beside_another_library(folder: Path) -> list[bool]:
    """Meet by stamps, as beside a gather on a device; rank 1 does so in another order."""
    colossalai.launch_from_torch({}, backend="gloo", verbose=False)
    axis = gpc.mesh.axis(gpc.mesh.batch_axes)
    first, second = 1 << 30, 1 << 30 | 1
    start_meeting(axis, first)()
    order = [first, second][:: -1 if dist.get_rank() == 1 else 1]
    waits = {stamp: start_meeting(axis, stamp) for stamp in order}
    for stamp in (second, first):  # they are found by their stamps, whatever came first
        waits[stamp]()
    gpc.destroy()
    return [True]


def test_a_stamp_beside_the_data_meets_its_like_only(tmp_path: Path) -> None:
    assert run_ranks(meets_beside_another_library, 2, tmp_path) == [[True]] * 2
