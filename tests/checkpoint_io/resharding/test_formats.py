"""Files of every format: saved in one layout, loaded in another, opened by plain torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Adafactor, AdamW

import colossalai
import colossalai.nn as col_nn
from colossalai.checkpoint_io import load_model, load_optimizer, parameter_names, save_model, save_optimizer
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer import restart
from colossalai.tensor import spec_of
from colossalai.utils import load_checkpoint, save_checkpoint
from colossalai.zero import declare_elementwise
from tests.checkpoint_io.layouts import (
    AFTER,
    BEFORE,
    REFERENCE,
    Named,
    Run,
    layout_of,
    mean_losses,
    reference,
)
from tests.checkpoint_io.models import FORMATS
from tests.parity.table import MODES
from tests.parity.tasks import TORCH, LayerNet
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10  # float64: layouts sum in different orders
ONE_FILE = "one file"
ALL = (*FORMATS, ONE_FILE)
TENSOR = ("one", "dp2", "dp2-tp2", "2d", "2.5d", "3d")
KINDS = ((True, True), (True, False), (False, True), (False, False))  # tied, vocabulary-parallel


def save(name: str, folder: Path, formats: tuple[str, ...]) -> None:
    """Train, save in some formats, and train on; the losses after the save and whole values go along."""
    run = Run(layout_of(name), 1, 2)
    run.train(range(BEFORE))
    run.evaluate()  # leaves the root's parameters gathered under FSDP, which must not be what is saved
    model, optimizer = run.engine.model.unwrap(), run.engine.optimizer
    names = parameter_names(model)
    for each in formats:
        if each == ONE_FILE:
            save_checkpoint(folder / each, BEFORE, model, optimizer)
            continue
        options = FORMATS[each] | ({"size_per_shard": 0.01} if "shards" in each else {})  # some ten shards
        save_model(model, folder / f"{each} model", **options)
        save_optimizer(optimizer, folder / f"{each} optimizer", param_names=names, **options)
    torch.save(run.wholes(), folder / f"{REFERENCE} {gpc.get_global_rank()}")
    torch.save(run.train(range(BEFORE, BEFORE + AFTER)), folder / f"losses {gpc.get_global_rank()}")


def load(name: str, folders: list[Path], formats: tuple[str, ...]) -> dict[Path, list[list[float | None]]]:
    """Load each format of what some layouts saved, and train; return the losses."""
    run = Run(layout_of(name), 2, 2)
    model, optimizer = run.engine.model.unwrap(), run.engine.optimizer
    names = parameter_names(model)
    losses: dict[Path, list[list[float | None]]] = {}
    for folder in folders:
        for each in formats:
            with ledger() as book:
                if each == ONE_FILE:
                    assert load_checkpoint(folder / each, model, optimizer) == BEFORE
                else:
                    load_model(model, folder / f"{each} model")
                    load_optimizer(optimizer, folder / f"{each} optimizer", param_names=names)
            assert not book.entries  # each rank cuts its own slices
            wrong = run.differences(reference(folder))
            assert not wrong, f"{each} of {folder}, loaded as {name}: {wrong[:8]} of {len(wrong)}"
            losses.setdefault(folder, []).append(run.train(range(BEFORE, BEFORE + AFTER)))
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each layout leaves its files, for all tests."""
    return tmp_path_factory.mktemp("layouts")


def saved(folder: Path, name: str, formats: tuple[str, ...]) -> Path:
    """Have a layout save in the formats in which it has not yet."""
    path = folder / name
    path.mkdir(exist_ok=True)
    missing = tuple(each for each in formats if not any(path.glob(f"{each}*")))
    if missing:
        run_ranks(save, layout_of(name).num_ranks, name, path, missing)
    return path


def losses_of(folder: Path) -> list[float]:
    return mean_losses([torch.load(path) for path in folder.glob("losses *")])


def values_in(file: Path) -> Named:
    """Read a checkpoint with torch alone."""
    content = torch.load(file, weights_only=True)
    states = content["optimizer"]["state"]
    return {name: {"parameter": content["model"][name], **states[name]} for name in states}


def assert_equal(found: Named, expected: Named, *, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            torch.testing.assert_close(found[name][key], value, rtol=0, atol=atol)


def check_files(saved: Path, formats: tuple[str, ...]) -> None:
    """Compare files, as torch and safetensors open them, with what the ranks had."""
    values = reference(saved)
    if ONE_FILE in formats:
        assert_equal(values_in(saved / ONE_FILE), values, atol=0)
    if "safetensors shards" in formats:
        shards = sorted((saved / "safetensors shards model").glob("*.safetensors"))
        assert len(shards) > 1
        weights = {key: value for shard in shards for key, value in load_file(shard).items()}
        index = json.loads((shards[0].parent / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
        tied = weights.pop("head.weight", None)  # the last stage of a pipeline has a copy
        assert tied is None or torch.equal(tied, weights["embedding.tokens.weight"])
        assert weights.keys() == values.keys()
        assert all(torch.equal(weights[key], of["parameter"]) for key, of in values.items())


CELLS: list[Any] = [
    ("dp2-tp2", ("2d",), ALL),
    ("fsdp", ("one",), ALL),
    ("one", ("one", "fsdp"), ALL),
    ("2d", ("one", "dp2-tp2", "2d"), (ONE_FILE,)),
    ("fsdp-tp2", ("fsdp-tp2",), (ONE_FILE,)),
    further("fsdp-tp2", ("one",), (ONE_FILE,)),
    further("one", ("pp2",), ALL),
    further("pp2", ("one", "pp2"), ALL),
    further("fsdp", ("fsdp", "fsdp-tp2", "fsdp-2d"), ALL),
    further("fsdp-2d", ("one", "fsdp-2d"), (ONE_FILE,)),
    *(further(name, TENSOR, (ONE_FILE, "safetensors shards")) for name in TENSOR),
]


@pytest.mark.parametrize(("name", "sources", "formats"), CELLS)
def test_loaded_from_other_layouts(
    name: str, sources: tuple[str, ...], formats: tuple[str, ...], folder: Path
) -> None:
    folders = [saved(folder, source, formats) for source in sources]
    for each in folders:
        check_files(each, formats)
        assert_equal(reference(each), reference(folders[0]), atol=TOLERANCE)
    by_rank = run_ranks(load, layout_of(name).num_ranks, name, folders, formats)
    for each in folders:
        for losses in zip(*(of_rank[each] for of_rank in by_rank), strict=True):
            assert mean_losses(list(losses)) == pytest.approx(losses_of(each), rel=TOLERANCE)


def pass_on(name: str, folder: Path) -> None:
    """Load a model of all kinds of layers that one process saved, and save it again."""
    colossalai.launch_from_torch(layout_of(name).config, verbose=False)
    for tied, cuts_vocabulary in KINDS:
        restart(gpc.tensor_mode)
        model = LayerNet(col_nn, tied=tied, cuts_vocabulary=cuts_vocabulary)
        optimizer = AdamW(model.parameters())
        load_checkpoint(folder / f"{tied}.pt", model, optimizer)
        specs = [(param, spec_of(param)) for param in model.parameters()]
        assert name == "one" or any(spec and param.shape != spec.shape for param, spec in specs)
        save_checkpoint(folder / f"{tied} {cuts_vocabulary}.pt", 1, model, optimizer)


@pytest.mark.parametrize("name", ["dp2-tp2", *(further(name) for name in ("one", "2d", "2.5d", "3d"))])
def test_embeddings_norms_and_heads_pass_through_every_mode_unchanged(name: str, tmp_path: Path) -> None:
    for tied in (True, False):
        save_after_a_step(LayerNet(TORCH, tied=tied, cuts_vocabulary=False), AdamW, tmp_path / f"{tied}.pt")
    run_ranks(pass_on, layout_of(name).num_ranks, name, tmp_path)
    for tied, cuts_vocabulary in KINDS:
        again = values_in(tmp_path / f"{tied} {cuts_vocabulary}.pt")
        assert_equal(again, values_in(tmp_path / f"{tied}.pt"), atol=0)


def save_after_a_step(model: nn.Module, optimizer_class: Any, file: Path) -> None:
    optimizer = optimizer_class(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    save_checkpoint(file, 1, model, optimizer)


class Factored(Adafactor):
    """An optimizer with states of rows and columns that a user has declared to be elementwise, wrongly."""


declare_elementwise(Factored)


def refuse_states_of_other_shapes(folder: Path) -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": MODES["2d"]}}, verbose=False)
    restart("2d")
    model = nn.Sequential(col_nn.Linear(8, 16))
    with pytest.raises(
        ValueError, match=r"the state of '0.weight', .* holds row_var \(4, 1\), col_var \(1, 8\)"
    ):
        save_after_a_step(model, Factored, folder / "other.pt")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before["0.weight"].shape == (4, 8)  # as with any module, a state dict is what this rank has
    with pytest.raises(ValueError, match=r"0.weight .* how to cut row_var \(16, 1\), col_var \(1, 8\)"):
        load_checkpoint(folder / "adafactor.pt", model, Factored(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_states_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    save_after_a_step(nn.Sequential(nn.Linear(8, 16)), Adafactor, tmp_path / "adafactor.pt")
    run_ranks(refuse_states_of_other_shapes, 4, tmp_path)
    assert not (tmp_path / "other.pt").exists()
