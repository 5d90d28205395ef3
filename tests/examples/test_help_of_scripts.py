"""The `--help` of each script that users start has examples, and the script's parser accepts each of them.

The scripts are not run here: the tests beside this one, and those in tests/chat, run them with small sizes.
Some of the examples take hours, GPUs or other machines.
"""

import argparse
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from colossalai.cli import main
from tests.examples.help_text import MOST_COLUMNS, examples_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("examples", "benchmarks", "tools", "applications")
WIDE = "benchmarks/"  # their help is the docstring, whose lines are those of the code
NOT_FOR_USERS = "benchmarks/harness/"  # started by benchmarks
PASSES_ON = {"examples/long_sequence/compare.py": "examples/long_sequence/train.py"}  # other options
SCRIPTS = [
    name
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not (name := str(path.relative_to(ROOT))).startswith(NOT_FOR_USERS)
    and '\nif __name__ == "__main__":' in path.read_text()
]


class Parsed(Exception):
    """A script has built its parser, and is about to read its options."""


def parser_of(script: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Run a script up to where it reads its options, and return its parser."""
    found = []

    def parse(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        found.append(parser)
        raise Parsed

    path = ROOT / script
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    forget_siblings()
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        with pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")
    forget_siblings()
    return found[0]


def forget_siblings() -> None:
    """Forget the modules of the scripts' folders, several of which have a data.py."""
    folders = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
    for name, module in list(sys.modules.items()):
        if not name.startswith("example_") and (getattr(module, "__file__", None) or "").startswith(folders):
            del sys.modules[name]


def arguments_of(example: str) -> tuple[str, list[str]]:
    """Return the script that an example starts, and the script's arguments."""
    words = shlex.split(example)
    while "=" in words[0]:  # a variable of the environment
        del words[0]
    if words[0] == "python":
        return words[1], words[2:]
    assert words[:2] == ["colossalai", "run"]
    context = main.commands["run"].make_context("run", words[2:])
    return context.params["script"], list(context.params["args"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_accepts_the_examples_of_its_help(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(MOST_COLUMNS))
    parser = parser_of(script, monkeypatch)
    (tmp_path / "rewards.py").write_text("def exact(prompt, answer, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    text = parser.format_help()
    examples = examples_of(text)
    assert examples
    for example in examples:
        started, arguments = arguments_of(example)
        assert ROOT / script in (ROOT / started, (ROOT / script).parent / started), example
        if script in PASSES_ON:
            _, passed_on = parser.parse_known_args(arguments)
            parser_of(PASSES_ON[script], monkeypatch).parse_args(passed_on)
        else:
            parser.parse_args(arguments)
        read = [word for word in arguments if word.startswith(FOLDERS) and "/results/" not in word]
        assert [word for word in read if not (ROOT / word).exists()] == [], example
    if not script.startswith(WIDE):
        assert [line for line in text.splitlines() if len(line) > MOST_COLUMNS] == []
