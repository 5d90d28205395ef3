"""Files that are written block by block: as torch and safetensors write them, and in little memory."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from colossalai.checkpoint_io import load_model, save_checkpoint, save_model
from colossalai.checkpoint_io.formats._single import verify
from colossalai.tensor import block_boxes
from tests.checkpoint_io.models import assert_same_state, group, tied
from tests.harness.allocations import RankAllocations
from tests.ranks import run_ranks

MB = 1024 * 1024
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint16,
    torch.bool,
]


class Odd(nn.Module):
    """Buffers of many dtypes and shapes: none of elements, no dimensions, not contiguous, tied, sparse."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"of_{number}", torch.arange(12).reshape(3, 4).to(dtype).T)
        self.register_buffer("none", torch.empty(0, 5))
        self.register_buffer("number", torch.tensor(3.5))
        self.register_buffer("tied", self.number)
        if is_sparse:
            self.register_buffer("sparse", torch.eye(3).to_sparse())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shape", "most"), [((), 1), ((0, 3), 2), ((7,), 3), ((3, 4), 5), ((2, 3, 5), 4), ((2, 3), 9)]
)
def test_blocks_are_the_tensor_in_order(shape: tuple[int, ...], most: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    blocks = [box.of(tensor).flatten() for box in block_boxes(shape, most=most)]
    assert all(0 < len(block) <= most for block in blocks)
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *blocks]), tensor.flatten())


@pytest.mark.unit
@pytest.mark.parametrize("buffer_size", [512, 0.008])
def test_a_torch_file_is_what_torch_itself_would_write(buffer_size: float, tmp_path: Path) -> None:
    model = Odd(is_sparse=True)
    save_model(model, tmp_path / "ours.pt", buffer_size=buffer_size)
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    assert zipfile.ZipFile(tmp_path / "ours.pt").testzip() is None
    verify(tmp_path / "ours.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    for mmap in (False, True):
        ours = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=mmap)
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
            same = ours[name].to_dense().flatten().tolist() == tensor.to_dense().flatten().tolist()
            assert same, name
        assert ours["tied"].data_ptr() == ours["number"].data_ptr()
        assert all(ours[name].data_ptr() % 64 == 0 for name in ("of_0", "of_3", "number")) or not mmap


@pytest.mark.unit
@pytest.mark.parametrize("buffer_size", [512, 0.008])
def test_a_safetensors_file_is_read_by_its_own_library(buffer_size: float, tmp_path: Path) -> None:
    model = Odd(is_sparse=False)
    save_model(model, tmp_path / "x.safetensors", buffer_size=buffer_size)
    verify(tmp_path / "x.safetensors")
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(back) == set(model.state_dict()) - {"tied"}
    assert all(
        back[name].tolist() == tensor.tolist() for name, tensor in model.state_dict().items() if name in back
    )


@pytest.mark.unit
def test_what_does_not_fit_the_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sparse is torch.sparse_coo.*use_safetensors=False"):
        save_model(Odd(is_sparse=True), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"buffer_size=0.001 MB is too small"):
        save_model(tied(), tmp_path / "x", buffer_size=0.001)
    with pytest.raises(ValueError, match=r"variant='fp16' is a part of the file names in a folder"):
        save_model(tied(), tmp_path / "x", variant="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.unit
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_variants_lie_side_by_side(use_safetensors: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard": True, "size_per_shard": 0.0005, "use_safetensors": use_safetensors}
    save_model(tied(seed=1), tmp_path, variant="fp16", **options)
    with pytest.raises(ValueError, match=r"but the variants fp16"):
        load_model(tied(), tmp_path)
    save_model(tied(seed=2), tmp_path, **options)
    names = {path.name for path in tmp_path.iterdir()}
    suffix = "safetensors" if use_safetensors else "bin"
    stem = "model" if use_safetensors else "pytorch_model"
    assert {f"{stem}.fp16-00001-of-00003.{suffix}", f"{stem}.{suffix}.index.fp16.json"} <= names
    for variant, seed in (("fp16", 1), (None, 2)):
        model = tied()
        load_model(model, tmp_path, variant=variant)
        assert_same_state(model, tied(seed=seed))


@pytest.mark.unit
def test_a_prefix_that_is_given_is_left_out(tmp_path: Path) -> None:
    whole = nn.ModuleDict({"part": nn.Linear(2, 3), "other": nn.Linear(2, 3)})
    save_model(whole, tmp_path / "x")
    part = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"2 unexpected in the checkpoint: other.weight \(without 'part.'"):
        load_model(part, tmp_path / "x", prefix="part.")
    load_model(part, tmp_path / "x", prefix="part.", strict=False)
    assert torch.equal(part.weight, whole["part"].weight)


# A rank holds half of 64 MB; with 8 MB to save with.
HEIGHT, WIDTH, BUFFER_MB = 4 * 1024, 4 * 1024, 8


def cut_in_halves(width: int, height: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(width, height, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def peaks(folder: Path) -> dict[str, float]:
    found = {}
    with group():
        save_model(cut_in_halves(8, 8), folder / "x.pt")  # what the first message takes is no copy of a model
        model = cut_in_halves(WIDTH, HEIGHT)
        saves = {
            "file": lambda: save_model(model, folder / "x.pt", buffer_size=BUFFER_MB),
            "safetensors": lambda: save_model(model, folder / "x.safetensors", buffer_size=BUFFER_MB),
            "everything": lambda: save_checkpoint(folder / "y.pt", 0, model, buffer_size=BUFFER_MB),
        }
        for name, save in saves.items():
            with RankAllocations(model.parameters()) as peak:
                save()
            found[f"save {name}"] = peak.mb
        local = model.weight.detach().to_local()
        expected = local.sum().item()
        for name in ("x.pt", "x.safetensors"):
            local.zero_()
            with RankAllocations(model.parameters()) as peak:
                load_model(model, folder / name)
            found[f"load {name}"] = peak.mb
            assert local.sum().item() == expected
        dist.barrier()
    return found


@pytest.mark.dist
def test_saving_and_loading_take_less_memory_than_the_buffer(tmp_path: Path) -> None:
    for found in run_ranks(peaks, 2, tmp_path):
        assert all(extra < BUFFER_MB for extra in found.values()), found
