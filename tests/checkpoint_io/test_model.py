"""Models round trip in every format; what does not fit is named before anything is overwritten."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from colossalai.checkpoint_io import load_model, save_model
from colossalai.tensor import keep_full_precision
from tests.checkpoint_io.models import SMALL, Counting, Tied, assert_same_state, every_format, overwrite, tied

pytestmark = pytest.mark.unit


@every_format
def test_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    model(torch.arange(11))  # moves the running statistics
    save_model(model, tmp_path / "x", **options)
    report = load_model(other, tmp_path / "x")
    assert report.is_clean
    overwrite(tmp_path / "x")
    assert_same_state(model, other)
    assert other.head.weight is other.embed.weight


@every_format
def test_a_prefix_goes_in_front_and_is_left_out_again(options: dict[str, Any], tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    save_model(model, tmp_path / "x", prefix="model.", **options)
    load_model(other, tmp_path / "x")
    assert_same_state(model, other)
    if options.get("shard"):
        index = json.loads(next((tmp_path / "x").glob("*.index.json")).read_text())
        assert all(name.startswith("model.") for name in index["weight_map"])


@every_format
def test_extra_state(options: dict[str, Any], tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    model[0].calls = {"count": 7, "sizes": (3, 4), "seen": torch.arange(3)}
    save_model(model, tmp_path / "x", **options)
    load_model(other, tmp_path / "x")
    assert other[0].calls["count"] == 7
    assert other[0].calls["sizes"] == (3, 4)
    overwrite(tmp_path / "x")  # what was loaded does not live in the file
    assert torch.equal(other[0].calls["seen"], torch.arange(3))


@every_format
def test_extra_state_can_hold_a_parameter(options: dict[str, Any], tmp_path: Path) -> None:
    """It is stored once, under the name of the parameter."""
    model, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    model[0].scale.data += 1
    model[0].calls = {"first": model[0].scale, "again": [model[0].scale]}
    save_model(model, tmp_path / "x", **options)
    load_model(other, tmp_path / "x")
    for loaded in (other[0].scale, other[0].calls["first"], other[0].calls["again"][0]):
        assert torch.equal(loaded, model[0].scale)


def test_a_torch_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    model, other = tied(seed=1), tied(seed=2)
    save_model(model, tmp_path / "x.pt")
    other.load_state_dict(torch.load(tmp_path / "x.pt"))
    assert_same_state(model, other)
    torch.save(tied(seed=3).state_dict(), tmp_path / "y.pt")
    load_model(other, tmp_path / "y.pt")
    assert_same_state(tied(seed=3), other)


def test_a_name_chooses_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save_model(tied(), tmp_path / "x.safetensors")
    assert "embed.weight" in load_file(tmp_path / "x.safetensors")


def test_the_folder_has_the_layout_of_hugging_face(tmp_path: Path) -> None:
    model = tied()
    save_model(model, tmp_path, shard=True, size_per_shard=SMALL)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.bin"))
    assert files == [f"pytorch_model-{n:05d}-of-{len(files):05d}.bin" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert index["weight_map"].keys() == model.state_dict().keys()
    unique = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in unique.values())
    for path in tmp_path.glob("*.bin"):
        shard = torch.load(path)
        assert all(index["weight_map"][name] == path.name for name in shard)


def test_an_index_of_safetensors_names_what_is_in_each_file(tmp_path: Path) -> None:
    """By it others find one tensor without opening all files."""
    model = tied()
    save_model(model, tmp_path, shard=True, size_per_shard=SMALL, use_safetensors=True)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert weight_map == {name: path.name for path in files for name in safetensors.torch.load_file(path)}


def test_saving_again_replaces_old_shards_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_model(tied(seed=1), tmp_path, shard=True, size_per_shard=SMALL)
    save_model(tied(seed=2), tmp_path, shard=True, use_safetensors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "notes.txt",
    ]


def test_views_do_not_drag_their_memory_along(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(1_000_000)[:4].view(2, 2))
    save_model(model, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10_000


class Stacked(nn.Module):
    """A module that writes another form of its parameter than the one it holds."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.full((2, 3), scale))
        self.register_state_dict_post_hook(self._transpose)
        self.register_load_state_dict_pre_hook(self._transpose_back)

    @staticmethod
    def _transpose(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, meta: Any) -> None:
        state[prefix + "columns"] = state.pop(prefix + "rows").detach().t().contiguous()

    @staticmethod
    def _transpose_back(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        state[prefix + "rows"] = state.pop(prefix + "columns").t()


def test_what_hooks_make_up_goes_through_the_module(tmp_path: Path) -> None:
    save_model(Stacked(5.0), tmp_path / "x.pt")
    other = Stacked(1.0)
    load_model(other, tmp_path / "x.pt")
    assert torch.equal(other.rows, torch.full((2, 3), 5.0))


def saved_with_misfits(path: Path) -> None:
    state = tied(seed=5).state_dict()
    del state["hidden.weight"], state["norm.running_var"]
    state["new"] = torch.zeros(1)
    state["back.bias"] = torch.zeros(9, dtype=torch.float64)
    state["hidden.bias"] = state["hidden.bias"].float()
    torch.save(state, path)


def test_all_misfits_are_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    model = tied(seed=1)
    saved_with_misfits(tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"nothing was loaded") as caught:
        load_model(model, tmp_path / "x.pt")
    text = str(caught.value)
    assert "2 missing in the checkpoint: hidden.weight, norm.running_var" in text
    assert "1 unexpected in the checkpoint: new" in text
    assert "back.bias: (9,) torch.float64 in the checkpoint, (7,) torch.float64 in the model" in text
    assert "hidden.bias: (5,) torch.float32 in the checkpoint, (5,) torch.float64 in the model" in text
    assert_same_state(model, tied(seed=1))


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tied(seed=1)
    saved_with_misfits(tmp_path / "x.pt")
    report = load_model(model, tmp_path / "x.pt", strict=False)
    assert report.missing == ("hidden.weight", "norm.running_var")
    assert report.unexpected == ("new",)
    assert len(report.mismatched) == 2
    assert "WARNING" in (said := capfd.readouterr().err)
    assert "hidden.weight" in said
    source, before = tied(seed=5), tied(seed=1)
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert torch.equal(model.hidden.bias, source.hidden.bias.float().double())
    assert torch.equal(model.hidden.weight, before.hidden.weight)
    assert torch.equal(model.back.bias, before.back.bias)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model with its floating-point buffers in another dtype."""
    for module in model.modules():
        floating = {name: buffer for name, buffer in module._buffers.items() if buffer.is_floating_point()}
        module._buffers.update({name: buffer.to(dtype) for name, buffer in floating.items()})
    return model


@every_format
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_buffers_are_converted(
    saved: torch.dtype,
    wanted: torch.dtype,
    options: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, other = tied(seed=1), in_dtype(tied(seed=2), wanted)
    model(torch.arange(11))
    in_dtype(model, saved)
    save_model(model, tmp_path / "x", **options)
    assert load_model(other, tmp_path / "x").is_clean
    assert_same_state(other, in_dtype(model, wanted))
    told = (
        f"{tmp_path / 'x'}: buffers were converted to the dtypes of the model: 2 from {saved} to {wanted}\n"
    )
    said = capfd.readouterr().err
    assert told in said
    assert said.count("buffers were converted") == 1


def test_parameters_and_integers_are_not_converted(tmp_path: Path) -> None:
    model = in_dtype(tied(seed=1), torch.bfloat16)
    state = tied(seed=2).state_dict()
    state["hidden.bias"] = state["hidden.bias"].float()
    state["norm.num_batches_tracked"] = torch.tensor(3.0)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"nothing was loaded.\n2 of another shape or dtype: ") as caught:
        load_model(model, tmp_path / "x.pt")
    assert "hidden.bias: (5,) torch.float32 in the checkpoint, (5,) torch.float64" in str(caught.value)
    assert "num_batches_tracked: () torch.float32 in the checkpoint, () torch.int64" in str(caught.value)
    assert_same_state(model, in_dtype(tied(seed=1), torch.bfloat16))


FACTORS = {"held": 1, "twice": 2, "thrice": 3}


def in_16_bits(model: nn.Module) -> Any:
    """Return a model with parameters in 16 bits, and float32 buffers that behave so."""
    for param in model.parameters():
        param.data = param.data.bfloat16()
    keep_full_precision(model, torch.bfloat16, is_plain=lambda buffer: False)
    return model


class Table(nn.Module):
    """A module whose hooks and extra state write what they make of a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.full((5,), scale))
        self.register_state_dict_post_hook(self._add_twice)
        self.register_load_state_dict_pre_hook(self._take_twice)
        self.loaded: dict[str, torch.Tensor] = {}

    @staticmethod
    def _add_twice(module: Any, state: dict[str, torch.Tensor], prefix: str, meta: Any) -> None:
        state[prefix + "twice"] = module.table * 2

    @staticmethod
    def _take_twice(module: Any, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        module.loaded["twice"] = state.pop(prefix + "twice")

    def get_extra_state(self) -> dict[str, Any]:
        return {"held": self.table, "thrice": self.table * 3}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.loaded |= state


@every_format
def test_what_is_made_of_buffers_of_a_model_of_16_bits_keeps_their_digits(
    options: dict[str, Any], tmp_path: Path
) -> None:
    expected = {name: torch.full((5,), 0.7) * factor for name, factor in FACTORS.items()}
    model, other = (in_16_bits(Table(scale)) for scale in (0.7, 0.0))
    save_model(model, tmp_path / "x", **options)
    load_model(other, tmp_path / "x")
    assert torch.equal(other.state_dict()["table"], torch.full((5,), 0.7))
    assert other.loaded.keys() == expected.keys()
    assert all(torch.equal(other.loaded[name], value) for name, value in expected.items())
    # What an earlier version made was rounded.
    save_model(Table(0.7).bfloat16(), tmp_path / "earlier", **options)
    load_model(other, tmp_path / "earlier")
    low = torch.full((5,), 0.7).bfloat16()
    assert torch.equal(other.state_dict()["table"], low.float())
    assert torch.equal(other.loaded["twice"], low.float() * 2)


def test_untied_weights_do_not_load_into_tied_ones(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in tied().state_dict().items()}
    torch.save(state, tmp_path / "equal.pt")
    load_model(tied(seed=1), tmp_path / "equal.pt")
    state["head.weight"] += 1
    torch.save(state, tmp_path / "torn.pt")
    with pytest.raises(ValueError, match=r"embed.weight and head.weight: two different tensors"):
        load_model(tied(), tmp_path / "torn.pt")


def test_tied_weights_in_safetensors_are_missing_for_an_untied_model(tmp_path: Path) -> None:
    save_model(tied(), tmp_path / "x.safetensors")
    untied = Tied().double()
    untied.head = nn.Linear(7, 11, bias=False).double()
    with pytest.raises(ValueError, match=r"1 missing in the checkpoint: head.weight$"):
        load_model(untied, tmp_path / "x.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tied(), tmp_path, shard=True, size_per_shard=SMALL)
    next(tmp_path.glob("*-00002-of-*")).unlink()
    with pytest.raises(ValueError, match=r"names files that are not there: pytorch_model-00002-of"):
        load_model(tied(), tmp_path)


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_shard_that_lacks_what_the_index_promises_is_named(use_safetensors: bool, tmp_path: Path) -> None:
    save_model(tied(), tmp_path, shard=True, size_per_shard=SMALL, use_safetensors=use_safetensors)
    first, second = sorted(tmp_path.glob("*-of-*"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=rf"lists hidden.* in {second.name}, which lacks them"):
        load_model(tied(), tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "gone")):
        load_model(tied(), tmp_path / "gone")


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    save_model(tied(), tmp_path / "x.pt")
    with torch.device("meta"):
        empty = Tied().double()
    with pytest.raises(ValueError, match=r"embed.weight.*to_empty"):
        load_model(empty, tmp_path / "x.pt")


def test_wrong_sorts_of_content_are_named(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt: there are no weights by name in it, but a list"):
        load_model(tied(), tmp_path / "list.pt")
    torch.save({"epoch": 1, "model": {}}, tmp_path / "legacy.pt")
    with pytest.raises(ValueError, match=r"load_checkpoint"):
        load_model(tied(), tmp_path / "legacy.pt")


def test_extra_state_that_is_not_plain_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(Counting())
    model[0].calls = {"hook": print}
    with pytest.raises(ValueError, match=r"0._extra_state/hook is a builtins.builtin_function"):
        save_model(model, tmp_path / "x.pt")


def test_whole_tensors_take_the_place_of_slices(tmp_path: Path) -> None:
    save_model(tied(seed=1), tmp_path, gather_dtensor=False)
    (tmp_path / "notes").mkdir()
    save_model(tied(seed=2), tmp_path, shard=True)
    other = tied(seed=3)
    load_model(other, tmp_path)
    assert_same_state(other, tied(seed=2))
    assert (tmp_path / "notes").is_dir()


def test_a_folder_of_the_users_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a checkpoint in slices"):
        save_model(nn.Linear(1, 1), tmp_path, gather_dtensor=False)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
