"""Every Python block of every document runs and prints what the document says; every link leads somewhere.

A block whose first line is a comment `# colossalai run --nproc_per_node N script.py` runs with N processes,
any other one with two. A text block behind it, before the next block, is what rank 0 prints.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import run_script
from tests.ranks import run_ranks
from tests.tiers import OF_SOAK

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".cache", "runs", "node_modules"} & set(path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\A[^`]*?^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\A# colossalai run --nproc_per_node (\d+) ")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


# A two-layer MLP 256 -> 1024 -> 256 on an input (16, 256): what a rank holds, as documented in each mode.
NAMES = ("weight 1", "weight 2", "input", "after layer 1", "after layer 2")
SHAPES = {
    "1d": [(512, 256), (256, 512), (16, 256), (16, 512), (16, 256)],
    "2d": [(128, 512), (512, 128), (8, 128), (8, 512), (8, 128)],
    "2p5d": [(128, 512), (512, 128), (4, 128), (4, 512), (4, 128)],
    "3d": [(128, 256), (512, 64), (4, 128), (4, 512), (4, 128)],
}


def output_after(text):
    """Return the lines that the text block at the beginning of `text` promises."""
    found = OUTPUT.match(text)
    return found.group(1).splitlines() if found else []


def blocks(documents=DOCUMENTS):
    for document in documents:
        text = document.read_text()
        for number, block in enumerate(BLOCK.finditer(text)):
            name = f"{document.relative_to(ROOT)}:{number}"
            yield name, block.group(1), output_after(text[block.end() :])


# Trainings of minutes on a slow machine, whose features tests/chat enters: make long runs them.
LONG_BLOCKS = {"docs/chat/grpo.md:0", "docs/chat/ppo.md:0", "docs/chat/serve.md:0"}


def marks_of(name):
    """Return those of a block: further ones of a page are long, translated ones, being the same, of soak."""
    if ".zh.md" in name:
        return OF_SOAK
    return pytest.mark.long if not name.endswith(":0") or name in LONG_BLOCKS else ()


def assert_printed(output, text):
    printed = [line.rpartition(" | ")[2] for line in text.splitlines()]
    assert [line for line in printed if line in output] == output, printed


def num_ranks(block):
    return int(found.group(1)) if (found := COMMAND.match(block)) else 2


@pytest.mark.dist
@pytest.mark.parametrize(
    ("block", "output"),
    [pytest.param(*rest, id=name, marks=marks_of(name)) for name, *rest in blocks()],
)
def test_a_block_runs(block, output, tmp_path, monkeypatch, capfd):
    script = tmp_path / "script.py"
    script.write_text(block)
    monkeypatch.chdir(tmp_path)
    run_ranks(run_script, num_ranks(block), str(script))
    captured = capfd.readouterr()
    assert_printed(output, captured.out + captured.err)


@pytest.mark.unit
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if path.name.endswith(".zh.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_translated_page_has_the_blocks_of_its_page(document):
    translated, original = (
        [(ast.dump(ast.parse(block)), output) for _, block, output in blocks([path])]
        for path in (document, document.with_name(document.name.replace(".zh.md", ".md")))
    )
    assert translated == original  # but for comments


@pytest.mark.dist
def test_the_readme_runs_by_its_command(tmp_path):
    """One for all: the others run on ranks that are forked, which takes a tenth of the time."""
    block, output = next(rest for name, *rest in blocks() if name == "README.md:0")
    (tmp_path / "script.py").write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = str(num_ranks(block))
    command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", ranks, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_printed(output, done.stdout + done.stderr)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout + done.stderr)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.unit
@pytest.mark.parametrize("mode", SHAPES)
def test_the_page_of_a_mode_shows_the_documented_shapes(mode):
    text = (ROOT / f"docs/features/tensor_parallel_{mode}.md").read_text()
    (block,) = BLOCK.finditer(text)
    wanted = [f"{name}: {shape}" for name, shape in zip(NAMES, SHAPES[mode], strict=True)]
    assert output_after(text[block.end() :]) == wanted


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
    assert all('print_rank_0(f"step {step + 1}: loss ' in block for block in examples)
