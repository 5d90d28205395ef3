"""The config of a service: what is read of it, and what is said of each thing that is wrong."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.context import Config, ConfigException
from colossalai.inference.loading._serving_config import _ALLOWED, ServingConfig
from colossalai.inference.models import opt_125M

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

NAMES = [field.name for field in dataclasses.fields(ServingConfig)]

DOCUMENTED = """
from colossalai.inference.models import bloom_560M, opt_125M

model_class = opt_125M
model_type = "gpt"
host = "127.0.0.1"
port = 29402
half = True
checkpoint = "/model_checkpoint"
backend = "nccl"

tp_init_size = 2
pp_init_size = 1

_shop = "A chat between a salesman and a student."
tokenizer_path = "/model_checkpoint"
server_host = "0.0.0.0"
server_port = 8020
log_level = "info"
allow_cors = True
executor_max_batch_size = 16
executor_max_queue_size = 0
cache_size = 50
cache_list_size = 2
fixed_cache_keys = [(_shop, 64), ["Hello", 32]]
timeout_keep_alive = 180
"""


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "opt_config.py"
    path.write_text(DOCUMENTED)
    config = ServingConfig.from_file(path)
    assert config.model_class is opt_125M
    assert (config.tp_init_size, config.port, config.backend, config.half) == (2, 29402, "nccl", True)
    assert (config.server_host, config.server_port, config.timeout_keep_alive) == ("0.0.0.0", 8020, 180)
    assert config.fixed_cache_keys == (
        ("A chat between a salesman and a student.", 64),
        ("Hello", 32),
    )
    model = config.resolve()
    assert model.config.hidden_size == 768
    assert config.dtype_of(model) == torch.float16
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1


def test_what_is_left_out_has_the_documented_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model_class: bloom_560M\ncheckpoint: weights.pt\n")
    config = ServingConfig.from_file(tmp_path / "c.yaml")
    assert (config.server_port, config.server_host, config.log_level) == (8020, "127.0.0.1", "info")
    assert (config.tp_init_size, config.pp_init_size, config.cache_size, config.cache_list_size) == (
        1,
        1,
        0,
        1,
    )
    assert config.resolve().name == "bloom_560M"


def test_dtypes() -> None:
    def dtype(half: bool | None, published: str) -> torch.dtype:
        config = ServingConfig(model_class=lambda: opt_125M(dtype=published), checkpoint="c", half=half)
        return config.dtype_of(config.resolve())

    assert dtype(None, "float32") == dtype(False, "bfloat16") == torch.float32
    assert dtype(True, "bfloat16") == dtype(None, "bfloat16") == torch.bfloat16
    assert dtype(True, "float32") == torch.float16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_size": 2}, "'tp_size' is no key of a service; the nearest is 'tp_init_size'"),
        ({"sever_port": 2, "colour": 1}, "nearest is 'server_port'.*; 'colour' is no key"),
        ({"tp_init_size": 0}, "tp_init_size is 0; it must be a whole number from 1"),
        ({"tp_init_size": True}, "tp_init_size is True; it must be a whole number"),
        ({"server_port": "8020"}, "server_port is '8020'; it must be a whole number from 0 to 65535"),
        ({"port": 70000, "half": "yes"}, "port is 70000; .*; half is 'yes'; it must be True, False or None"),
        ({"log_level": "loud"}, "log_level is 'loud'; it must be one of critical, error"),
        ({"log_level": ["info"]}, "log_level is .*one of critical"),
        ({"checkpoint": 3}, "checkpoint is 3; it must be a path, or None"),
        ({"fixed_cache_keys": [("a", 0)]}, "fixed_cache_keys is .*pairs of a prompt and a number of tokens"),
        ({"fixed_cache_keys": "ab"}, "fixed_cache_keys is 'ab'"),
        ({"timeout_keep_alive": float("nan")}, "timeout_keep_alive is nan; it must be a number of seconds"),
        ({"engine_server": "launch_engine"}, "engine_server is 'launch_engine'; it must be a function"),
        ({"model_class": 5}, "model_class is 5; it must be a function of colossalai.inference.models"),
        ({"host": ""}, "host is ''; it must be a text"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigException, match=message):
        ServingConfig.from_config(Config({"model_class": opt_125M, **given}))


def test_a_file_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_text("import math\ntp_init_size = 1\n")
    with pytest.raises(ConfigException, match=r"c.py': model_class is missing: name a function") as caught:
        ServingConfig.from_file(path)
    assert str(caught.value).count("c.py") == 1
    with pytest.raises(ConfigException, match=r"^config file .*absent.py' does not exist") as caught:
        ServingConfig.from_file(tmp_path / "absent.py")
    assert str(caught.value).count("absent.py") == 1


def test_what_the_model_says_otherwise() -> None:
    with pytest.raises(ConfigException, match="model_type is 'bloom', and opt_125M is a 'opt': leave it out"):
        ServingConfig(model_class=opt_125M, model_type="bloom", checkpoint="c").resolve()
    assert ServingConfig(model_class=opt_125M, model_type="opt", checkpoint="c").resolve().name == "opt_125M"
    with pytest.raises(ConfigException, match="opt_125M has no values of its own: name the file or folder"):
        ServingConfig(model_class="opt_125M").resolve()
    with pytest.raises(ConfigException, match="'nowhere' is no folder here"):
        ServingConfig(model_class="nowhere").resolve()


def test_keys_that_stay_in_no_cache_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    ServingConfig(model_class=opt_125M, fixed_cache_keys=[("a", 1)])
    assert "fixed_cache_keys have no effect: cache_size is 0" in "".join(capfd.readouterr())


def test_each_key_is_checked() -> None:
    assert list(_ALLOWED) == NAMES


def test_the_document_has_each_key() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/features/served_models.md").read_text()
    _, _, table = text.partition("| key | default | meaning |\n| --- | --- | --- |\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert sorted(key for row in rows for key in re.findall("`(\\w+)`", row.split("|")[1])) == sorted(NAMES)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70000), st.floats(), st.text(max_size=3), st.just([("a", 1)])
)


@given(st.dictionaries(st.sampled_from([*NAMES, "tp", "x"]), VALUES))
def test_anything_is_a_config_or_an_error_that_names_each_misfit(given: dict[str, Any]) -> None:
    unknown = [name for name in given if name not in NAMES]
    wrong = [name for name in given if name in NAMES and not _ALLOWED[name][0](given[name])]
    if not unknown and not wrong and "model_class" in given:
        config = ServingConfig.from_config(given)
        assert isinstance(hash(config), int)
        return
    with pytest.raises(ConfigException) as caught:
        ServingConfig.from_config(given)
    said = str(caught.value)
    assert all(f"'{name}' is no key" in said for name in unknown)
    if not unknown and "model_class" in given:
        assert all(f"{name} is {given[name]!r:.80}; it must be" in said for name in wrong)
