"""The bytes of a file come whole and in order, mapped or read, and what is not there is an error."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossalai.checkpoint_io.formats._sharded_folder import WriteItem, write_items
from colossalai.checkpoint_io.resharding._tensors import FileShard, StoredTensor, TensorMetadata, wholes
from colossalai.checkpoint_io.storage import _file_blocks
from colossalai.checkpoint_io.storage._file_blocks import WRITTEN, file_blocks
from colossalai.tensor import whole_box

pytestmark = pytest.mark.unit

SIZE = 40_000


@pytest.fixture
def sizes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small blocks are mapped, too; a list gets the size of each block that was read."""
    sizes: list[int] = []
    read = _file_blocks._read

    def counting(*arguments: Any) -> memoryview:
        block = read(*arguments)
        sizes.append(len(block))
        return block

    monkeypatch.setattr(_file_blocks, "_SMALL", 1)
    monkeypatch.setattr(_file_blocks, "_read", counting)
    return sizes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.mark.parametrize("is_mapped", [True, False])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_byte_once(
    is_mapped: bool, path: Path, sizes_read: list[int], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    if not is_mapped:
        monkeypatch.setattr(_file_blocks, "_POPULATE_READ", 9999)  # as of a kernel that does not know it
    sizes_read.clear()
    begin = data.draw(st.integers(0, SIZE))
    end = data.draw(st.integers(begin, SIZE))
    most = data.draw(st.integers(1000, SIZE))
    blocks = [bytes(block) for block in file_blocks(path, begin, end, most=most)]
    assert b"".join(blocks) == path.read_bytes()[begin:end]
    assert max(map(len, blocks), default=0) <= most
    assert all((begin + sum(map(len, blocks[: count + 1]))) % most == 0 for count in range(len(blocks) - 1))
    assert sum(sizes_read) == (0 if is_mapped else end - begin)


def test_a_file_that_ends_before(path: Path, sizes_read: list[int]) -> None:
    with pytest.raises(OSError, match=f"file ends at byte {SIZE}, where more was expected"):
        list(file_blocks(path, 0, SIZE + 1, most=SIZE * 2))
    with pytest.raises(OSError, match=f"file ends at byte {SIZE}, where more was expected"):
        list(file_blocks(path, 0, SIZE * 3, most=SIZE // 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("begin", [0, 8, 12, 4096])
def test_into_a_tensor(dtype: torch.dtype, begin: int, path: Path, sizes_read: list[int]) -> None:
    numel = 999
    content = path.read_bytes()[begin : begin + numel * dtype.itemsize]
    shard = FileShard(whole_box((numel,)), dtype, path, begin, 1000)
    out = StoredTensor((numel,), dtype, (shard,)).whole()
    assert bytes(out.view(torch.uint8).tolist()) == content
    assert not sizes_read


def test_files_are_written_in_blocks_of_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, write = [], os.write

    def recording(descriptor: int, content: memoryview) -> int:
        count = write(descriptor, content)
        ends.append(os.lseek(descriptor, 0, os.SEEK_CUR))
        return count

    values = torch.arange(WRITTEN * 5 // 8, dtype=torch.int32)  # two and a half blocks
    box = whole_box(values.shape)
    whole = TensorMetadata(box.sizes, values.dtype)
    items = [WriteItem(name, box, whole, values) for name in ("a", "b")]
    monkeypatch.setattr(os, "write", recording)
    begins = write_items(tmp_path / "file", items).begins
    expected = {WRITTEN, 2 * WRITTEN, begins[1], 3 * WRITTEN, 4 * WRITTEN, 5 * WRITTEN}
    assert set(ends) == {begins[0], *expected, begins[1] + values.nbytes}


def test_a_file_is_opened_once_and_read_in_order(path: Path, sizes_read: list[int], monkeypatch: Any) -> None:
    begins, opened, asked = [4096, 0, 12_000], [], []
    opening, blocks = Path.open, _file_blocks._blocks

    def counted(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(self)
        return opening(self, *arguments, **options)

    def noted(file: Any, path: Path, begin: int, *arguments: Any) -> Any:
        asked.append(begin)
        return blocks(file, path, begin, *arguments)

    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(_file_blocks, "_blocks", noted)
    box = whole_box((500,))
    shards = [FileShard(box, torch.int32, path, begin, 1024) for begin in begins]
    found = wholes([StoredTensor((500,), torch.int32, (shard,)) for shard in shards])
    assert (opened, asked) == ([path], sorted(begins))
    content = path.read_bytes()
    for begin, tensor in zip(begins, found, strict=True):
        assert tensor.numpy().tobytes() == content[begin : begin + 2000]
