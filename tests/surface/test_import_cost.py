"""`import colossalai` is cheap: what is heavy, or optional, is imported by the function that needs it.

Its time, beside that of `import torch`, is measured by benchmarks/import_time.py.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

MOST_MODULES = 366  # with a user's first names: 355 of the package and 11 others; it may only shrink

# These come with a user's first call that needs them, unless torch itself imports them.
HEAVY = (
    "IPython",
    "click",
    "hypothesis",
    "matplotlib",
    "pandas",
    "psutil",
    "pytest",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.testing",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers",
    "triton",
)

# What comes with the package, and with its first names when they are used.
LIST = """
import json, sys
import torch
before = set(sys.modules)
import colossalai
colossalai.launch, colossalai.initialize, colossalai.Booster
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def modules() -> list[str]:
    run = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: list[str] = json.loads(run.stdout)
    return found


def test_import_is_cheap(modules: list[str]) -> None:
    assert len(modules) <= MOST_MODULES


def test_nothing_heavy_is_imported(modules: list[str]) -> None:
    assert "colossalai.context" in modules
    heavy = [name for name in modules if f"{name}.".startswith(tuple(f"{heavy}." for heavy in HEAVY))]
    assert heavy == []


def test_sub_packages_that_are_not_needed_are_not_imported(modules: list[str]) -> None:
    facades = (
        "colossalai.compat",
        "colossalai.utils",
        "colossalai.testing",
        "colossalai.cli",
        "colossalai.trainer",
    )
    of_one_method = (
        "colossalai.zero.gemini._method",
        "colossalai.zero.gemini.planning",
    )
    assert [name for name in modules if name.startswith((*facades, *of_one_method))] == []
