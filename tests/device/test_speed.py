"""What operations cost: formulas of rings, measured lines, and groups that were not measured."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossalai.device import OPERATIONS, AlphaBeta, Machine, MeshSpeed
from colossalai.device._speed import extents_of, is_within, of_link, over_ring
from colossalai.device._speed_file import from_json, to_json

pytestmark = pytest.mark.unit

HERE = Machine(("a", "a", "b", "b"), (8, 8, 8, 8), "cpu", "gloo", "2.13.0")
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def measured(shape: tuple[int, ...] = (2, 2)) -> MeshSpeed:
    """Return a speed with a line of its own for every kind of groups and operation."""
    kinds = {extents_of(shape, axes) for axes in ((0,), (1,), (0, 1))}
    lines = {
        extents: {
            op: AlphaBeta(1e-4 * (1 + number), 1e-9 * (1 + kind), 0.1) for number, op in enumerate(OPERATIONS)
        }
        for kind, extents in enumerate(sorted(kinds))
    }
    return MeshSpeed(shape, lines, HERE)


def groups_along(shape: tuple[int, ...], axes: tuple[int, ...]) -> set[frozenset[int]]:
    """Return the groups along some axes of a grid, by the definition."""
    found: dict[tuple[int, ...], set[int]] = {}
    for place, position in enumerate(itertools.product(*map(range, shape))):
        rest = tuple(each for axis, each in enumerate(position) if axis not in axes)
        found.setdefault(rest, set()).add(place)
    return {frozenset(group) for group in found.values()}


def test_costs_of_links_are_those_of_a_ring() -> None:
    speed = MeshSpeed.of_links((2, 4), [1e-3, 1e-6], [1e-8, 1e-10])
    n = 1e6
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert speed.cost(op, n, "1") == pytest.approx(3 * 1e-6 + 3 / 4 * 1e-10 * n, rel=1e-12)
    assert speed.cost("all_reduce", n, "1") == pytest.approx(6 * 1e-6 + 6 / 4 * 1e-10 * n, rel=1e-12)
    assert speed.cost("point_to_point", n, "1") == pytest.approx(1e-6 + 1e-10 * n, rel=1e-12)
    assert speed.cost("all_gather", n, ["0"]) == pytest.approx(1e-3 + 1 / 2 * 1e-8 * n, rel=1e-12)
    both = 7 * 1e-3 + 7 / 8 * 1e-8 * n  # a ring through both axes is as slow as the slower one
    assert speed.cost("all_gather", n, ("0", "1")) == pytest.approx(both, rel=1e-12)
    assert speed.cost("all_gather", n, ("1", "0")) == pytest.approx(both, rel=1e-12)


@given(st.sampled_from(OPERATIONS), st.integers(2, 64), st.floats(1e-7, 1.0), st.floats(1e-12, 1e-6))
def test_a_line_over_a_ring_gives_its_links_back(op: str, num_ranks: int, alpha: float, beta: float) -> None:
    line = of_link(op, over_ring(op, AlphaBeta(alpha, beta, 0.2), num_ranks), num_ranks)
    assert line.alpha == pytest.approx(alpha, rel=1e-12)
    assert line.beta == pytest.approx(beta, rel=1e-12)
    assert line.error == 0.2


def test_what_was_measured_is_taken_as_it_is() -> None:
    speed = measured()
    for axes, numbers in (("0", (0,)), (["1"], (1,)), (("0", "1"), (0, 1))):
        for op in OPERATIONS:
            line = speed.lines[extents_of((2, 2), numbers)][op]
            assert speed.cost(op, 3e5, axes) == line.alpha + 3e5 * line.beta


@given(SHAPES, SHAPES, st.data())
def test_groups_are_told_apart_in_any_grid(one: tuple[int, ...], two: tuple[int, ...], data: st.DataObject):
    """Extents say which groups are meant, and `is_within` what lies in what, as the definition does."""
    factors = [extent for extent in one if extent > 1]
    another = data.draw(st.sampled_from([tuple(factors), tuple(factors[::-1]), (math.prod(one),), (*one, 1)]))
    one, two = one, another or (1,)
    first = data.draw(st.sets(st.integers(0, len(one) - 1), min_size=1).map(lambda axes: tuple(sorted(axes))))
    second = data.draw(
        st.sets(st.integers(0, len(two) - 1), min_size=1).map(lambda axes: tuple(sorted(axes)))
    )
    inner, outer = groups_along(one, first), groups_along(two, second)
    assert (extents_of(one, first) == extents_of(two, second)) == (inner == outer)
    lies_in = all(any(group <= other for other in outer) for group in inner)
    assert is_within(extents_of(one, first), extents_of(two, second), math.prod(one)) == lies_in


def test_other_groups_cost_what_the_smallest_around_them_say() -> None:
    """Two hosts of 8 ranks: an axis of 4 ranks of a host is fast, one over both of them slow."""
    hosts = MeshSpeed.of_links((2, 8), [1e-3, 1e-6], [1e-8, 1e-10])
    other = hosts.of_shape((4, 4))
    assert other.cost("all_gather", 1e6, "1") == pytest.approx(3 * 1e-6 + 3 / 4 * 1e-10 * 1e6, rel=1e-12)
    assert other.cost("all_gather", 1e6, "0") == pytest.approx(3 * 1e-3 + 3 / 4 * 1e-8 * 1e6, rel=1e-12)
    assert other.cost("all_reduce", 1e6, ["0", "1"]) == hosts.cost("all_reduce", 1e6, ["0", "1"])
    assert hosts.of_shape((2, 2, 4)).cost("all_to_all", 1e6, ("1", "2")) == hosts.cost("all_to_all", 1e6, "1")
    assert hosts.of_shape((16, 1)).cost("all_reduce", 1e9, "1") == 0.0


def test_a_group_must_lie_in_the_measured_one_everywhere() -> None:
    """Of 12 ranks those of an axis of 4 hold 0, 1, 2 but not 3, 4, 5: these take the line of all."""
    speed = MeshSpeed.of_links((3, 4), [1e-3, 1e-6], [0.0, 0.0])
    assert speed.of_shape((4, 3)).cost("all_gather", 0, "1") == pytest.approx(2 * 1e-3, rel=1e-12)
    assert speed.of_shape((3, 2, 2)).cost("all_gather", 0, "2") == pytest.approx(1e-6, rel=1e-12)


def test_mistakes_are_said() -> None:
    speed = measured()
    with pytest.raises(ValueError, match=r"op='allgather': choose one of all_gather, reduce_scatter"):
        speed.cost("allgather", 1, "0")
    for axes in ("2", ("0", "2"), (), "01"):
        with pytest.raises(ValueError, match=r"name some of 0, 1, each as a string"):
            speed.cost("all_gather", 1, axes)
    for num_bytes in (-1, math.nan):
        with pytest.raises(ValueError, match=f"num_bytes={num_bytes}: give 0 or more"):
            speed.cost("all_gather", num_bytes, "0")
    with pytest.raises(ValueError, match=r"the shape \(3,\) is not one of 4 ranks"):
        speed.of_shape((3,))


def test_a_file_holds_everything() -> None:
    speed = measured((2, 4))
    assert from_json(to_json(speed, range(8)), name="file") == (speed, tuple(range(8)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "another"),
        ("ranks", [0, 1, 2]),
        ("ranks", [0, 1, 2, 2]),
        ("groups", []),
        ("groups", [{}]),
        ("machine", None),
        ("shape", "2x2"),
    ],
)
def test_a_damaged_file_is_refused(key: str, value: object) -> None:
    content = json.loads(to_json(measured(), range(4)))
    content[key] = value
    with pytest.raises(ValueError, match=r"mesh\.json is not a file of DeviceMesh\.save: "):
        from_json(json.dumps(content), name="mesh.json")


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, "fast", None])
def test_a_damaged_line_is_refused(wrong: object) -> None:
    content = json.loads(to_json(measured(), range(4)))
    content["groups"][0]["operations"]["all_reduce"]["beta"] = wrong
    with pytest.raises(ValueError, match=r"is not a file of DeviceMesh\.save"):
        from_json(json.dumps(content), name="mesh.json")
    with pytest.raises(ValueError, match=r"is not a file of DeviceMesh\.save"):
        from_json("{", name="mesh.json")
