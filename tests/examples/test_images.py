"""The image examples and the vision transformer: each reaches the accuracy it promises, under each config.

Networks of other libraries are optional.
"""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.examples.scripts import EXAMPLES, example_module, run_script
from tests.ranks import RanksError, run_ranks
from tests.tiers import in_soak

data = example_module("images/data.py")
model = example_module("images/model.py")


@pytest.mark.dist
def test_a_training_that_is_too_short_is_a_failure(tmp_path: Path) -> None:
    """All of the script, in one epoch of six; that it keeps what it promises is in the long tier."""
    config = tmp_path / "short.py"
    config.write_text((EXAMPLES / "images" / "config.py").read_text() + "NUM_EPOCHS = 1\n")
    with pytest.raises(RanksError) as caught:
        run_ranks(run_script, 2, "images/train_engine.py", f"--config={config}")
    percents = re.findall(r"test accuracy ([\d.]+)% is not above 95%", str(caught.value))
    assert min(map(float, percents)) > 20, "a guess is right in 10 %"


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    "script", ["train_booster.py", *map(in_soak, ("train_engine.py", "train_trainer.py"))]
)
def test_the_promised_accuracy_is_reached(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(run_script, 2, f"images/{script}")
    captured = capfd.readouterr()
    accuracies = re.findall(r"test accuracy ([\d.]+)%|test: .*Accuracy ([\d.]+)", captured.out + captured.err)
    percent, share = accuracies[-1]
    assert (float(percent) / 100 if percent else float(share)) > 0.95


@pytest.mark.long
@pytest.mark.dist
def test_the_booster_example_runs_sharded_in_bfloat16() -> None:
    options = ("--plugin=torch_fsdp", "--precision=bf16", "--epochs=1")
    with pytest.raises(RanksError, match=r"test accuracy .* is not above 95%"):  # after one epoch
        run_ranks(run_script, 2, "images/train_booster.py", *options)


@pytest.mark.unit
def test_images_are_split_without_overlap() -> None:
    train, test = data.load_images()
    assert (len(train), len(test)) == (1438, 359)
    assert train.tensors[0].shape[1:] == (1, 8, 8)
    assert torch.cat([train.tensors[1], test.tensors[1]]).bincount().tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    again, _ = data.load_images()
    assert torch.equal(train.tensors[0], again.tensors[0])


@pytest.mark.unit
def test_networks_of_other_libraries_are_fitted_to_grey_images(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.resnet18 = lambda num_classes: SimpleNamespace(num_classes=num_classes)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    built = model.build_model(num_classes=7, library="torchvision")
    assert (built.num_classes, built.conv1.in_channels) == (7, 1)
    assert isinstance(built.maxpool, nn.Identity)


@pytest.mark.unit
def test_a_library_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"timm does not import here .* use the library model_zoo"):
        model.build_model(num_classes=7, library="timm")
    with pytest.raises(ValueError, match="library 'keras': choose one of model_zoo, torchvision, timm"):
        model.build_model(num_classes=7, library="keras")


@pytest.mark.dist
def test_a_transformer_that_trains_too_short_is_a_failure(tmp_path: Path) -> None:
    """All of the script, in a third of its epochs; that it keeps what it promises is in the long tier."""
    config = tmp_path / "short.py"
    base = (EXAMPLES / "vit" / "configs" / "base.py").read_text()
    config.write_text(f"{base}\nBATCH_SIZE = 32\nNUM_EPOCHS = 4\n")
    with pytest.raises(RanksError) as caught:
        run_ranks(run_script, 2, "vit/train.py", f"--config={config}")
    percents = re.findall(r"test accuracy ([\d.]+)% is not above 95%", str(caught.value))
    assert min(map(float, percents)) > 20, "a guess is right in 10 %"


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(("config", "num_ranks"), [("data", 2), ("pipeline", 2), in_soak("hybrid", 4)])
def test_the_promised_accuracy_is_reached_by_a_transformer(
    config: str, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / "vit" / "configs" / f"{config}.py"
    run_ranks(run_script, num_ranks, "vit/train.py", f"--config={path}")
    captured = capfd.readouterr()
    *_, accuracy = re.findall(r"test: .*Accuracy ([\d.]+)", captured.out + captured.err)
    assert float(accuracy) > 0.95
