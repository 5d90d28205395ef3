"""Every Python block of every document runs with two processes; every link leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".cache", "runs", "node_modules"} & set(path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def blocks():
    for document in DOCUMENTS:
        for number, block in enumerate(BLOCK.findall(document.read_text())):
            yield pytest.param(block, id=f"{document.relative_to(ROOT)}:{number}")


@pytest.mark.dist
@pytest.mark.parametrize("block", list(blocks()))
def test_a_block_runs(block, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", "2", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.unit
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in LINK.findall(document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.unit
def test_the_readme_has_an_example_of_each_door():
    examples = BLOCK.findall((ROOT / "README.md").read_text())
    assert any("Booster(" in block for block in examples)
    assert any("colossalai.initialize(" in block for block in examples)
