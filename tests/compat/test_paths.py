"""Older paths: what each gives, in a process that has imported nothing before."""

import subprocess
import sys

import pytest

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
