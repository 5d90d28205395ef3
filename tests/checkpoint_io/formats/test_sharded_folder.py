"""Written with any set of boxes, read with any other, bit for bit."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossalai.checkpoint_io.formats import _sharded_folder
from colossalai.checkpoint_io.formats._sharded_folder import (
    file_of_rank,
    index_of,
    read_sharded_index,
    share_out,
    write_items,
    write_sharded_index,
)
from colossalai.checkpoint_io.resharding._tensors import (
    FlatStateDict,
    ShardedStateDict,
    ShardedTensor,
    StoredStateDict,
)
from colossalai.checkpoint_io.storage._manifest import INDEX
from colossalai.checkpoint_io.storage._untrusted import json_checksum
from colossalai.tensor import Box, whole_box
from tests.checkpoint_io.cuts import SHAPES, boxes_in, cuts_of

pytestmark = pytest.mark.unit

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.uint8, torch.int16, torch.bool, torch.float8_e4m3fn, torch.uint16),
)
FEW_BYTES = 48  # of a block, instead of megabytes: every tensor takes several


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sharded_folder, "WRITTEN", FEW_BYTES)


def read(folder: Path) -> StoredStateDict:
    return read_sharded_index(folder, most=FEW_BYTES).state()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    content = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return content.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def permuted_copy(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The same values, the dimensions in another order in memory."""
    return tensor.permute(dims).contiguous().permute([dims.index(dim) for dim in range(len(dims))])


@st.composite
def written(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[ShardedStateDict], int]:
    """Tensors, and what each of some ranks knows of them: who has what, and its own values."""
    num_ranks = draw(st.integers(1, 4))
    wholes, ranks_of, pieces = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        name, shape = f"t{number}", draw(SHAPES)
        wholes[name] = random_bits(shape, draw(st.sampled_from(DTYPES)))
        dims = draw(st.permutations(range(len(shape))))
        ranks_of[name] = {
            box: tuple(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)))
            for box in draw(cuts_of(shape))
        }
        pieces[name] = {box: permuted_copy(box.of(wholes[name]), dims) for box in ranks_of[name]}
    stores = []
    for rank in range(num_ranks):
        tensors = {
            name: ShardedTensor(
                tuple(whole.shape),
                whole.dtype,
                {box: pieces[name][box] for box, ranks in ranks_of[name].items() if rank in ranks},
                ranks_of=ranks_of[name],
            )
            for name, whole in wholes.items()
        }
        stores.append(FlatStateDict({**tensors, "tied": tensors["t0"]}, {"step": 3}))
    return wholes, stores, num_ranks


def write(folder: Path, stores: list[ShardedStateDict]) -> None:
    """Do what all ranks do, one after the other."""
    shares = [share_out(store, len(stores)) for store in stores]
    results = [
        write_items(folder / file_of_rank(rank, len(stores)), shares[rank][rank])
        for rank in range(len(stores))
    ]
    write_sharded_index(folder, index_of(stores[0], shares[0], results, folder))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), written())
def test_any_boxes_in_any_boxes_out(data: st.DataObject, case: Any) -> None:
    wholes, stores, _ = case
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), stores)
        found = read(Path(folder))
        assert found.tree == {"step": 3}
        assert found.tensors["tied"] is found.tensors["t0"]
        for name, whole in wholes.items():
            stored = found.tensors[name]
            assert (stored.shape, stored.dtype) == (tuple(whole.shape), whole.dtype)
            assert bits(stored.whole()) == bits(whole)
            box = data.draw(boxes_in(stored.shape))
            expected = box.of(whole)
            out = torch.empty(box.sizes, dtype=whole.dtype)
            stored.read(box, out)
            assert bits(out) == bits(expected)
            out = permuted_copy(torch.empty_like(out), data.draw(st.permutations(range(out.ndim))))
            stored.read(box, out)
            assert bits(out) == bits(expected)
            out = torch.empty(box.sizes, dtype=torch.complex128)
            stored.read(box, out)
            assert bits(out) == bits(expected.to(torch.complex128))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written())
def test_others_can_look_into_the_files(case: Any) -> None:
    wholes, stores, num_ranks = case
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), stores)
        for tensor in read_sharded_index(Path(folder), most=FEW_BYTES).tensors.values():
            for shard in tensor.shards:
                assert shard.begin % tensor.dtype.itemsize == 0
        for rank in range(num_ranks):
            path = Path(folder, file_of_rank(rank, num_ranks))
            if path.exists():
                with safetensors.safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - it is no dictionary
                        whole = wholes.get(name)
                        if whole is not None and file.get_slice(name).get_dtype() != "U8":
                            assert bits(file.get_tensor(name)) == bits(whole)


def test_a_single_element_that_keeps_its_stride(tmp_path: Path) -> None:
    matrix, box = torch.arange(6.0).view(3, 2), Box((0, 1), (1, 1))
    held, ranks_of = {whole_box((1,)): matrix[:1, 1]}, {whole_box((1,)): (0,)}
    store = FlatStateDict({"w": ShardedTensor((1,), matrix.dtype, held, ranks_of=ranks_of)}, None)
    write(tmp_path, [store])
    out = torch.zeros(3, 2)
    read(tmp_path).tensors["w"].read(whole_box((1,)), box.of(out)[0])
    assert out.flatten().tolist() == [0, 1, 0, 0, 0, 0]


def test_bytes_are_spread_over_the_replicas() -> None:
    whole = torch.zeros(8)
    everywhere = {whole_box((8,)): (0, 1, 2)}
    store = FlatStateDict(
        {name: ShardedTensor((8,), whole.dtype, {}, ranks_of=everywhere) for name in "abcdef"}, None
    )
    assert [sum(part.nbytes for part in parts) for parts in share_out(store, 3)] == [64, 64, 64]


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0,), (3,))],
        [Box((0,), (3,)), Box((2,), (1,))],  # as many elements as there should be
        [Box((0,), (4,)), Box((2,), (2,))],
    ],
)
def test_what_the_ranks_do_not_hold_once_is_refused(boxes: list[Box]) -> None:
    store = FlatStateDict(
        {"w": ShardedTensor((4,), torch.float32, {}, ranks_of=dict.fromkeys(boxes, (0,)))}, None
    )
    with pytest.raises(ValueError, match=r"do not hold all of 'w', of shape \(4,\)"):
        share_out(store, 1)


def test_a_sparse_tensor_is_refused(tmp_path: Path) -> None:
    sparse = torch.eye(2).to_sparse()
    box = whole_box((2, 2))
    store = FlatStateDict(
        {"s": ShardedTensor((2, 2), sparse.dtype, {box: sparse}, ranks_of={box: (0,)})}, None
    )
    with pytest.raises(ValueError, match="s is not strided"):
        write(tmp_path, [store])


def outside_of_the_file(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"][0][1] += 8


def before_the_file(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"][0][1] = -8


def of_no_file(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"][0][0] = "other.safetensors"


def overlapping(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"] = [
        ["00000-of-00001.safetensors", 80, [0, 0], [1, 3]],
        ["00000-of-00001.safetensors", 80, [0, 0], [1, 3]],
    ]


def a_chunk_short(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"] = []


def of_other_dimensions(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["chunks"][0][2:] = [[0], [6]]


def tied_to_nothing(body: dict[str, Any]) -> None:
    body["same_as"]["v"] = "u"


def of_no_dtype(body: dict[str, Any]) -> None:
    body["tensors"]["w"]["dtype"] = "Tensor"


def without_shape(body: dict[str, Any]) -> None:
    del body["tensors"]["w"]["shape"]


def outside_of_the_folder(body: dict[str, Any]) -> None:
    body["files"]["../x.safetensors"] = {"size": 1, "checksum": 0}


LIES: list[Callable[[dict[str, Any]], None]] = [
    *(outside_of_the_file, before_the_file, of_no_file, overlapping, a_chunk_short),
    *(of_other_dimensions, tied_to_nothing, of_no_dtype, without_shape, outside_of_the_folder),
]


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies(lie: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    whole, box = torch.arange(6.0).view(2, 3), whole_box((2, 3))
    write(
        tmp_path,
        [FlatStateDict({"w": ShardedTensor((2, 3), whole.dtype, {box: whole}, ranks_of={box: (0,)})}, None)],
    )
    content = json.loads((tmp_path / INDEX).read_text())
    lie(content["index"])
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{INDEX} is damaged: its checksum"):
        read(tmp_path)
    content["crc32"] = json_checksum(content["index"])
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{INDEX} (is damaged: (?!its checksum)|names files outside)"):
        read(tmp_path)
