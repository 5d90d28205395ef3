"""Older paths: what each gives, in a process that has imported nothing before."""

import subprocess
import sys
from pathlib import Path

import pytest

import colossalai
from colossalai._aliases import ALIASES

pytestmark = pytest.mark.unit


def _run(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


HANDLERS = """
import sys
from colossalai.registry import GRADIENT_HANDLER
assert not GRADIENT_HANDLER.has("MoeGradientHandlr")
try:
    GRADIENT_HANDLER.get_module("MoeGradientHandlr")
except ValueError as error:
    assert "did you mean 'MoeGradientHandler'?" in str(error), error
found = GRADIENT_HANDLER.get_module("MoeGradientHandler")
import colossalai
assert found is colossalai.engine.gradient_handler.MoeGradientHandler
assert issubclass(found, colossalai.engine.BaseGradientHandler)
"""


def test_a_config_names_handlers_that_were_not_imported() -> None:
    _run(HANDLERS)


LATE = """
import sys
import colossalai
colossalai.initialize, colossalai.Booster
assert not [name for name in sys.modules if name.startswith("colossalai.compat")]
assert colossalai.engine.gradient_handler.DataParallelGradientHandler
"""


def test_the_attribute_of_a_package_is_imported_at_its_first_access() -> None:
    _run(LATE)


@pytest.mark.parametrize(
    "alias", ["builder", "engine.gradient_handler", "global_variables", "utils", "zero.gemini.chunk"]
)
def test_type_checkers_find_a_stub_of_an_older_package(alias):
    # The import finder is unknown to mypy and to editors: a stub names the home.
    stub = Path(colossalai.__file__).parent / f"{alias.replace('.', '/')}.pyi"
    assert stub.read_text() == f"from {ALIASES[f'colossalai.{alias}']} import *\n"
