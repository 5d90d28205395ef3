"""Shards, indexes and names."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossalai.checkpoint_io._hugging_face_index import (
    HuggingFaceIndex,
    Stems,
    find_weights,
    index_text,
    plan_shards,
    read_index,
)
from colossalai.checkpoint_io._state import LoadReport, common_prefix
from colossalai.checkpoint_io.storage._untrusted import listed

pytestmark = pytest.mark.unit

STEMS = Stems(torch="pytorch_model", safetensors="model")
MB = 1024 * 1024


@given(sizes=st.lists(st.integers(0, 5 * MB), max_size=20), size_per_shard=st.floats(0.1, 8))
def test_shards_hold_everything_in_order_and_are_full(sizes: list[int], size_per_shard: float) -> None:
    by_name = {f"w{number}": size for number, size in enumerate(sizes)}
    shards = plan_shards(by_name, size_per_shard=size_per_shard)
    assert [name for shard in shards for name in shard] == list(by_name)
    for shard in shards:
        assert len(shard) == 1 or sum(by_name[name] for name in shard) <= size_per_shard * MB
    for shard, following in pairwise(shards):
        assert sum(by_name[name] for name in [*shard, following[0]]) > size_per_shard * MB


def test_a_shard_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="size_per_shard=0"):
        plan_shards({"a": 1}, size_per_shard=0)


def test_names_of_files() -> None:
    assert STEMS.shard_name(2, 13, use_safetensors=False) == "pytorch_model-00002-of-00013.bin"
    assert STEMS.shard_name(2, 13, use_safetensors=True) == "model-00002-of-00013.safetensors"
    ours = ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"]
    ours += ["pytorch_model-00002-of-00013.bin", "pytorch_model.bin.index.json"]
    assert all(map(STEMS.owns, ours))
    assert not any(
        map(STEMS.owns, ["config.json", "model.py", "model.fp16.safetensors", "pytorch_optim.bin"])
    )


def test_an_index_round_trips(tmp_path: Path) -> None:
    (tmp_path / "one.bin").touch()
    index = HuggingFaceIndex({"a": "one.bin", "b": "one.bin"}, {"total_size": 5})
    path = tmp_path / "x.index.json"
    path.write_text(index_text(index))
    assert read_index(path) == index
    assert index.files == ["one.bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[1]", "is damaged"),
        (json.dumps({"weight_map": {"a": "../secret.bin"}}), "outside its folder"),
        (json.dumps({"weight_map": {"a": "gone.bin"}}), "not there: gone.bin"),
    ],
)
def test_a_bad_index_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.index.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"x.index.json.*{message}"):
        read_index(path)


def test_the_weights_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"holds none of .*; there is config.json"):
        find_weights(tmp_path, STEMS)
    (tmp_path / "pytorch_model.bin").touch()
    assert find_weights(tmp_path, STEMS).name == "pytorch_model.bin"
    (tmp_path / "model.safetensors.index.json").touch()
    assert find_weights(tmp_path, STEMS).name == "model.safetensors.index.json"


@given(names=st.sets(st.text("ab.", min_size=1, max_size=4), min_size=1), prefix=st.text("ab.", max_size=4))
def test_a_common_prefix_is_found_if_it_explains_everything(names: set[str], prefix: str) -> None:
    stored = {prefix + name for name in names}
    found = common_prefix(stored, names)
    assert {name.removeprefix(found) for name in stored} == names
    assert common_prefix({*stored, "x"}, names) == ""


def test_a_prefix_that_does_not_explain_everything_is_none() -> None:
    assert common_prefix({"net.a", "net.b"}, {"a", "c"}) == ""
    assert common_prefix({"a"}, {"net.a"}) == ""
    assert common_prefix(set(), set()) == ""


def test_a_report_names_everything() -> None:
    report = LoadReport(missing=("a", "b"), unexpected=("c",))
    assert not report.is_clean
    assert report.describe() == "2 missing in the checkpoint: a, b\n1 unexpected in the checkpoint: c"
    assert LoadReport().is_clean
    assert listed(map(str, range(10)), shown=2) == "0, 1 and 8 more"
