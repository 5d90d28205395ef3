"""Overrides of a config: from words of a command line, through the environment, over the script's config."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest

from colossalai.context import OVERRIDES_VARIABLE, Config, ConfigException, ParallelContext, join_overrides
from colossalai.context._config import parse_override, with_overrides
from colossalai.context._features import FEATURE_KEYS

pytestmark = pytest.mark.unit


def overridden(config: dict[str, Any], *words: str) -> Config:
    text = join_overrides(words, environment={})
    return with_overrides(Config(config), FEATURE_KEYS, environment={OVERRIDES_VARIABLE: text})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 0.001),
        ("-.5", -0.5),
        ("bf16", "bf16"),
        ("None", None),
        ("null", None),
        ("True", True),
        ("false", False),
        ("[1, 2]", [1, 2]),
        ("(4, 1024)", (4, 1024)),
        ('{"size": 2}', {"size": 2}),
        ("{'size': 2}", {"size": 2}),
        ("'12'", "12"),
        ("''", ""),
        ("a b=c", "a b=c"),
        ("data/part-1.txt", "data/part-1.txt"),
        (" 2 ", 2),
    ],
)
def test_values_are_literals_or_words(text: str, value: Any) -> None:
    found = overridden({"own": 0}, f"own={text}").own
    assert found == value
    assert type(found) is type(value) or isinstance(value, dict)


def test_an_override_goes_before_the_config_which_stays_as_it_is() -> None:
    config = Config(lr=0.1, fp16={"mode": "torch", "init_scale": 4.0}, model={"depth": 2, "width": 8})
    before = copy.deepcopy(config)
    words = ("fp16.init_scale=8", "model.depth=3", "lr=1", "lr=2", "clip_grad_norm=1.0", "zero.stage=2")
    assert overridden(config, *words) == {
        "lr": 2,
        "fp16": {"mode": "torch", "init_scale": 8},
        "model": {"depth": 3, "width": 8},
        "clip_grad_norm": 1.0,
        "zero": {"stage": 2},
    }
    assert config == before
    assert overridden({"fp16": None}, "fp16.mode=bf16").fp16.mode == "bf16"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fp16", "--set 'fp16' is not an override: write KEY=VALUE"),
        ("=1", "is not an override"),
        ("fp16..mode=bf16", "is not an override"),
        ("a-b=1", "is not an override"),
        ("lr=", "no value follows the '='"),
        ("parallel={'pipeline': 2", "neither a Python nor a JSON literal"),
        ("parallel=dict(pipeline=2)", "neither a Python nor a JSON literal"),
    ],
)
def test_bad_syntax_is_told(word: str, message: str) -> None:
    with pytest.raises(ConfigException, match=message.replace("(", r"\(")):
        parse_override(word)
    with pytest.raises(ConfigException):
        join_overrides([word], environment={})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lrr=1", "--set lrr: the config has no 'lrr', and it is not a feature; did you mean 'lr'?"),
        ("fp61.mode=bf16", "did you mean 'fp16'?"),
        ("model.dept=1", "--set model.dept: the config has no 'dept'.* did you mean 'depth'?"),
        ("lr.a=1", "--set lr.a: lr is 0.1 in the config, which has no keys: set lr itself"),
    ],
)
def test_an_unknown_key_is_told(word: str, message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        overridden({"lr": 0.1, "model": {"depth": 2}}, word)


def test_launch_takes_them_from_the_environment_and_checks_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text('{"fp16": {"mode": "torch"}, "lr": 0.1}')
    monkeypatch.setenv(OVERRIDES_VARIABLE, "fp16.mode=bf16 lr=1e-3")
    context = ParallelContext()
    context.load_config(tmp_path / "c.json")
    context.init_parallel_groups(rank=0, world_size=1)
    assert context.config == {"fp16": {"mode": "bf16"}, "lr": 0.001}
    monkeypatch.setenv(OVERRIDES_VARIABLE, "fp16.mod=bf16")
    context.load_config(tmp_path / "c.json")
    with pytest.raises(ConfigException, match=r"fp16 .*has no key 'mod': did you mean 'mode'"):
        context.init_parallel_groups(rank=0, world_size=1)
    monkeypatch.setenv(OVERRIDES_VARIABLE, "'lr")
    with pytest.raises(ConfigException, match="is not a list of words"):
        context.load_config(None)


def test_words_are_added_to_those_of_the_environment() -> None:
    text = join_overrides(["name='a b'"], environment={OVERRIDES_VARIABLE: "lr=1"})
    assert shlex.split(text) == ["lr=1", "name='a b'"]
