"""Nested values survive being taken apart, written as JSON and put together."""

import enum
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.checkpoint_io.resharding._tree import pack, plain, unpack

pytestmark = pytest.mark.unit

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers()
tensors = st.builds(torch.tensor, st.lists(st.floats(width=32, allow_nan=False), max_size=3))
values = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(value=values)
def test_round_trip(value: Any) -> None:
    tree, tensors = pack(value)
    assert same(unpack(json.loads(json.dumps(tree)), tensors), value)


def test_equal_places_do_not_collide() -> None:
    value = {"a": {"b/c": torch.zeros(1)}, "a/b": {"c": torch.ones(1)}}
    tree, tensors = pack(value)
    assert len(tensors) == 2
    assert same(unpack(tree, tensors), value)


def test_values_that_json_has_no_word_for() -> None:
    milestones = Counter({3: 1, 5: 2})
    back = plain({"milestones": milestones, "worst": math.inf, "none": math.nan}, at="x")
    assert isinstance(back["milestones"], Counter)
    assert back["milestones"] == milestones
    assert back["worst"] == math.inf
    assert math.isnan(back["none"])


def test_subclasses_become_their_base() -> None:
    class Mode(enum.StrEnum):
        FAST = "fast"

    back = plain({"lr": np.float64(0.1), "n": np.int64(3), "mode": Mode.FAST, "flag": np.True_}, at="x")
    assert back == {"lr": 0.1, "n": 3, "mode": "fast", "flag": True}
    assert [type(value) for value in back.values()] == [float, int, str, bool]


def test_what_is_not_plain_is_named() -> None:
    with pytest.raises(ValueError, match=r"^scheduler/hooks/1 is a builtins.object"):
        pack({"hooks": [1, object()]}, at="scheduler")


def test_a_lost_tensor_is_an_error() -> None:
    tree, _ = pack([torch.zeros(1)], at="x")
    with pytest.raises(ValueError, match="x/0"):
        unpack(tree, {})
