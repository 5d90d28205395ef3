"""The registry: names to classes, with errors that help."""

import types
from pathlib import Path

import pytest

from colossalai.registry import LAYERS, LOSSES, LR_SCHEDULERS, OPTIMIZERS, Registry

pytestmark = pytest.mark.unit


@pytest.fixture
def registry() -> Registry:
    return Registry("things")


def test_a_registered_class_is_found(registry: Registry):
    @registry.register_module
    class Thing:
        pass

    assert registry.get_module("Thing") is Thing
    assert registry.has("Thing")
    registry.remove_module("Thing")
    assert not registry.has("Thing")


def test_the_nearest_name_is_suggested(registry: Registry):
    @registry.register_module
    class DataParallelHandler:
        pass

    with pytest.raises(
        ValueError, match="'DataParalelHandler' is not in the registry 'things'; did you mean 'DataPar"
    ):
        registry.get_module("DataParalelHandler")
    with pytest.raises(ValueError, match="did you mean 'DataParallelHandler'"):
        registry.get_module("dataparallelhandler")
    with pytest.raises(ValueError, match="registered are DataParallelHandler"):
        registry.get_module("xyz")


def test_an_empty_registry_says_what_to_import(registry: Registry):
    with pytest.raises(
        ValueError, match=r"nothing is registered: import the file that holds its @register_module"
    ):
        registry.get_module("Thing")
    with pytest.raises(ValueError, match="'Thing' is not in the registry"):
        registry.remove_module("Thing")


def test_double_registration_is_an_error(registry: Registry):
    def thing() -> None:
        pass

    registry.register_module(thing)
    with pytest.raises(
        ValueError, match=r"'thing' is already in the registry 'things' \(tests.registry.*thing\)"
    ):
        registry.register_module(thing)
    registry.remove_module("thing")
    registry.register_module(thing)


def test_what_users_expect_from_torch_is_found():
    import torch

    assert OPTIMIZERS.get_module("AdamW") is torch.optim.AdamW
    assert LOSSES.get_module("MSELoss") is torch.nn.MSELoss
    assert LAYERS.has("Linear")
    assert LR_SCHEDULERS.has("StepLR")
    with pytest.raises(ValueError, match="did you mean 'AdamW'"):
        OPTIMIZERS.get_module("Adamw")


def test_a_registered_name_wins_over_a_library(registry: Registry):
    library = types.ModuleType("library")
    library.Thing = type("Thing", (), {})
    library.number = 1
    library._hidden = print
    registry = Registry("things", [library])
    assert registry.get_module("Thing") is library.Thing
    assert not registry.has("number")
    assert not registry.has("_hidden")

    @registry.register_module
    class Thing:
        pass

    assert registry.get_module("Thing") is Thing


def test_a_library_that_does_not_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("things", ["broken_library"])
    assert not registry.has("Thing")
    with pytest.raises(ValueError, match=r"broken_library was not searched, .*RuntimeError: operator nms"):
        registry.get_module("Thing")
