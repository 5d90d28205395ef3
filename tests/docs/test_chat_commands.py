"""Commands of the chat pages: each script takes the options that the pages give it."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import colossalai
from tests.examples.scripts import example_module

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/chat").glob("*.md"))
BLOCK = re.compile(r"^```shell\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"applications/Chat/examples/(train_\w+)\.py$")


class Parsed(Exception):
    """A script has read its options, and goes on to train."""


def commands():
    for page in PAGES:
        text = "\n".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words):
                if found := SCRIPT.search(word):
                    yield pytest.param(found[1], words[place + 1 :], id=f"{page.name}:{found[1]}")


@pytest.mark.parametrize(("script", "words"), list(commands()))
def test_a_script_takes_the_options_of_the_pages(
    script: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*args: object, **options: object) -> None:
        raise Parsed

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def exact(prompt, answer, row):\n    return 1.0\n")
    monkeypatch.setattr(colossalai, "launch_from_torch", launch)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which train_grpo adds the folder of a reward
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(Parsed):
        example_module(f"../applications/Chat/examples/{script}.py").main()
    sys.modules.pop("rewards", None)


def test_each_script_is_on_a_page_of_both_languages() -> None:
    scripts = {path.stem for path in (ROOT / "applications/Chat/examples").glob("train_*.py")}
    found = {tuple(each.id.split(":")) for each in commands()}
    for is_chinese in (False, True):
        named = {script for page, script in found if page.endswith(".zh.md") == is_chinese}
        assert named == scripts
