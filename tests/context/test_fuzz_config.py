"""Whatever stands in a config: it launches a mesh, or a `ConfigException` says why not; and nothing hangs."""

import copy
import signal
from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossalai.context import ConfigException, ParallelContext, ParallelMode
from tests.harness.properties import PROFILE
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.mesh

NUM_EXAMPLES = [60, further(1_000), in_soak(10_000)]
EXAMPLE_TIMEOUT = 5.0  # for one of them; a hundredth of a second is usual

MODES = ["1d", "2d", "2.5d", "3d", "dap", "sequence"]
FEATURES = [
    "fp16",
    "gradient_accumulation",
    "clip_grad_norm",
    "gradient_handler",
    "gradient_handlers",
    "recompute",
]
FEATURES += ["zero", "NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE", "parallel"]

edges = st.sampled_from([0, -1, True, 2.0, "4", 2**31, 10**18, 10**400, torch.ones(2)])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    edges,
    st.floats(),
    st.sampled_from(["", "1", "2d", "3D", "torch", "dp", "size", b"2", object, torch.float16]),
    st.text(max_size=5),
)
keys = st.one_of(
    st.sampled_from(["size", "mode", "depth", "data", "tensor", "type", "stage", "fp_16"]), scalars
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys.filter(lambda key: not isinstance(key, torch.Tensor)), inner, max_size=3),
    ),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Draw a valid tensor part and its size."""
    mode = draw(st.sampled_from(MODES))
    q, depth = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = {"2d": q * q, "2.5d": depth * q * q, "3d": q**3}.get(mode, q)
    part = {"size": size, "mode": mode}
    if mode == "2.5d":
        part["depth"] = depth
    return part, size


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Draw a valid parallel part and the number of processes that it needs."""
    parallel: dict[str, Any] = {}
    world_size = 1
    if draw(st.integers(0, 3)):
        parallel["tensor"], world_size = draw(tensors())
    if draw(st.booleans()):
        pipeline = draw(st.integers(1, max(1, 64 // world_size)))
        parallel["pipeline"] = draw(st.sampled_from([pipeline, {"size": pipeline}]))
        world_size *= pipeline
    data = draw(st.integers(1, max(1, 64 // world_size)))
    if draw(st.booleans()):
        parallel["data"] = draw(st.sampled_from([data, {"size": data}]))
    if draw(st.booleans()):
        parallel["moe"] = {"size": draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0]))}
    return parallel, world_size * data


features = st.fixed_dictionaries(
    {},
    optional={
        "fp16": st.sampled_from([{"mode": "torch"}, {"mode": "bf16"}, {"mode": "torch", "init_scale": 2.0}]),
        "gradient_accumulation": st.integers(1, 8),
        "clip_grad_norm": st.floats(0, 10),
        "gradient_handler": st.just([{"type": "DataParallelGradientHandler"}]),
        "zero": st.sampled_from([{"stage": 1}, {"stage": 3, "cpu_offload": True}, {}]),
        "NUM_MICRO_BATCHES": st.integers(1, 8),
        "TENSOR_SHAPE": st.just((4, 8)),
        "recompute": st.sampled_from([True, "layers", ["a", "b"]]),
        "BATCH_SIZE": junk,
    },
)


def _places(config: dict[str, Any], depth: int = 3) -> list[tuple[dict[str, Any], str]]:
    """Return every (dict, key) of a config down to some depth."""
    places = [(config, key) for key in config]
    inner = [value for value in config.values() if isinstance(value, dict)] if depth > 1 else []
    return places + [place for value in inner for place in _places(value, depth - 1)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, int, int]:
    """Draw a config, a world size and a rank: often valid, often nearly so, sometimes nonsense."""
    parallel, world_size = draw(meshes())
    # A copy: what is damaged below must not be the element that hypothesis draws again.
    config: dict[str, Any] = copy.deepcopy({**draw(features), "parallel": parallel})
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        damage = draw(st.sampled_from(["replace", "replace", "add", "remove", "world"]))
        place, key = draw(st.sampled_from(_places(config) or [(config, "parallel")]))
        if damage == "replace":
            place[key] = draw(st.one_of(edges, junk))
        elif damage == "add":
            place[draw(st.one_of(st.sampled_from(FEATURES), keys.filter(_is_hashable)))] = draw(junk)
        elif damage == "remove":
            place.pop(key, None)
        else:
            world_size = draw(st.integers(1, 64))
    whole = draw(st.sampled_from([config] * 30 + [None, draw(junk)]))
    return whole, world_size, draw(st.integers(0, world_size - 1))


def _is_hashable(key: Any) -> bool:
    return not isinstance(key, torch.Tensor)


def _launch(config: Any, world_size: int, rank: int) -> str:
    """Do what `colossalai.launch` does once it has met the other ranks, on a fake process group."""
    context = ParallelContext()
    try:
        context.load_config(config)
        context.init_parallel_groups(rank=rank, world_size=world_size)
    except ConfigException:
        return "refused"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        _check_mesh(context, world_size, rank)
    finally:
        context.destroy()
    return "launched"


def _check_mesh(context: ParallelContext, world_size: int, rank: int) -> None:
    sizes = (context.data_parallel_size, context.pipeline_parallel_size, context.tensor_parallel_size)
    assert sizes[0] * sizes[1] * sizes[2] == world_size
    assert context.get_ranks_in_group(ParallelMode.GLOBAL) == list(range(world_size))
    for mode in filter(context.is_initialized, ParallelMode):
        ranks = context.get_ranks_in_group(mode)
        assert dist.get_process_group_ranks(context.get_group(mode)) == ranks
        assert ranks == sorted(set(ranks))
        assert ranks[context.get_local_rank(mode)] == rank
    for mode, size in zip(
        (ParallelMode.DATA, ParallelMode.PIPELINE, ParallelMode.TENSOR), sizes, strict=True
    ):
        assert context.get_world_size(mode) == size


def _say_it_hangs(signal_number: int, frame: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise TimeoutError(f"no end after {EXAMPLE_TIMEOUT:g} s")


def _fuzz(num_examples: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @hypothesis.settings(
        PROFILE,
        max_examples=num_examples,
        phases=[
            hypothesis.Phase.generate
        ],  # the examples are small, and shrinking one that hangs takes minutes
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(jobs())
    def launch(job: tuple[Any, int, int]) -> None:
        signal.setitimer(signal.ITIMER_REAL, EXAMPLE_TIMEOUT)
        outcomes[_launch(*job)] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)

    signal.signal(signal.SIGALRM, _say_it_hangs)
    launch()
    return outcomes


@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_a_config_launches_or_is_refused(num_examples: int) -> None:
    [outcomes] = run_ranks(_fuzz, 1, num_examples)
    assert outcomes.total() >= num_examples
    assert min(outcomes["launched"], outcomes["refused"]) > num_examples // 4, outcomes
