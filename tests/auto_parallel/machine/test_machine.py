"""`MachineProfile` and `time_of`: files, links of any grid, and costs that grow with what is to be done."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.auto_parallel.machine._machine import (
    LinkLevel,
    MachineProfile,
    kind_of,
    links_of_speed,
    optimizer_time,
    ranks_of_a_host,
    shipped_profile,
    time_of,
)
from colossalai.auto_parallel.machine._rates import (
    FLOP_KINDS,
    ByteCurve,
    FlopRate,
    Kind,
    OpRate,
    OptimizerRate,
    Rates,
    optimizer_bytes,
)
from colossalai.device import OPERATIONS, AlphaBeta, Machine, MeshSpeed

pytestmark = pytest.mark.unit

KINDS = get_args(Kind)
SHIPPED = ("a100-80gb", "cpu-2-cores", "cpu-2-cores-gloo", "h100")
PUBLISHED = ("a100-80gb", "h100")
AMOUNTS = st.floats(0, 1e13)
EXTENTS = st.tuples(*[st.integers(1, 10**5)] * 3)


def some_profile() -> MachineProfile:
    """Return a profile with numbers that have no short decimal form."""
    curve = ByteCurve((1e3 / 3, 1e6), (0.1e-6, 1e-3 / 7))
    rate = OpRate(1e-5 / 3, curve)
    product = OpRate(1e-5, curve, FlopRate(1e11 / 3, (1e-12, 0.0, 1e-11 / 3)))
    kinds = {kind: product if kind in FLOP_KINDS else rate for kind in KINDS}
    operations = {
        kind: {
            "float32": {"forward": each, "backward": each},
            "bfloat16": {"forward": each, "backward": each},
        }
        for kind, each in kinds.items()
    }
    line = AlphaBeta(1e-5 / 3, 1e-9 / 7, 0.1)
    return MachineProfile(
        name="some",
        created="2026-11-25T10:00:00+00:00",
        machine=Machine(("a", "a"), (2, 2), "cpu", "gloo", "2.13.0"),
        rates=Rates(
            device="cpu",
            num_threads=1,
            num_ranks=2,
            operations=operations,
            optimizers={"adamw": OptimizerRate(1e-5, 1e-6 / 3, curve)},
        ),
        links=(LinkLevel(num_ranks=None, lines=dict.fromkeys(OPERATIONS, line)),),
    )


def test_a_file_holds_everything(tmp_path: Path) -> None:
    profile = some_profile()
    profile.save(tmp_path / "machine.json")
    assert MachineProfile.load(tmp_path / "machine.json") == profile
    assert MachineProfile.from_json(profile.to_json()).to_json() == profile.to_json()
    assert replace(profile, source={"peaks": "a sheet"}).is_published
    assert not profile.is_published


DAMAGES: list[tuple[list[Any], Any, str]] = [
    (["format"], "another", "its format is 'another'"),
    (["version"], 2, "it has version 2, and this package reads 1"),
    (["rates", "efficiency"], 0.0, "its efficiency is 0.0"),
    (["rates", "operations", "norm", "float32", "forward", "overhead"], -1.0, "overhead is -1.0, negative"),
    (["rates", "operations", "norm", "float32", "forward", "curve", "sizes"], [2.0, 1.0], "both must ascend"),
    (["rates", "operations", "norm", "float32", "forward", "curve", "seconds"], [1.0], "both must ascend"),
    (["rates", "operations", "product", "float32", "backward", "flops", "peak"], 0.0, "a peak is 0"),
    (["rates", "operations", "product", "float32", "backward", "flops", "sides"], [1.0], "not enough values"),
    (["rates", "operations", "norm", "float32"], {}, "it has no 'forward'"),
    (["rates", "operations", "nosuch"], {}, "rates of a kind 'nosuch'"),
    (["links", 0, "num_ranks"], 2, "last level of links does not hold for any number of ranks"),
    (["links", 0, "lines", "all_reduce", "beta"], math.nan, "beta is nan, negative or not finite"),
    (["machine"], None, ""),
]


@pytest.mark.parametrize(("place", "value", "message"), DAMAGES)
def test_a_damaged_file_is_refused(place: list[Any], value: Any, message: str) -> None:
    content = json.loads(some_profile().to_json())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=rf"machine\.json is not a machine profile: .*{message}"):
        MachineProfile.from_json(json.dumps(content), name="machine.json")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nosuch\.json cannot be read"):
        MachineProfile.load(tmp_path / "nosuch.json")
    with pytest.raises(ValueError, match="the text is not a machine profile"):
        MachineProfile.from_json("[]")
    with pytest.raises(ValueError, match="the text is not a machine profile: it has no 'format'"):
        MachineProfile.from_json("{}")


@settings(max_examples=200)
@given(
    st.sampled_from(SHIPPED),
    st.sampled_from(KINDS),
    EXTENTS,
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    AMOUNTS,
    st.booleans(),
)
def test_more_takes_no_less(name, kind, shape, flops, more_flops, num_bytes, more_bytes, is_backward) -> None:
    profile = PROFILES[name]

    def seconds(flops: float, num_bytes: float) -> float:
        return time_of(
            profile,
            flops=flops,
            bytes=num_bytes,
            kind=kind,
            dtype=torch.float32,
            shape=shape,
            is_backward=is_backward,
        )

    least = seconds(flops, num_bytes)
    assert 0 <= seconds(0, 0) <= least < math.inf
    assert least <= seconds(flops + more_flops, num_bytes)
    assert least <= seconds(flops, num_bytes + more_bytes)


@settings(max_examples=100)
@given(st.sampled_from(SHIPPED), st.sampled_from(FLOP_KINDS), EXTENTS, EXTENTS, st.booleans())
def test_larger_extents_have_a_higher_rate_and_a_longer_time(name, kind, shape, more, is_backward) -> None:
    larger = tuple(extent + each for extent, each in zip(shape, more, strict=True))
    dtype = {"dtype": torch.float32, "kind": kind, "is_backward": is_backward, "bytes": 0.0}
    profile = PROFILES[name]
    small = time_of(profile, flops=2.0 * math.prod(shape), shape=shape, **dtype)
    large = time_of(profile, flops=2.0 * math.prod(larger), shape=larger, **dtype)
    assert small <= large * (1 + 1e-12)
    same_work = {"flops": 1e12, **dtype}
    assert time_of(profile, shape=larger, **same_work) <= time_of(profile, shape=shape, **same_work) * (
        1 + 1e-12
    )
    assert time_of(profile, **same_work) <= time_of(profile, shape=larger, **same_work)


def test_the_time_is_the_longer_one_of_flops_and_bytes() -> None:
    rate = OpRate(1.0, ByteCurve((10.0, 20.0), (2.0, 3.0)), FlopRate(100.0, (0.1, 0.2, 0.4)))
    profile = some_profile()
    operations = {"product": {"float32": {"forward": rate, "backward": replace(rate, overhead=5.0)}}}
    profile = replace(profile, rates=replace(profile.rates, operations=operations, efficiency=0.5))

    def seconds(flops: float, num_bytes: float, **options: Any) -> float:
        options = {"kind": "product", "dtype": torch.float32, **options}
        return time_of(profile, flops=flops, bytes=num_bytes, **options)

    assert seconds(0, 5) == 1 + 1
    assert seconds(0, 15) == 1 + 2.5
    assert seconds(0, 40) == 1 + 6, "the bandwidth of the largest size"
    assert seconds(400, 40) == 1 + 8
    assert seconds(400, 40, is_backward=True) == 5 + 8
    per_flop = 1 / 100 + 0.1 / 2 + 0.2 / 4 + 0.4 / 8
    assert seconds(400, 0, shape=(7, 2, 4, 8)) == pytest.approx(1 + 2 * 400 * per_flop)
    assert seconds(400, 40, dtype=torch.float64) == 1 + 16
    assert seconds(0, 40, dtype=torch.float64) == 1 + 6, "its bytes are twice as many already"
    assert seconds(400, 0, dtype=torch.float16) == 1 + 8
    with pytest.raises(ValueError, match="the profile has no rates of kind 'norm'"):
        seconds(1, 1, kind="norm")


def test_a_type_that_was_not_measured_runs_as_another() -> None:
    profile = some_profile()
    by_dtype = dict(profile.rates.operations["product"])
    slow = {direction: replace(rate, flops=FlopRate(1e9)) for direction, rate in by_dtype["bfloat16"].items()}
    operations = {**profile.rates.operations, "product": {**by_dtype, "bfloat16": slow}}
    profile = replace(profile, rates=replace(profile.rates, operations=operations))

    def seconds(dtype: torch.dtype) -> float:
        return time_of(profile, flops=1e12, bytes=0, kind="product", dtype=dtype)

    assert seconds(torch.float16) == seconds(torch.bfloat16) > 10 * seconds(torch.float32)
    assert seconds(torch.int64) == seconds(torch.float32)
    assert seconds(torch.float64) > 1.9 * seconds(torch.float32)


def test_mistakes_are_said() -> None:
    profile = some_profile()
    right: dict[str, Any] = {"flops": 1, "bytes": 1, "kind": "product", "dtype": torch.float32}
    for wrong, message in (
        ({"flops": -1}, "flops=-1, bytes=1: give finite numbers of 0 or more"),
        ({"bytes": math.nan}, "bytes=nan: give finite"),
        ({"kind": "products"}, "kind='products': choose one of .*; did you mean 'product'"),
        ({"shape": (2, 3)}, r"shape=\(2, 3\) of kind 'product': give three extents above 0"),
        ({"shape": (2, 0, 3)}, "give three extents above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            time_of(profile, **(right | wrong))
    with pytest.raises(ValueError, match="optimizer='lamb': the profile 'some' has adamw"):
        optimizer_time(profile, optimizer="lamb", bytes=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes=-1, num_tensors=1: give finite"):
        optimizer_time(profile, optimizer="adamw", bytes=-1)
    with pytest.raises(ValueError, match=r"shape=\(0, 2\): give at least one extent"):
        profile.mesh_speed((0, 2))
    with pytest.raises(ValueError, match="the profile 'some' has no links between ranks"):
        replace(profile, links=()).mesh_speed((2,))
    assert replace(profile, links=()).mesh_speed((1, 1)).cost("all_reduce", 1e9, "0") == 0
    with pytest.raises(ValueError, match="no shipped profile 'v100': choose one of a100-80gb, cpu-2-cores"):
        shipped_profile("v100")


def test_a_step_of_an_optimizer() -> None:
    profile = some_profile()
    num_bytes = optimizer_bytes("adamw", 4e6)
    assert num_bytes == 7 * 4e6
    expected = 1e-5 + 100 * 1e-6 / 3 + 1e-3 / 7 * 28
    assert optimizer_time(profile, optimizer="adamw", bytes=num_bytes, num_tensors=100) == pytest.approx(
        expected
    )


def test_links_of_one_level_are_a_ring() -> None:
    profile = some_profile()
    line = profile.links[0].lines["all_reduce"]
    for shape in ((2,), (4, 2), (3, 2, 2)):
        alphas, betas = [line.alpha] * len(shape), [line.beta] * len(shape)
        speed, ring = profile.mesh_speed(shape), MeshSpeed.of_links(shape, alphas, betas)
        for axes in ("0", str(len(shape) - 1), tuple(map(str, range(len(shape))))):
            for op in OPERATIONS:
                assert speed.cost(op, 1e6, axes) == pytest.approx(ring.cost(op, 1e6, axes), rel=1e-12)
    assert profile.mesh_speed((2, 1)).machine == profile.machine
    assert profile.mesh_speed((4,)).machine is None


def test_links_between_machines_are_shared_by_rings() -> None:
    """8 ranks in each machine, ten times as far between machines as within."""
    near, far = AlphaBeta(1e-6, 1e-11), AlphaBeta(1e-5, 1e-10)
    profile = replace(
        some_profile(),
        links=(
            LinkLevel(num_ranks=8, lines=dict.fromkeys(OPERATIONS, near)),
            LinkLevel(num_ranks=None, lines=dict.fromkeys(OPERATIONS, far)),
        ),
    )
    n = 1e9

    def cost(shape: tuple[int, ...], *axes: str) -> float:
        return profile.mesh_speed(shape).cost("all_gather", n, axes)

    assert cost((4, 8), "1") == pytest.approx(7 * 1e-6 + 7 / 8 * 1e-11 * n)
    assert cost((4, 8), "0") == pytest.approx(3 * 1e-5 + 3 / 4 * 1e-10 * n)
    # 2 of 4 ranks of a group are in a machine: two rings share the way.
    assert cost((2, 2, 8)[::-1], "0") == pytest.approx(7 * 1e-5 + 7 / 8 * (1e-10 / 2) * n)
    # 3 adjacent ranks of 24: some groups have one rank alone in a machine, and all cost what those do.
    assert cost((8, 3), "1") == pytest.approx(2 * 1e-5 + 2 / 3 * 1e-10 * n)
    # All 8 ranks of each machine: the way out is 8 times as wide.
    assert cost((4, 8), "0", "1") == pytest.approx(31 * 1e-5 + 31 / 32 * (1e-10 / 8) * n)
    # 16 devices at once could be faster than the links within a machine, which the rings go along, too.
    fast = replace(profile.links[1], lines=dict.fromkeys(OPERATIONS, AlphaBeta(1e-5, 2e-11)))
    profile = replace(profile, links=(profile.links[0], fast))
    assert cost((4, 8), "0", "1") == pytest.approx(31 * 1e-5 + 31 / 32 * 1e-11 * n)


def test_links_follow_from_a_measured_grid() -> None:
    near, far = (1e-6, 1e-5), (1e-10, 1e-9)
    levels = links_of_speed(MeshSpeed.of_links((2, 4), near[::-1], far[::-1]))
    assert [level.num_ranks for level in levels] == [4, None]
    for level, alpha, beta in zip(levels, near, far, strict=True):
        for op in OPERATIONS:
            assert level.lines[op].alpha == pytest.approx(alpha)
            assert level.lines[op].beta == pytest.approx(beta)
    assert [level.num_ranks for level in links_of_speed(MeshSpeed.of_links((4,), [1.0], [1.0]))] == [None]


def test_hosts_with_equal_numbers_of_adjacent_ranks() -> None:
    assert ranks_of_a_host("aabb") == 2
    assert ranks_of_a_host("aaaa") == 4
    assert ranks_of_a_host("ab") == 1
    for irregular in ("aab", "abab", "aabbb"):
        assert ranks_of_a_host(irregular) == len(irregular)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_load(name: str) -> None:
    profile = PROFILES[name]
    assert profile.name == name
    assert profile.is_published == (name in PUBLISHED)
    assert set(profile.rates.operations) == set(KINDS)
    assert profile.rates.operations["product"].keys() >= {"float32", "bfloat16"}
    assert {*profile.rates.optimizers} == {"adamw", "sgd"}
    speed = profile.mesh_speed((16, 8, 8))
    assert speed.cost("all_reduce", 1e8, "2") <= speed.cost("all_reduce", 1e8, ("0", "1"))
    assert MachineProfile.from_json(profile.to_json()) == profile
    backends = {"cpu-2-cores": "shared_memory", "cpu-2-cores-gloo": "gloo"}
    assert profile.machine.backend == backends.get(name, "nccl")


def test_published_figures_are_those_of_the_sheets() -> None:
    for name, flops, bandwidth in (("a100-80gb", 312e12, 2.039e12), ("h100", 989.4e12, 3.35e12)):
        profile = PROFILES[name]
        costs = {"dtype": torch.bfloat16, "kind": "product"}
        overhead = time_of(profile, flops=0, bytes=0, **costs)
        assert time_of(profile, flops=flops, bytes=0, **costs) - overhead == pytest.approx(1 / 0.6)
        assert time_of(profile, flops=0, bytes=bandwidth, **costs) - overhead == pytest.approx(1)
        assert {"peaks", "memory", "network", "efficiency"} <= set(profile.source)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("aten.addmm.default", "product"),
        ("aten::conv2d", "convolution"),
        ("aten.scaled_dot_product_attention.default", "attention"),
        ("aten.add.Tensor", "elementwise"),
        ("aten._log_softmax.default", "softmax"),
        ("aten.transpose.int", "view"),
        ("mylib.fancy.default", "elementwise"),
    ],
)
def test_kinds_of_operators(target: str, kind: str) -> None:
    assert kind_of(target) == kind


PROFILES = {name: shipped_profile(name) for name in SHIPPED}
