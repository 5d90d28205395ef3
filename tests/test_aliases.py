"""The import finder for other spellings: one module under two names, whatever is imported first."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from colossalai import _aliases

pytestmark = pytest.mark.unit

TREE = {
    "__init__.py": "",
    "home/__init__.py": "from house.home._leaf import Leaf as Leaf\n",
    "home/_leaf.py": "RUNS = []\nRUNS.append(1)\nclass Leaf: ...\n",
    "home/_other.py": "from house.short import Leaf as Leaf\n",
    "away/__init__.py": "",
    "broken.py": "raise RuntimeError('broken on purpose')\n",
    "circle.py": "import house.circle_alias as other\nVALUE = 1\n",
}
ALIASES = {
    "house.short": "house.home",
    "house.away.leaf": "house.home._leaf",
    "house.short.twig": "house.home._leaf",
    "house.gone": "house.nowhere",
    "house.bad": "house.broken",
    "house.circle_alias": "house.circle",
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A small package `house`, new on disk and not imported, with the finder for its aliases."""
    for name, text in TREE.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [_aliases.AliasFinder(ALIASES), *sys.meta_path])
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def test_the_alias_is_the_home(load: Callable[[str], ModuleType]) -> None:
    alias = load("house.away.leaf")
    assert alias is load("house.home._leaf")
    assert alias.RUNS == [1]
    assert (alias.__name__, alias.Leaf.__module__) == ("house.home._leaf", "house.home._leaf")


@pytest.mark.parametrize("home_first", [True, False])
def test_the_spec_stays_that_of_the_home(load: Callable[[str], ModuleType], home_first: bool) -> None:
    if home_first:
        load("house.home")
    alias = load("house.short")
    assert alias.__spec__ is not None
    assert alias.__spec__.name == "house.home"
    assert alias.__spec__.submodule_search_locations
    assert importlib.reload(alias) is load("house.home")


def test_parents_have_both_names(load: Callable[[str], ModuleType]) -> None:
    leaf = load("house.away.leaf")
    assert load("house.away").leaf is leaf
    assert load("house.home")._leaf is leaf
    assert not hasattr(load("house.home"), "leaf")


def test_what_is_below_an_alias_follows(load: Callable[[str], ModuleType]) -> None:
    below = load("house.short._leaf")
    assert below is load("house.home._leaf")
    assert below.RUNS == [1]
    assert load("house.short") is load("house.home")


def test_an_alias_below_an_alias_is_a_name_of_it(load: Callable[[str], ModuleType]) -> None:
    scope: dict[str, object] = {}
    exec("from house.short import twig", scope)  # looks for `house.home.twig`, as the package is `house.home`
    assert scope["twig"] is load("house.short.twig") is load("house.home._leaf")
    with pytest.raises(ImportError, match="cannot import name 'bough'"):
        exec("from house.short import bough", scope)


def test_what_has_not_landed_below_an_alias_says_so(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = _aliases.AliasFinder(ALIASES, {"house.short.bough": "take a twig"})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for statement in ("import house.short.bough", "from house.short import bough"):
        with pytest.raises(ImportError, match="take a twig"):
            exec(statement, {})


def test_a_home_may_use_its_own_alias(load: Callable[[str], ModuleType]) -> None:
    assert load("house.home._other").Leaf is load("house.home").Leaf
    assert load("house.circle").other is load("house.circle")


def test_classes_pickle(load: Callable[[str], ModuleType]) -> None:
    leaf = load("house.away.leaf").Leaf()
    assert type(pickle.loads(pickle.dumps(leaf))) is load("house.home").Leaf


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("house.gone", ModuleNotFoundError, "No module named 'house.nowhere'"),
        ("house.bad", RuntimeError, "broken on purpose"),
        ("house.shorter", ModuleNotFoundError, "No module named 'house.shorter'"),
    ],
)
def test_errors_are_those_of_the_home(
    load: Callable[[str], ModuleType], name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(name)
    assert name not in sys.modules


def test_find_spec_imports_nothing(load: Callable[[str], ModuleType]) -> None:
    load("house.away")
    assert importlib.util.find_spec("house.away.leaf") is not None
    assert "house.home" not in sys.modules


def test_a_module_is_extended_after_its_import(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    finder = _aliases.AliasFinder(
        ALIASES, after_import={"house.home._leaf": lambda leaf: seen.append(leaf.RUNS)}
    )
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    load("house.home")
    assert importlib.util.find_spec("house.home._leaf") is not None
    assert seen == [[1]]
    importlib.reload(load("house.home._leaf"))
    assert seen == [[1], [1]]


BACKEND = """
import sys
{first}
assert ("torch" in sys.modules) == {has_torch}
{then}
assert "shared_memory" in torch.distributed.Backend.backend_list
"""


@pytest.mark.parametrize("torch_first", [True, False])
def test_the_backend_is_registered_in_either_order(torch_first: bool) -> None:
    first, then = "import colossalai", "import torch.distributed"
    if torch_first:
        first, then = then, first
    program = BACKEND.format(first=first, then=then, has_torch=torch_first)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_one_finder_even_after_a_reload() -> None:
    def count() -> int:
        return sum(type(finder).__name__ == "AliasFinder" for finder in sys.meta_path)

    assert count() == 1
    importlib.reload(_aliases)
    assert count() == 1


def test_no_alias_has_a_file() -> None:
    root = Path(_aliases.__file__).parent.parent
    for alias, home in _aliases.AliasFinder(_aliases.ALIASES).aliases.items():
        path = root / Path(*alias.split("."))
        assert not path.with_suffix(".py").exists(), alias
        assert not (path / "__init__.py").exists(), alias
        assert home not in _aliases.ALIASES, "an alias of an alias"


CHECK_ALL = """
import importlib, pkgutil
from colossalai._aliases import ALIASES
for alias, home in ALIASES.items():
    parent, _, name = alias.rpartition(".")
    scope = {}
    exec(f"from {parent} import {name}", scope)
    module = importlib.import_module(alias)
    assert scope[name] is module is importlib.import_module(home), alias
    assert module.__spec__.name == home, alias
    assert getattr(importlib.import_module(parent), name) is module, alias
    for _, name, _ in pkgutil.iter_modules(getattr(module, "__path__", ())):
        below = importlib.import_module(f"{alias}.{name}")
        assert below is importlib.import_module(f"{home}.{name}"), f"{alias}.{name}"
"""


def test_the_aliases_of_the_package() -> None:
    """In a process of its own: in this one others have imported the homes before."""
    run = subprocess.run(
        [sys.executable, "-c", CHECK_ALL], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
