"""Placement policies: where sections and states have their home, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colossalai.zero.gemini import Gemini
from colossalai.zero.gemini.planning._eviction import EvictionPlan, plan_evictions
from colossalai.zero.gemini.planning._policy import Home, ModelData, Placement, PlacementPolicy, Tiers
from colossalai.zero.gemini.planning._trace import Trace

pytestmark = pytest.mark.unit

C, H, D = Home.COMPUTE, Home.HOST, Home.DISK
NAMES = ("cuda", "cpu", "const", "auto", "nvme")

# Four chunks of 8 bytes over two ranks, with states of twice the bytes.
DATA = ModelData((8,) * 4, (4,) * 4, (8,) * 4)
# Chunk 3 is used first and 1 most often; 5 bytes are not model data at the peak. 21 bytes are needed there.
TRACE = Trace((3, 1, 2, 1, 0, 1), (0, 2, 5, 1, 0, 0))
DEVICE: Tiers = {C: 1000, H: None, D: None}


def homes(name: str, data: ModelData, tiers: Tiers, trace: Trace | None, **numbers: float) -> Placement:
    return PlacementPolicy(name, **numbers).place(data, tiers, trace)  # type: ignore[arg-type]


def test_cuda_and_cpu_have_one_home_each() -> None:
    for trace in (None, TRACE):
        assert homes("cuda", DATA, DEVICE, trace) == Placement((C,) * 4, (C,) * 4)
        assert homes("cpu", DATA, DEVICE, trace) == Placement((H,) * 4, (H,) * 4)


def test_without_an_accelerator_cpu_is_cuda() -> None:
    for tiers in ({C: None}, {C: 1000, D: None}):
        for trace in (None, TRACE):
            assert homes("cpu", DATA, tiers, trace) == homes("cuda", DATA, tiers, trace)
            assert homes("cpu", DATA, tiers, trace) == Placement((C,) * 4, (C,) * 4)


def test_const_fills_its_budget_in_the_order_of_first_use() -> None:
    placed = homes("const", DATA, DEVICE, TRACE, memory_budget=21 + 9)
    assert placed == Placement((H, C, H, C), (H,) * 4)
    assert homes("const", DATA, DEVICE, TRACE, memory_budget=21 + 4).sections == (H, H, H, C)
    assert homes("const", DATA, DEVICE, TRACE, memory_budget=21 + 12).sections == (H, C, C, C)
    smaller = replace(DATA, sections=(4, 4, 4, 20))  # what does not fit is passed over
    assert homes("const", smaller, DEVICE, TRACE, memory_budget=21 + 9).sections == (H, C, C, H)


def test_auto_keeps_the_sections_whose_stay_saves_most_bytes() -> None:
    placed = homes("auto", DATA, DEVICE, TRACE, memory_budget=21 + 4)
    assert placed == Placement((H, C, H, H), (H,) * 4)
    larger = replace(DATA, sections=(16, 4, 4, 4))  # 16 bytes once are more than 4 bytes three times
    assert homes("auto", larger, DEVICE, TRACE, memory_budget=21 + 16).sections == (C, H, H, H)


@pytest.mark.parametrize(("ratio", "num_states"), [(0.0, 0), (0.5, 1), (0.9, 1), (1.0, 2)])
def test_the_margin_holds_states_of_the_chunks_used_first(ratio: float, num_states: int) -> None:
    placed = homes("auto", DATA, DEVICE, TRACE, memory_budget=21 + 16 + 17, gpu_margin_mem_ratio=ratio)
    assert placed.sections == (C,) * 4
    assert [chunk for chunk in (3, 1, 2, 0) if placed.states[chunk] is C] == [3, 1][:num_states]


def test_nvme_puts_on_disk_what_does_not_fit_into_host_memory() -> None:
    placed = homes("nvme", DATA, DEVICE, TRACE, memory_budget=21 + 4, host_budget=8 + 3)
    assert placed == Placement((D, C, H, H), (D,) * 4)
    placed = homes("nvme", DATA, DEVICE, TRACE, memory_budget=21 + 4, host_budget=12 + 16)
    assert placed == Placement((H, C, H, H), (D, H, D, H))


@pytest.mark.parametrize("name", ["auto", "nvme", "const"])
def test_without_an_accelerator_the_disk_lies_below_memory(name: str) -> None:
    placed = homes(name, DATA, {C: None, D: None}, TRACE, memory_budget=21 + 12)
    assert placed.sections.count(C) == 3
    assert placed.states == (D,) * 4
    placed = homes(name, DATA, {C: None, D: None}, TRACE, memory_budget=21 + 16 + 10)
    assert placed == Placement((C,) * 4, (D, D, D, C))  # states have the rest of memory without a margin


def test_before_a_trace_model_data_is_held_to_a_part_of_the_budget() -> None:
    policy = PlacementPolicy("auto", memory_budget=100, warmup_ratio=0.3, gpu_margin_mem_ratio=1.0)
    placed = policy.place(DATA, DEVICE)
    assert placed == Placement((C, C, C, H), (H,) * 4)  # 30 bytes, 16 of them for two chunks, and 2 are left
    assert policy.chunk_budget(placed, DATA, DEVICE) == 18
    placed = policy.place(DATA, DEVICE, TRACE)
    assert placed == Placement((C,) * 4, (C,) * 4)
    assert policy.chunk_budget(placed, DATA, DEVICE, TRACE) == 100 - 16 - 32
    tight = replace(policy, warmup_ratio=0.1)
    assert tight.place(DATA, DEVICE).sections == (H,) * 4
    assert tight.chunk_budget(tight.place(DATA, DEVICE), DATA, DEVICE) == DATA.two_chunks


def test_without_a_bound_everything_is_on_the_compute_tier() -> None:
    for tiers in ({C: None}, {C: None, D: None}):
        for trace in (None, TRACE):
            policy = PlacementPolicy("auto")
            placed = policy.place(DATA, tiers, trace)
            assert placed == Placement((C,) * 4, (C,) * 4)
            assert policy.chunk_budget(placed, DATA, tiers, trace) is None
    on_device = homes("auto", DATA, {C: None, H: None}, TRACE)
    assert on_device == Placement((C,) * 4, (H,) * 4)  # the margin is none


def test_with_one_rank_a_section_at_home_is_the_chunk_itself() -> None:
    alone = ModelData((8,) * 4, (8,) * 4, (0,) * 4)
    placed = homes("auto", alone, DEVICE, TRACE, memory_budget=21 + 8)
    assert placed.sections == (H, C, H, H)
    assert placed.bytes_when_present(alone) == (8, 0, 8, 8)
    assert placed.bytes_when_present(DATA) == (8,) * 4
    assert homes("cuda", alone, {C: 32, H: None}, None).sections == (C,) * 4


@st.composite
def situations(draw: st.DrawFn) -> tuple[PlacementPolicy, ModelData, Tiers, Trace | None]:
    num_chunks = draw(st.integers(2, 7))
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    chunks = [num_ranks * draw(st.integers(1, 9)) for _ in range(num_chunks)]
    sections = [chunk // num_ranks for chunk in chunks]
    data = ModelData(tuple(chunks), tuple(sections), tuple(2 * section for section in sections))
    uses = draw(st.lists(st.integers(0, num_chunks - 1), min_size=1, max_size=12))
    trace = Trace(tuple(uses), tuple(draw(st.integers(0, 9)) for _ in uses))
    budget = max(data.two_chunks + 9, data.most_updated) + draw(st.integers(0, 80))
    policy = PlacementPolicy(
        draw(st.sampled_from(["const", "auto", "nvme"])),
        memory_budget=budget,
        warmup_ratio=draw(st.sampled_from([0.0, 0.3, 1.0])),
        gpu_margin_mem_ratio=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    host = draw(st.integers(0, 60)) if policy.name == "nvme" else None
    tiers = draw(st.sampled_from([{C: None, D: None}, {C: budget, H: host, D: None}]))
    return policy, data, tiers, draw(st.sampled_from([None, trace]))


@settings(max_examples=200)
@given(situations())
def test_homes_stay_within_the_tiers_and_leave_what_an_iteration_needs(
    situation: tuple[PlacementPolicy, ModelData, Tiers, Trace | None],
) -> None:
    policy, data, tiers, trace = situation
    placed = policy.place(data, tiers, trace)
    assert placed == policy.place(data, dict(reversed(tiers.items())), trace)  # and a function of values
    for home in Home:
        bound = tiers.get(home, 0) if home is not C else policy.memory_budget
        assert placed.bytes_at(home, data) <= (math.inf if bound is None else bound)
    if H not in tiers and D in {*placed.sections, *placed.states}:  # what lies there is updated in memory
        assert placed.bytes_at(C, data) + data.most_updated <= policy.memory_budget
    left = policy.chunk_budget(placed, data, tiers, trace)
    assert left is not None
    assert policy.memory_budget is not None
    if trace is None:
        most = max(policy.warmup_ratio * policy.memory_budget, data.two_chunks)
        assert data.two_chunks <= left <= most - placed.bytes_at(C, data)
    else:
        assert isinstance(plan_evictions(trace, data.chunks, left), EvictionPlan)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"name": "gpu"}, "'gpu' is unknown: it is one of cuda, cpu, const, auto, nvme"),
        ({"name": "const"}, "fixed budget: give memory_budget"),
        ({"name": "auto", "memory_budget": -1}, "memory_budget=-1: .* 0 or more"),
        ({"name": "nvme", "host_budget": -5}, "host_budget=-5: .* 0 or more"),
        ({"name": "auto", "warmup_ratio": 1.5}, "warmup_ratio=1.5: .* from 0 to 1"),
        ({"name": "auto", "gpu_margin_mem_ratio": -0.1}, "gpu_margin_mem_ratio=-0.1: .* from 0 to 1"),
        ({"name": "auto", "gpu_margin_mem_ratio": math.nan}, "gpu_margin_mem_ratio=nan"),
    ],
)
def test_bad_numbers_are_refused(numbers: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PlacementPolicy(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "tiers", "trace", "words"),
    [
        (PlacementPolicy("nvme"), {C: 100, H: 100}, None, "needs a disk: give offload_dir"),
        (PlacementPolicy("nvme"), {C: 100, H: None, D: None}, None, "no bound: give host_budget"),
        (PlacementPolicy("nvme"), {C: None, D: None}, None, "no bound: give memory_budget"),
        (
            PlacementPolicy("auto", memory_budget=100),
            {C: None},
            None,
            "nothing lies below memory.*offload_dir",
        ),
        (
            PlacementPolicy("auto", host_budget=9),
            {C: None, D: None},
            None,
            "host_budget=9.*give memory_budget",
        ),
        (PlacementPolicy("auto"), {C: 15, H: None}, None, "has 15 bytes.*memory_budget=16 would do"),
        (PlacementPolicy("auto"), {C: 20, H: None}, TRACE, "16 for .* and 5 as .*memory_budget=21 would do"),
        (
            PlacementPolicy("cuda"),
            {C: 63, H: None},
            None,
            "compute tier has 63 bytes.*memory_budget=64 would",
        ),
        (PlacementPolicy("cuda"), {C: 68, H: None}, TRACE, "memory_budget=69 would do, or .*'auto'"),
        (PlacementPolicy("cpu"), {C: 50, H: 47}, None, "host memory has 47 bytes.*host_budget=48 .*'nvme'"),
        (PlacementPolicy("auto"), {C: 25, H: 43, D: None}, TRACE, "host memory has 43 .*=44 would.*'nvme'"),
        (
            PlacementPolicy("nvme"),
            {C: 16, H: 4, D: 40},
            None,
            "disk has 40 bytes.*offload_dir has .* 44 bytes",
        ),
    ],
)
def test_what_cannot_be_done_on_these_tiers_is_refused(
    policy: PlacementPolicy, tiers: Tiers, trace: Trace | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        policy.place(DATA, tiers, trace)


def test_what_lies_on_disk_is_updated_within_the_budget() -> None:
    """24 bytes of a chunk are in memory while it is updated, which is more than an iteration needs."""
    data, tiers = replace(DATA, states=(20,) * 4), {C: None, D: None}
    assert homes("auto", data, tiers, TRACE, memory_budget=24 + 4).sections == (D, C, D, D)
    assert homes("auto", data, tiers, TRACE, memory_budget=24 + 3).sections == (D,) * 4
    with pytest.raises(ValueError, match=r"has 23 .* update the largest chunk takes 24 .*budget=24 would do"):
        homes("auto", data, tiers, TRACE, memory_budget=23)


@pytest.mark.parametrize("trace", [None, TRACE])
@pytest.mark.parametrize("name", NAMES)
def test_the_number_in_a_refusal_would_do(name: str, trace: Trace | None) -> None:
    """Raise the budget of memory, and then of the host, to what the errors say, until there is none."""
    numbers: dict[str, int] = {"memory_budget": 1, "host_budget": 1}
    for _ in range(4):
        try:
            assert homes(name, DATA, DEVICE, trace, **numbers)
            return
        except ValueError as error:
            words = [word.split("=") for word in str(error).split() if "_budget=" in word]
            (budget, number) = words[0]
            assert int(number) > numbers[budget]
            numbers[budget] = int(number)
    pytest.fail(f"still refused with {numbers}")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"nvme"}))
def test_a_disk_that_is_never_used_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"offload_dir has no effect under placement_policy='{name}'.*'nvme'"
    ):
        PlacementPolicy(name, memory_budget=100).check({C: None, H: None, D: None})


def test_what_no_tier_can_do_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    for options, words in (
        ({"memory_budget": 1 << 30}, "nothing lies below memory: give offload_dir"),
        ({"memory_budget": -1, "offload_dir": tmp_path}, "memory_budget=-1: it is a number of bytes"),
        ({"host_budget": 1 << 30}, "without an accelerator memory is the compute tier: give memory_budget"),
        ({"placement_policy": "const"}, "'const' has a fixed budget: give memory_budget"),
        ({"placement_policy": "nvme"}, "'nvme' needs a disk: give offload_dir"),
        ({"placement_policy": "nvme", "offload_dir": tmp_path}, "has no bound: give memory_budget"),
        ({"offload_dir": tmp_path}, "offload_dir has no effect without .* give memory_budget"),
        ({"offload_dir": "/proc/nowhere"}, "offload_dir is '/proc/nowhere', and no file can be made there"),
        ({"warmup_ratio": 1.5}, "warmup_ratio=1.5: it is a part of memory"),
        ({"keeps_grads": True, "offload_dir": tmp_path}, "offload_dir in a pipeline"),
    ):
        with pytest.raises(ValueError, match=words):
            Gemini(**options).check(nn.Linear(2, 2), [], blocks=[], replicas=None)
    with pytest.raises(ValueError, match=r"placement_policy is 'gpu'; it must be one of \['cuda', 'cpu', "):
        Gemini(placement_policy="gpu")
