"""Words of docstrings, comments, errors and documents: the matches of a room may fall, not rise."""

import json
from pathlib import Path

import pytest

from tests.layers import dialect

pytestmark = pytest.mark.unit


def test_no_room_has_more_matches_than_before() -> None:
    before = json.loads(dialect.COUNTS.read_text())
    now = dialect.counts()
    risen = [
        f"{room}: {before.get(room, 0)} -> {num}" for room, num in now.items() if num > before.get(room, 0)
    ]
    assert not risen, (
        "more sentences in the words that docs/design/README.md (Words) replaces; "
        "`python -m tests.layers.dialect ROOM` lists them: " + "; ".join(risen)
    )
    gone = set(before) - set(now)
    assert not gone, f"rooms that do not exist any more: `python -m tests.layers.dialect --write`: {gone}"


@pytest.mark.parametrize(
    ("sentence", "pattern"),
    [
        ("What this rank holds of a tensor.", "starts with a clause"),
        ("Of each parameter; asked once.", "asks"),
        ("It returns what is told.", "what"),
        ("A rank who waits.", "who"),
        ("The group has said that it ends.", "speaks"),
        ("A bucket knows its axis.", "knows"),
        ("Gradients stand in the order of hooks.", "stands"),
        ("The state lies on disk.", "lies"),
        ("A value is no tensor.", "is no"),
        ("Nobody reads it.", "nobody"),
        ("The place beside the root.", "beside"),
        ("A copy elsewhere.", "elsewhere"),
        ("While a send is under way.", "under way"),
        ("A list will do.", "will do"),
        ("Both front doors use it.", "door"),
        ("The one that was given.", "one that"),
        ("Whoever has it: leave it out.", "starts with a clause"),
    ],
)
def test_planted_sentences_are_found(sentence: str, pattern: str) -> None:
    assert pattern in dialect.Sentence(Path("x.py"), 1, sentence).matches()


@pytest.mark.parametrize(
    "sentence",
    [
        "Offsets and sizes of the local shards of a tensor.",
        "Whether to reshard after forward.",
        "How to launch a job on several hosts.",
        "How it works: the design page.",
        "There is no group for one rank.",
        "The loss is no longer finite.",
        "What happens if a rank fails?",
        "B stands for the batch size.",
    ],
)
def test_ordinary_sentences_are_not_found(sentence: str) -> None:
    assert dialect.Sentence(Path("x.py"), 1, sentence).matches() == []


def test_docstrings_comments_and_messages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        '"""Nobody reads the module."""\n\n\n'
        "def work(x):\n"
        '    """Return a value.\n\n    Args:\n        x: What is given.\n    """\n'
        "    # Somebody waits\n    # for it.\n"
        '    raise ValueError(f"`x` is {x}, and nobody takes it")\n'
    )
    found = [(each.line, each.text) for each in dialect.sentences(path) if each.matches()]
    assert found == [
        (1, "Nobody reads the module."),
        (8, "What is given."),
        (10, "Somebody waits for it."),
        (12, "`x` is `x`, and nobody takes it"),
    ]


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ('raise ValueError("nobody takes it: leave it out")', "nobody takes it: leave it out"),
        ('raise ValueError(f"{x} is no tensor: pass one")', "`x` is no tensor: pass one"),
        ('warn("what is given: nothing")', "what is given: nothing"),
        ('logger.log_once("nobody takes it: leave it out", ranks=[0])', "nobody takes it: leave it out"),
        ('self.fail("x is no range: give two", param)', "x is no range: give two"),
        ('click.option("--size", help="What is told.")', "What is told."),
        ('click.command(epilog="It says more.", short_help="Print.")', "It says more."),
        ('"""Whoever waits for it: nothing."""', "Whoever waits for it: nothing."),
    ],
)
def test_each_kind_of_text_is_read_with_its_first_clause(
    tmp_path: Path, statement: str, sentence: str
) -> None:
    path = tmp_path / "planted.py"
    path.write_text(f"{statement}\n")
    assert [each.text for each in dialect.sentences(path) if each.matches()] == [sentence]


def test_the_name_of_an_entry_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text('"""Do it.\n\nArgs:\n    whoever, what (int | None): A number.\n"""\n')
    assert [each.text for each in dialect.sentences(path)] == ["Do it.", "A number."]


def test_code_and_tables_of_documents(tmp_path: Path) -> None:
    path = tmp_path / "planted.md"
    path.write_text(
        "# Title of it\n\n```python\n# nobody\n```\n\n| a | what it holds |\n\n- It stands\n  here.\n"
    )
    found = [(each.line, each.text) for each in dialect.sentences(path) if each.matches()]
    assert found == [(7, "what it holds"), (9, "It stands here.")]
