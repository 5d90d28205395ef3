"""Files of tensors: formats told apart by content, nothing executed, damage found."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.checkpoint_io.formats import _safetensors
from colossalai.checkpoint_io.formats._single import (
    Format,
    detect_format,
    read_safetensors,
    read_torch,
    verify,
    write_torch,
)
from colossalai.checkpoint_io.formats._whole_writer import ByteStream
from colossalai.checkpoint_io.resharding._tensors import stored_view
from tests.harness.allocations import Allocations
from tests.tiers import further

pytestmark = pytest.mark.unit

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)
names = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=6)
specs = st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 + 1",)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], *, header: dict[str, str]) -> None:
    entries = _safetensors.in_file_order({name: stored_view(tensor) for name, tensor in tensors.items()})
    stream = ByteStream(entries.values(), size=1024)
    _safetensors.write_safetensors(path, entries, header=header, blocks_of=stream.of)


def tensors_of(spec: dict[str, tuple[list[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {name: (torch.randn(shape) * 9).to(dtype) for name, (shape, dtype) in spec.items()}


@pytest.mark.parametrize("num_files", [12, further(40)])
def test_round_trip(num_files: int, tmp_path: Path) -> None:
    @given(spec=specs)
    @settings(max_examples=num_files)
    def check(spec: dict[str, tuple[list[int], torch.dtype]]) -> None:
        come_back(spec, tmp_path)

    check()


def come_back(spec: dict[str, tuple[list[int], torch.dtype]], tmp_path: Path) -> None:
    tensors = tensors_of(spec)
    write_torch(tmp_path / "a", tensors)
    write_safetensors(tmp_path / "b", tensors, header={"note": "é"})
    from_safetensors, header = read_safetensors(tmp_path / "b")
    assert header["note"] == "é"
    assert detect_format(tmp_path / "a") is Format.TORCH_ZIP
    assert detect_format(tmp_path / "b") is Format.SAFETENSORS
    for path, back in [(tmp_path / "a", read_torch(tmp_path / "a")), (tmp_path / "b", from_safetensors)]:
        verify(path)
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype
            assert torch.equal(back[name], tensor)


def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for length in range(400, 700):
        safetensors.torch.save_file({"w": torch.ones(1)}, path, {"note": "x" * length})
        if path.read_bytes().startswith(b"\x80\x02"):
            break
    else:
        pytest.fail("no header of 0x0280 bytes")
    assert detect_format(path) is Format.SAFETENSORS


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether the memory of a tensor is that of a mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_torch, read_torch),
        (partial(write_safetensors, header={}), lambda path: read_safetensors(path)[0]),
    ],
)
def test_tensors_are_views_of_the_file(
    write: Callable[..., None], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path, tensor = tmp_path / "a", torch.zeros(1_000_000)
    write(path, {"w": tensor})
    found = read(path)["w"]
    assert torch.equal(found, tensor)
    assert is_mapped(found, path)
    assert not is_mapped(tensor, path)
    with Allocations() as reading:
        read(path)
    assert reading.peak < tensor.nbytes / 4


def test_shared_memory_is_stored_once_each_in_safetensors(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    write_safetensors(tmp_path / "a", {"all": base, "part": base[2:4], "again": base}, header={})
    back, _ = read_safetensors(tmp_path / "a")
    assert back["part"].tolist() == [2, 3]
    assert torch.equal(back["again"], base)


def test_the_old_torch_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert detect_format(path) is Format.TORCH_LEGACY
    verify(path)
    assert read_torch(path)["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "write", [write_torch, lambda path, tensors: write_safetensors(path, tensors, header={})]
)
class TestDamage:
    def test_a_flipped_bit(self, write: object, tmp_path: Path) -> None:
        path = tmp_path / "a"
        write(path, {"w": torch.ones(1000), "v": torch.zeros(3)})
        content = bytearray(path.read_bytes())
        place = content.index(torch.ones(1).numpy().tobytes()) + 4 * 500
        content[place] ^= 16
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is damaged: the checksum of .* does not match"):
            verify(path)

    @pytest.mark.parametrize("cut", [0, 5, 100, 2000, -1])
    def test_a_truncated_file(self, write: object, cut: int, tmp_path: Path) -> None:
        path = tmp_path / "a"
        write(path, {"w": torch.ones(1000)})
        path.write_bytes(path.read_bytes()[:cut])
        for read in (read_torch, read_safetensors, verify):
            with pytest.raises(ValueError, match=str(path)):
                read(path)


def test_code_is_not_executed(tmp_path: Path) -> None:
    for name, use_zip in (("a", True), ("b", False)):
        torch.save({"w": Evil()}, tmp_path / name, _use_new_zipfile_serialization=use_zip)
        with pytest.raises(ValueError, match=r"refused"):
            read_torch(tmp_path / name)
    with pytest.raises(ValueError, match=r"builtins.eval"):
        read_torch(tmp_path / "a")


def test_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=f"{path} is neither a torch file nor a safetensors file"):
        detect_format(path)


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"complex128.*use_safetensors=False"):
        write_safetensors(tmp_path / "a", {"w": torch.zeros(2, dtype=torch.complex128)}, header={})
