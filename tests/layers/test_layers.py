"""The package keeps its rules, and the checker catches each kind of breach."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import colossalai
from colossalai._aliases import ALIASES
from tests.layers.checker import RULES, Package, violations
from tests.layers.floors import CONTEXT_READERS, VENDOR_FILES

pytestmark = pytest.mark.unit

FOLDER = Path(colossalai.__file__).parent


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(FOLDER, frozenset(ALIASES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Package], Iterator[str]], package: Package) -> None:
    breaches = list(rule(package))
    assert not breaches, "\n".join(breaches)


def test_the_package_was_read(package: Package) -> None:
    assert len(package.modules) > 50
    assert sum(map(len, package.imports.values())) > 100


def test_the_exceptions_are_needed() -> None:
    for name in VENDOR_FILES:
        assert "cuda" in (FOLDER / name).read_text(), f"{name} needs no exception any more"
    for name in CONTEXT_READERS:
        assert "global_context" in (FOLDER / name).read_text(), f"{name} needs no exception any more"


GOOD = {
    "__init__.py": '"""Doc."""\nimport colossalai.context\n_NAMES = ("nn",)\ndef __getattr__(name): ...\n',
    "context/__init__.py": '"""Doc."""\nfrom colossalai.context._mesh import Mesh\n__all__ = ["Mesh"]\n',
    "context/_mesh.py": "from colossalai.logging import log\nclass Mesh: ...\n",
    "logging/__init__.py": "from ._logger import log as log\n",
    "logging/_logger.py": '"""The word cuda is allowed here."""\ndef log(): ...  # and cuda here\n',
    "zero/__init__.py": "if TYPE_CHECKING:\n    from colossalai.compat.utils import Mesh as Mesh\n",
    "pipeline/__init__.py": "",
    "nn/__init__.py": "",
    "nn/optimizer/__init__.py": "",
    "testing/__init__.py": "from colossalai.context import Mesh as Mesh\n",
    "compat/__init__.py": "",
    "compat/utils/__init__.py": "from colossalai.context import Mesh as Mesh\n",
    "_aliases.py": "HOMES = {'colossalai.utils': 'colossalai.compat.utils'}\n",
    "cluster/__init__.py": "",
    "cluster/_doctor.py": "import torch\ntorch.cuda.nccl.version()\n",
}

# name: (files of the package above that are replaced or added, what the checker says)
PLANTED = {
    "upward": (
        {"logging/_logger.py": "from colossalai.context._mesh import Mesh"},
        "logging/_logger.py:1: floor 0 (logging) imports colossalai.context._mesh of floor 1",
    ),
    "upward in a function": (
        {"logging/_logger.py": "def log():\n    import colossalai.context"},
        "logging/_logger.py:2: floor 0 (logging) imports colossalai.context of floor 1",
    ),
    "upward for types": (
        {"logging/_logger.py": "if TYPE_CHECKING:\n    from colossalai.context import Mesh\ndef log(): ..."},
        "floor 0 (logging) imports",
    ),
    "upward by name": (
        {"logging/_logger.py": "import importlib\nimportlib.import_module('colossalai.context')"},
        "floor 0 (logging) imports",
    ),
    "upward, relative": (
        {"logging/_logger.py": "from ..context._mesh import Mesh"},
        "floor 0 (logging) imports",
    ),
    "facade": (
        {"nn/__init__.py": "from colossalai.testing import Mesh"},
        "floor 3 (nn) imports colossalai.testing of floor 6",
    ),
    "facade from a facade": (
        {"testing/__init__.py": "from colossalai.compat.utils import Mesh"},
        "nothing inside imports a facade",
    ),
    "older spelling": (
        {"nn/_a.py": "import colossalai.compat.utils"},
        "floor 3 (nn) imports colossalai.compat.utils of floor 6",
    ),
    "older spelling under its documented path": (
        {"nn/_a.py": "def f():\n    from colossalai.utils import Mesh"},
        "colossalai.utils is an alias for users",
    ),
    "older spelling for types, not in a face": (
        {"nn/_a.py": "if TYPE_CHECKING:\n    from colossalai.compat.utils import Mesh"},
        "floor 3 (nn) imports colossalai.compat.utils of floor 6",
    ),
    "older spelling as data": (
        {"nn/_a.py": "HOME = 'colossalai.compat.utils'"},
        "nn/_a.py:1: names colossalai.compat.utils: only _aliases.py does",
    ),
    "the package itself": (
        {"nn/_a.py": "import colossalai"},
        "floor 3 (nn) imports colossalai of floor 6",
    ),
    "no floor": ({"attic/__init__.py": "import colossalai.logging"}, "colossalai.attic has no floor"),
    "strangers": (
        {"zero/_a.py": "import colossalai.pipeline"},
        "zero imports pipeline: they meet in runtime",
    ),
    "tensors only": (
        {"nn/optimizer/_a.py": "import colossalai.zero"},
        "nn.optimizer knows tensors only, not zero",
    ),
    "home in another package": (
        {"nn/__init__.py": "_HOMES = {'x': 'colossalai.zero'}\ndef __getattr__(name): ..."},
        "nn/__init__.py:1: colossalai.zero is the home of an alias",
    ),
    "alias": ({"nn/_a.py": "from colossalai.context import config"}, "colossalai.context.config is an alias"),
    "nowhere": ({"nn/_a.py": "from colossalai.context._nowhere import x"}, "there is no module"),
    "cycle of modules": (
        {"nn/_a.py": "import colossalai.nn._b", "nn/_b.py": "def f():\n    from colossalai.nn._a import x"},
        "import cycle between modules: colossalai.nn._",
    ),
    "cycle through the __init__": (
        {"context/_mesh.py": "from colossalai.context import x\nclass Mesh: ..."},
        "import cycle between modules: colossalai.context",
    ),
    "cycle of sub-packages": (
        {"context/_a.py": "import colossalai.cluster", "cluster/_a.py": "import colossalai.context._mesh"},
        "import cycle between sub-packages: ",
    ),
    "no __init__": ({"lazy/_a.py": ""}, "lazy/_a.py: its folder has no __init__.py"),
    "star": ({"nn/__init__.py": "from colossalai.context import *"}, "nn/__init__.py:1: import *"),
    "another default in an __init__": (
        {"nn/__init__.py": "if not TYPE_CHECKING:\n    __getattr__ = partial(f, __name__)"},
        "code in an __init__",
    ),
    "function in an __init__": ({"nn/__init__.py": "def f(): ..."}, "nn/__init__.py:1: code in an __init__"),
    "call in an __init__": ({"nn/__init__.py": "X = f()"}, "code in an __init__"),
    "call in __all__": ({"nn/__init__.py": "__all__ = dir()"}, "code in an __init__"),
    "constant in an __init__": ({"nn/__init__.py": "X = 1"}, "code in an __init__"),
    "if in an __init__": ({"nn/__init__.py": "if 1:\n    import os"}, "code in an __init__"),
    "vague file": ({"nn/_utils.py": ""}, "nn/_utils.py: '_utils' does not say what is inside"),
    "vague folder": ({"nn/common/__init__.py": ""}, "'common' does not say"),
    "vague folder named as a facade": ({"nn/utils/__init__.py": ""}, "'utils' does not say"),
    "vague folder where a facade was": ({"utils/__init__.py": ""}, "'utils' does not say"),
    "vague file in the root": ({"helpers.py": ""}, "'helpers' does not say"),
    "device attribute": ({"nn/_a.py": "import torch\nx = torch.cuda"}, "nn/_a.py:2: spells cuda"),
    "device text": ({"nn/_a.py": "x = 'cuda:0'"}, "nn/_a.py:1: spells cuda"),
    "device in an f-string": ({"nn/_a.py": "x = f'cuda:{1}'"}, "nn/_a.py:1: spells cuda"),
    "device import": ({"nn/_a.py": "from torch.cuda import amp"}, "nn/_a.py:1: spells cuda"),
    "the context": (
        {"nn/_a.py": "from colossalai.context import global_context\nglobal_context.mesh"},
        "nn/_a.py:1: reads the global context",
    ),
    "the context by another name, in a function": (
        {"nn/_a.py": "def f():\n    from colossalai.context import global_context as gpc"},
        "nn/_a.py:2: reads the global context",
    ),
    "the context through another module": (
        {
            "cluster/_doctor.py": "from colossalai.context import global_context as here\nplace = here\n",
            "nn/_a.py": "from colossalai.cluster._doctor import place as where",
        },
        "nn/_a.py:1: reads the global context",
    ),
    "the context as an attribute": (
        {"nn/_a.py": "import colossalai.context as c\nc.global_context.mesh"},
        "nn/_a.py:2: reads the global context by its name",
    ),
    "the context by getattr": (
        {"nn/_a.py": "import colossalai.context as c\ngetattr(c, 'global_context')"},
        "nn/_a.py:2: reads the global context by its name",
    ),
    "asked in a forward": (
        {"nn/_a.py": "class Layer:\n    def forward(self, x):\n        return launched_job().mesh"},
        "nn/_a.py:3: Layer.forward asks launched_job: ask in __init__",
    ),
    "device import, by name": ({"nn/_a.py": "from torch import cuda"}, "nn/_a.py:1: spells cuda"),
}


def _plant(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in {**GOOD, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return violations(Package(folder, frozenset(ALIASES)))


def test_a_good_package_has_no_breach(tmp_path: Path) -> None:
    assert _plant(tmp_path, {}) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_breach_is_caught(tmp_path: Path, name: str) -> None:
    files, expected = PLANTED[name]
    breaches = _plant(tmp_path, files)
    assert any(expected in breach for breach in breaches), breaches


def test_imports_for_types_make_no_cycle(tmp_path: Path) -> None:
    files = {
        "nn/_a.py": "from colossalai.nn import _b",
        "nn/_b.py": "if typing.TYPE_CHECKING:\n    from colossalai.nn._a import x",
    }
    assert _plant(tmp_path, files) == []
