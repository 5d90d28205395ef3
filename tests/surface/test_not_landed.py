"""What the documents promise and is not there yet says so, however it is asked for."""

import importlib
import importlib.util
from pathlib import Path

import pytest

import colossalai
from colossalai._not_landed import FEATURES, NOT_LANDED
from tests.surface.test_surface import promises_in

pytestmark = pytest.mark.unit

PROMISED = Path(__file__).with_name("promised.txt")


def _missing() -> list[tuple[str, str]]:
    """Return (module, name) of every promise that is not kept yet."""
    there = set(promises_in(PROMISED.with_name("surface.txt")))
    return [promise for promise in promises_in(PROMISED) if promise not in there]


@pytest.mark.parametrize(("module", "name"), _missing(), ids=[".".join(each) for each in _missing()])
def test_a_missing_name_says_what_to_use_instead(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=r"is not there yet.*has not landed; ") as caught:
        exec(f"from {module} import {name}", {})
    text = str(caught.value)
    assert text in NOT_LANDED.values()
    assert any(feature.instead in text for feature in FEATURES)
    assert "\n" not in text
    _ask_by_attributes(f"{module}.{name}")


def _ask_by_attributes(path: str) -> None:
    """As `colossalai.nn.MoeLoss` does after `import colossalai`: the first part that is missing says so."""
    asked: object = colossalai
    for part in path.split(".")[1:]:
        if not hasattr(asked, part):
            with pytest.raises(AttributeError, match=r"is not there yet.*has not landed; "):
                getattr(asked, part)
            return
        asked = getattr(asked, part)
    pytest.fail(f"{path} is there")


@pytest.mark.parametrize("module", [module for feature in FEATURES for module in feature.modules])
def test_a_missing_module_says_what_to_use_instead(module: str) -> None:
    with pytest.raises(ImportError, match=f"{module} is not there yet"):
        importlib.import_module(module)
    with pytest.raises(ImportError, match=f"{module} is not there yet"):
        importlib.import_module(f"{module}.below")
    parent, _, name = module.rpartition(".")
    with pytest.raises(ImportError, match=f"{module} is not there yet"):
        exec(f"from {parent} import {name}", {})


def test_what_has_landed_is_not_in_the_table() -> None:
    for name in NOT_LANDED:
        module, _, last = name.rpartition(".")
        assert not hasattr(importlib.import_module(module), last), name
    promised = {f"{module}.{name}" for module, name in promises_in(PROMISED)}
    unasked = [
        name
        for name in NOT_LANDED
        if name not in promised and not any(each.startswith(f"{name}.") for each in promised)
    ]
    assert unasked == [
        "colossalai.nn.parallel.data_parallel.ColoDDP",
        "colossalai.booster.mixed_precision.FP8MixedPrecision",
    ]


def test_other_names_fail_as_ever() -> None:
    with pytest.raises(AttributeError, match=r"module 'colossalai\.zero' has no attribute 'GeminiDPP'"):
        colossalai.zero.GeminiDPP  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'MoeLos'"):
        exec("from colossalai.nn import MoeLos", {})
    assert importlib.util.find_spec("colossalai.germini") is None
    assert not hasattr(colossalai.nn, "MoeLos")


def test_zero_through_its_other_door() -> None:
    from colossalai.nn.parallel import zero_model_wrapper, zero_optim_wrapper

    assert zero_model_wrapper is colossalai.zero.zero_model_wrapper
    assert zero_optim_wrapper is colossalai.zero.zero_optim_wrapper


@pytest.mark.parametrize("asked", ["fp8", "FP8", "fp8_e4m3"])
def test_fp8_says_that_it_has_not_landed(asked: str) -> None:
    from colossalai.amp import convert_to_amp
    from colossalai.booster.mixed_precision import mixed_precision_factory
    from colossalai.context import Config, ConfigException
    from colossalai.context._features import check_config

    with pytest.raises(ValueError, match=r"fp8.* has not landed; take 'bf16'"):
        mixed_precision_factory(asked)
    with pytest.raises(ConfigException, match=r"fp8.* has not landed; take 'bf16'"):
        check_config(Config(fp16={"mode": asked}), 1)
    with pytest.raises(ValueError, match=r"fp8.* has not landed; take 'bf16'"):
        convert_to_amp(None, None, None, asked)  # type: ignore[arg-type]
