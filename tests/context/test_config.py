"""Config: attribute access at every depth, from a dict or a file."""

import copy
import pickle

import pytest

from colossalai.context import Config, ConfigException
from colossalai.context._config import load_config

pytestmark = pytest.mark.unit


def test_attributes_at_every_depth():
    config = Config({"a": {"b": [{"c": 1}]}}, lr=0.1)
    assert config.a.b[0].c == 1
    assert config["a"]["b"][0]["c"] == 1
    config.a.d = {"e": 2}
    assert config.a.d.e == 2
    config.update(f={"g": 3})
    assert config.f.g == 3
    assert config.setdefault("h", {"i": 4}).i == 4
    del config.a
    assert "a" not in config


def test_a_missing_item_is_an_attribute_error_so_that_getattr_has_a_default():
    config = Config(lr=0.1)
    assert getattr(config, "gradient_accumulation", 1) == 1
    with pytest.raises(AttributeError, match="no 'momentum'; it has \\['lr'\\]"):
        _ = config.momentum
    with pytest.raises(AttributeError, match="no 'momentum'"):
        del config.momentum


def test_copies_and_pickles_are_equal_configs():
    config = Config({"a": {"b": 1}})
    for twin in (config.copy(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert isinstance(twin.a, Config)
    deep = copy.deepcopy(config)
    deep.a.b = 2
    assert config.a.b == 1


def test_a_file_gives_its_public_names(tmp_path):
    (tmp_path / "sizes.py").write_text("WIDTH = 7\n")
    path = tmp_path / "my-config.py"
    path.write_text(
        "import os\n"
        "from math import sqrt\n"
        "from colossalai.amp import AMP_TYPE\n"
        "from sizes import WIDTH\n"
        "def schedule(step):\n    return step\n"
        "_private = 1\n"
        "BATCH_SIZE = 32\n"
        "fp16 = dict(mode=AMP_TYPE.TORCH)\n"
        "parallel = dict(tensor=dict(size=1))\n"
    )
    config = Config.from_file(path)
    assert set(config) == {"WIDTH", "BATCH_SIZE", "fp16", "parallel", "schedule"}
    assert config.parallel.tensor.size == 1
    assert config.fp16.mode.name == "TORCH"
    assert load_config(str(path)) == config or callable(config.schedule)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "", "must end with .py"),
        ("absent.py", None, "does not exist"),
        ("broken.py", "x = 1 / 0", "ZeroDivisionError"),
        ("syntax.py", "x =", "SyntaxError"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigException, match=message):
        Config.from_file(tmp_path / name)


def test_a_config_of_another_type_is_refused():
    with pytest.raises(ConfigException, match="config is a int"):
        load_config(3)
    assert load_config(None) == {}
