"""Config: attribute access at every depth, from a dict or a file."""

import collections
import copy
import math
import pickle
import statistics
import sys

import pytest

from colossalai.context import Config, ConfigException
from colossalai.context._config import load_config
from colossalai.context._features import check_config

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


IMPORTING = """
import math
import os.path as paths
from collections import *
from math import floor, sqrt, tau
from statistics import mean, median

LOUD = True
mode = mean
rounding = metric = math.ceil
kind: type = Counter
if LOUD:
    floor = floor
for loss in (median,):
    pass
numbers = math
size = [sqrt for sqrt in (1, 2)]
if (activation := math.tanh):
    pass
"""


def test_what_a_file_assigns_stays_and_what_it_only_imports_goes(tmp_path):
    path = tmp_path / "importing.py"
    path.write_text(IMPORTING)
    config = Config.from_file(path)
    assigned = {"mode", "rounding", "metric", "kind", "floor", "loss", "activation", "LOUD", "size"}
    assert set(config) == assigned | {"tau"}  # a value
    assert config.mode is statistics.mean
    assert config.kind is collections.Counter
    assert config.metric is config.rounding is math.ceil
    assert config.activation is math.tanh
    assert config.loss is statistics.median


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "latin.py"
    path.write_bytes(
        "# -*- coding: latin-1 -*-\nfrom math import sqrt\nname, f = 'gr\xfc\xdfe', sqrt\n".encode("latin-1")
    )
    assert Config.from_file(path) == {"name": "gr\xfc\xdfe", "f": math.sqrt}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.toml", "", "must end with .py, .yaml, .yml or .json"),
        ("list.yaml", "- 1\n- 2\n", "list.yaml' holds a list; it must hold names with values"),
        ("number.yaml", "1: 2\n", "number.yaml' holds a dict; it must hold names"),
        ("broken.yaml", "a: 1\nb: [1\n", "broken.yaml': line 3 is not valid YAML"),
        ("twice.yml", "a: {b: 1, b: 2}\n", "the key 'b' occurs twice"),
        ("code.yaml", "a: !!python/object/apply:os.getcwd []\n", "line 1 is not valid YAML"),
        ("broken.json", '{"a": 1,\n "b"}', "broken.json': line 2 is not valid JSON"),
        ("twice.json", '{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("absent.py", None, "does not exist"),
        ("broken.py", "x = 1 / 0", "broken.py' fails at line 1: ZeroDivisionError"),
        ("syntax.py", "y = 1\nx =", "syntax.py' fails at line 2: SyntaxError"),
        ("name.py", "A = 1\n\nB = BATCH", "name.py' fails at line 3: NameError: name 'BATCH' is not"),
        ("deep.py", "import json\nX = json.loads('{')", "deep.py' fails at line 2: JSONDecodeError"),
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


YAML = """
fp16: {mode: bf16}
lr: 1e-3
defaults: &d {size: 2}
parallel:
  pipeline: {<<: *d, partition: balanced}
  tensor: {size: 2, mode: 1d}
NUM_MICRO_BATCHES: 4
betas: [0.9, .95]
name: 12e
"""
JSON = """{"fp16": {"mode": "bf16"}, "lr": 1e-3, "defaults": {"size": 2}, "NUM_MICRO_BATCHES": 4,
"name": "12e", "parallel": {"pipeline": {"size": 2, "partition": "balanced"},
"tensor": {"size": 2, "mode": "1d"}}, "betas": [0.9, 0.95]}"""


def test_yaml_and_json_say_what_python_says(tmp_path):
    expected = {
        "fp16": {"mode": "bf16"},
        "lr": 0.001,
        "defaults": {"size": 2},
        "parallel": {"pipeline": {"size": 2, "partition": "balanced"}, "tensor": {"size": 2, "mode": "1d"}},
        "NUM_MICRO_BATCHES": 4,
        "betas": [0.9, 0.95],
        "name": "12e",
    }
    for name, text in {"c.yaml": YAML, "c.yml": YAML, "c.json": JSON}.items():
        (tmp_path / name).write_text(text)
        config = load_config(tmp_path / name)
        assert config == expected, name
        assert config.parallel.tensor.mode == "1d"
        check_config(config, 4)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == {}


def test_yaml_is_optional(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigException, match=r"c.yaml': a YAML file needs the PyYAML.*colossalai\[yaml\]"):
        load_config(tmp_path / "c.yaml")
