"""State, attributes, class names, folders, Notes and `Raises:` keep the rules, and each breach is caught."""

import re
from pathlib import Path

import pytest

import colossalai
from colossalai._aliases import ALIASES
from tests.layers.allowed import CLASS_CHANGES, LOCALS, SAME_CLASS_NAME, STATE
from tests.layers.checker import Package
from tests.layers.state import (
    MOST_FILES,
    attribute_names,
    class_changes,
    classes_named_twice,
    full_folders,
    hung_attributes,
    module_state,
    notes_out_of_place,
    readers_of_locals,
    vague_raises,
)

pytestmark = pytest.mark.unit

FOLDER = Path(colossalai.__file__).parent
ROOT = FOLDER.parent
DESIGN = ROOT / "docs" / "design"


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(FOLDER, frozenset(ALIASES))


def test_state_of_modules_is_listed(package: Package) -> None:
    found = {(file, name): line for file, name, line in module_state(package)}
    assert not [f"{place[0]}:{found[place]}: keeps {place[1]}" for place in found if place not in STATE]
    assert not STATE.keys() - found.keys(), "listed, and not there any more"


def test_attributes_on_foreign_objects_are_in_one_table(package: Package) -> None:
    hung = {name: f"{file}:{line}" for file, name, line in hung_attributes(package)}
    names = attribute_names(package)
    assert not hung.keys() - names, {name: hung[name] for name in hung.keys() - names}
    assert not names - hung.keys(), "in tensor/_attributes.py, and hung on nothing any more"


def test_changes_of_classes_are_listed(package: Package) -> None:
    found = {(file, function): line for file, function, line in class_changes(package)}
    assert not [f"{place[0]}:{found[place]}: {place[1]}" for place in found if place not in CLASS_CHANGES]
    assert not CLASS_CHANGES.keys() - found.keys(), "listed, and not there any more"


def test_readers_of_locals_are_listed(package: Package) -> None:
    found = {(file, function): line for file, function, line in readers_of_locals(package)}
    assert not [f"{place[0]}:{found[place]}: {place[1]}" for place in found if place not in LOCALS]
    assert not LOCALS.keys() - found.keys(), "listed, and not there any more"


def test_the_page_of_design_lists_the_same() -> None:
    page = (DESIGN / "README.md").read_text()
    assert set(re.findall(r"^\| `([\w/.]+\.py)` \| `(\w+)` \|", page, re.M)) == set(STATE)


def test_a_new_feature_touches_at_most_three_files() -> None:
    """The table of the page names files that are there, and new ones."""
    page = (DESIGN / "README.md").read_text()
    _, _, section = page.partition("## What a new feature touches")
    rows = re.findall(r"^\| (an? [^|]+) \| ([^|]+) \|", section.partition("\n## ")[0], re.M)
    assert len(rows) == 7
    for feature, cell in rows:
        files = re.findall(r"`([\w/<>]+\.py)`", cell)
        assert 1 < len(files) <= 3, feature
        missing = [file for file in files if "<name>" not in file and not (FOLDER / file).exists()]
        assert not missing, f"{feature}: {missing}"
        assert (FOLDER / files[0]).parent.is_dir(), feature


def test_a_class_name_exists_once(package: Package) -> None:
    twice = classes_named_twice(package)
    assert twice.keys() == SAME_CLASS_NAME.keys(), twice


def test_no_folder_is_full() -> None:
    assert not full_folders(FOLDER)
    assert not full_folders(ROOT / "tests")


def test_notes_are_cited_and_citations_are_of_notes(package: Package) -> None:
    assert not list(notes_out_of_place(package, sorted(DESIGN.glob("*.md"))))


def test_what_is_raised_is_a_condition_with_a_subject(package: Package) -> None:
    vague = list(vague_raises(package))
    assert not vague, "\n".join(vague)


PLANTED = {
    "a dictionary that is written to": ("_x = {}\ndef f():\n    _x[1] = 2", "_x"),
    "a list that grows": ("_x: list[int] = []\ndef f():\n    _x.append(2)", "_x"),
    "a weak set": ("_x = weakref.WeakSet()\ndef f(m):\n    _x.add(m)", "_x"),
    "a counter": ("_x = itertools.count()\ndef f():\n    return next(_x)", "_x"),
    "global": ("_x = 0\ndef f():\n    global _x\n    _x = 1", "_x"),
    "an attribute of an object": ("_x = Thing()\ndef f():\n    _x.field = 1", "_x"),
    "a container of an object": ("_x = Thing()\ndef f():\n    _x.parts.append(1)", "_x"),
    "an attribute of a class": ("class A:\n    def f(self):\n        A.x = 1", "A.x"),
    "an attribute of cls": ("class A:\n    @classmethod\n    def f(cls):\n        cls.x = 1", "cls.x"),
    "a list of a class": ("class A:\n    x = []\n    def f(self):\n        self.x.append(1)", "A.x"),
    "kept results": ("@functools.lru_cache(maxsize=8)\ndef f(n):\n    return n", "f"),
    "a list of an object": (
        "class A:\n    def __init__(self):\n        self.x = []\n    def f(self):\n        self.x.append(1)",
        None,
    ),
    "a constant": ("_x = {1: 2}\ndef f():\n    return _x[1]", None),
    "a method of an object": ("_x = Logger()\ndef f():\n    _x.update(1)", None),
    "a local list": ("def f():\n    x = []\n    x.append(1)", None),
}


def _package(folder: Path, text: str) -> Package:
    (folder / "__init__.py").write_text("")
    (folder / "_a.py").write_text(text)
    return Package(folder)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_state_is_found(tmp_path: Path, name: str) -> None:
    text, expected = PLANTED[name]
    found = [held for _, held, _ in module_state(_package(tmp_path, text))]
    assert found == ([expected] if expected else [])


def test_state_that_another_file_changes_is_found(tmp_path: Path) -> None:
    (tmp_path / "_b.py").write_text("from colossalai._a import _x as y\ndef f():\n    y.field = 1")
    package = _package(tmp_path, "_x = Thing()")
    assert [(file, name) for file, name, _ in module_state(package)] == [("_a.py", "_x")]


def test_planted_attributes_names_and_notes_are_found(tmp_path: Path) -> None:
    text = (
        '"""Doc.\n\n[Note: cited]\nText.\n\n[Note: lonely]\nText, see [Note:\nnowhere].\n"""\n'
        "class A: ...\nclass B:\n    class A: ...\n"
        "def f(tensor, self, name):\n    # See [Note: cited].\n    setattr(tensor, _MARK, 1)\n"
        "    setattr(tensor, name, 1)\n    object.__setattr__(self, '_x', 1)\n"
    )
    package = _package(tmp_path, text)
    assert [name for _, name, _ in hung_attributes(package)] == ["_MARK"]
    assert list(classes_named_twice(package)) == ["A"]
    assert list(notes_out_of_place(package)) == [
        "_a.py: nobody cites [Note: lonely]",
        "_a.py: cites [Note: nowhere], which is nowhere",
    ]
    for number in range(MOST_FILES):
        (tmp_path / f"_{number}.py").write_text("")
    assert full_folders(tmp_path) == {".": MOST_FILES + 1}


def test_planted_changes_of_classes_and_locals_are_found(tmp_path: Path) -> None:
    text = (
        "a.__class__ = B\n"
        "def f(x):\n    def g():\n        x.part.__class__ = B\n    setattr(x, '__class__', B)\n"
        "class A:\n    def h(self, x):\n        undo(partial(setattr, x, '__class__', B))\n"
        "        x, self.__class__ = 1, B\n        kind = x.__class__\n        x.__class__.y = 1\n"
        "        getattr(x, '__class__')\n        return locals() | sys._getframe().f_locals\n"
    )
    package = _package(tmp_path, text)
    changes = [(function, line) for _, function, line in class_changes(package)]
    assert changes == [("", 1), ("g", 4), ("f", 5), ("h", 8), ("h", 9)]
    assert [(function, line) for _, function, line in readers_of_locals(package)] == [("h", 13), ("h", 13)]


VAGUE = (
    *("It is so.", "There is none.", "One is.", "They differ.", "Nothing has been launched.", "Not given."),
    *("Something does not fit.", "That is so.", "This is so.", "Always.", "See above.", "As in `f`."),
    *("What `f` raises.", "Another one has it.", "`x` is not\n            what it must be.", ""),
)
PLAIN = ("`x` is below 1.", "A name is unknown,\n            or two are equal.", "Another rank is gone.")


def test_planted_vague_conditions_are_found(tmp_path: Path) -> None:
    entries = "".join(f"        ValueError: {text}\n" for text in (*VAGUE, *PLAIN))
    entries += "        no kind of error: so\n"
    doc = f'    """Do it.\n\n    Raises:\n{entries}\n    Example:\n        It is no entry.\n    """\n'
    method = doc.replace("\n    ", "\n        ")
    package = _package(tmp_path, f"def f():\n{doc}class A:\n{doc}    async def g(self):\n    {method}")
    found = list(vague_raises(package))
    assert len(found) == 3 * (len(VAGUE) + 1)
    assert [line.split(" raises ")[0] for line in (found[0], found[len(VAGUE) - 1])] == [
        "_a.py:5: f",
        f"_a.py:{5 + len(VAGUE)}: f",
    ]
    for text in PLAIN:
        assert not any(text.split(",")[0] in line for line in found)
