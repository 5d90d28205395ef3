"""Rules of what a reader has to keep in mind: state of modules, attributes, names, folders, Notes, `Raises:`.

What is allowed, and why, stands in `allowed.py`; the page of design lists the same.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from tests.layers.checker import Package
from tests.layers.floors import ROOT

MOST_FILES = 15
_CONTAINERS = frozenset(
    {"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict", "WeakKeyDictionary"}
    | {"WeakValueDictionary", "WeakSet", "local", "ContextVar", "count"}
)
_CHANGES = frozenset(
    {"append", "appendleft", "add", "update", "setdefault", "pop", "popleft", "popitem", "clear", "remove"}
    | {"discard", "extend", "insert", "sort", "reverse", "set", "difference_update"}
)


def module_state(package: Package) -> Iterator[tuple[str, str, int]]:
    """Yield (file, name, line) of what a module keeps and changes.

    That is a container that is changed somewhere, in its module or in one that imports it; an object of which
    an attribute is set or a container is changed there; a name under `global`; an attribute that is set on a
    class, or a container in a class's body that its methods change; and a function whose results are kept.
    Constants that nobody changes do not count.
    """
    names_of = {module.name: dict(_made_at_module_level(module.tree)) for module in package.modules.values()}
    for module in package.modules.values():
        made = names_of[module.name]
        held = {name: (module.relative_path, name) for name in made}
        mutable = {name for name, value in made.items() if _is_mutable(value)}
        for local, source, name in _imported_names(module.tree, package):
            if name in names_of[source]:
                held[local] = package.modules[source].relative_path, name
                mutable |= {local} if _is_mutable(names_of[source][name]) else set()
        for name, line in sorted(_changed_names(module.tree, set(held), mutable).items()):
            yield *held.get(name, (module.relative_path, name)), line
        for name, line in [*_changed_classes(module.tree), *_cached_functions(module.tree)]:
            yield module.relative_path, name, line


def _imported_names(tree: ast.Module, package: Package) -> Iterator[tuple[str, str, str]]:
    """Yield (local name, module, name there) of what is imported from a file of the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in package.modules and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, node.module, alias.name


def _changed_classes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (class and attribute, line) of what is kept on a class."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes} | {"cls"}
    for node in ast.walk(tree):
        for target in _targets_of(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in names | {"type(self)"}:
                yield ast.unparse(target), node.lineno  # type: ignore[attr-defined]
    for each in classes:
        shared = {name for name, value in _made_in(each.body) if _is_mutable(value)}
        own = {
            target.attr
            for node in ast.walk(each)
            for target in _targets_of(node)
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        }
        changed = _changed_names(each, set(), set(), owner="self")
        for name in sorted((shared - own) & changed.keys()):
            yield f"{each.name}.{name}", changed[name]


def _cached_functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                name = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(name).rpartition(".")[2] in ("cache", "lru_cache"):
                    yield node.name, node.lineno


def _targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign | ast.Delete) else []


def _made_at_module_level(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    return _made_in(tree.body)


def _made_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for target in _targets_of(statement):
                if isinstance(target, ast.Name):
                    yield target.id, statement.value


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    if isinstance(function, ast.Subscript):  # dict[str, int]()
        function = function.value
    return getattr(function, "attr", getattr(function, "id", "")) in _CONTAINERS


def _changed_names(
    tree: ast.AST, held: set[str], mutable: set[str], *, owner: str | None = None
) -> dict[str, int]:
    """Return what is changed after it was made, with the line of the first change.

    Args:
        tree: Where to look.
        held: Names of objects of which a part may be changed.
        mutable: Those of containers, which may be changed themselves.
        owner: Look at the containers that are attributes of this name instead, whatever they are called.
    """
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Global):
            names = node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            value = node.func.value
            # `known.sections.pop()` changes `known`; `append` of an object of its own is its own affair.
            inner = held if isinstance(value, ast.Attribute | ast.Subscript) else mutable
            if node.func.attr in _CHANGES:
                names = [name for name in _names_of([value], owner) if owner or name in inner]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next":
            names = [name for name in _names_of(node.args[:1], owner) if owner or name in mutable]
        else:
            parts = [
                each.value for each in _targets_of(node) if isinstance(each, ast.Subscript | ast.Attribute)
            ]
            names = [name for name in _names_of(parts, owner) if owner or name in held]
        for name in names:
            found.setdefault(name, node.lineno)
    return found


def _names_of(nodes: Iterable[ast.expr], owner: str | None = None) -> Iterator[str]:
    """Yield the names that expressions begin with, or the attributes of `owner` with which they do."""
    for node in nodes:
        inner = node
        while isinstance(node, ast.Subscript | ast.Attribute):
            inner, node = node, node.value
        if isinstance(node, ast.Name):
            if owner is None:
                yield node.id
            elif node.id == owner and isinstance(inner, ast.Attribute):
                yield inner.attr


def attribute_names(package: Package) -> set[str]:
    """Return the constants of `tensor/_attributes.py`: the names of what may be hung on other objects."""
    table = package.modules.get(f"{ROOT}.tensor._attributes")
    return set() if table is None else {name for name, _ in _made_at_module_level(table.tree)}


def hung_attributes(package: Package) -> Iterator[tuple[str, str, int]]:
    """Yield (file, attribute, line) of what is hung on an object of somebody else under a name of our own."""
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or len(node.args) != 3:
                continue
            if ast.unparse(node.func) not in ("setattr", "object.__setattr__"):
                continue
            owner, name = ast.unparse(node.args[0]), node.args[1]
            is_ours = isinstance(name, ast.Constant) or (isinstance(name, ast.Name) and name.id.isupper())
            if owner not in ("self", "cls") and is_ours:
                yield module.relative_path, ast.unparse(name), node.lineno


def class_changes(package: Package) -> Iterator[tuple[str, str, int]]:
    """Yield (file, function, line) of what changes the class of an object, "" for the module itself."""
    for module in package.modules.values():
        for function, node in _with_functions(module.tree):
            is_set = any(
                isinstance(part, ast.Attribute)
                and part.attr == "__class__"
                and isinstance(part.ctx, ast.Store)
                for target in _targets_of(node)
                for part in ast.walk(target)
            )
            by_name = isinstance(node, ast.Call) and any(
                isinstance(each, ast.Constant) and each.value == "__class__" for each in node.args
            )
            if is_set or (by_name and "setattr" in ast.unparse(node)):
                yield module.relative_path, function, node.lineno


def readers_of_locals(package: Package) -> Iterator[tuple[str, str, int]]:
    """Yield (file, function, line) of what reads the local names of a call as a mapping, or its frame."""
    names = {"locals", "sys._getframe", "inspect.currentframe", "inspect.stack"}
    for module in package.modules.values():
        for function, node in _with_functions(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield module.relative_path, function, node.lineno


def _with_functions(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of a tree with the name of the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield function, child
        yield from _with_functions(child, child.name if is_function else function)  # type: ignore[attr-defined]


def classes_named_twice(package: Package) -> dict[str, list[str]]:
    """Return the class names that stand in several places, with the places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.relative_path}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def full_folders(folder: Path) -> dict[str, int]:
    """Return the folders with more than `MOST_FILES` Python files, `__init__` not counted."""
    counts = Counter(
        path.parent.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and "__pycache__" not in path.parts
    )
    return {name: count for name, count in sorted(counts.items()) if count > MOST_FILES}


_NOTE = re.compile(r"\[Note:\s+([^\]]+?)\s*\]")
_AT_START = re.compile(r'(^|\n)\s*(#\s*|""")?$')


def notes_out_of_place(package: Package, documents: Iterable[Path] = ()) -> Iterator[str]:
    """Yield Notes that nobody cites, and citations of Notes that are nowhere.

    A Note begins a line; whoever cites it says so in the midst of one.
    """
    written: dict[str, str] = {}
    times: Counter[str] = Counter()
    places: dict[str, str] = {}
    texts = [(module.relative_path, module.path.read_text(), True) for module in package.modules.values()]
    texts += [(path.name, path.read_text(), False) for path in documents]
    for place, text, is_code in texts:
        joined = re.sub(r"\n[ \t]*(# )?(?=\S)", lambda m: "\n", text)
        for match in _NOTE.finditer(joined):
            title = " ".join(match[1].split())
            times[title] += 1
            places.setdefault(title, place)
            if is_code and _AT_START.search(joined[: match.start()]):
                written.setdefault(title, place)
    for title in sorted(times):
        if title not in written:
            yield f"{places[title]}: cites [Note: {title}], which is nowhere"
        elif times[title] == 1:
            yield f"{written[title]}: nobody cites [Note: {title}]"


# Words that point at a sentence before, or at nothing, where the subject of a condition belongs.
_NO_SUBJECT = re.compile(
    r"(It|Its|They|Their|There|That|This|These|Those|Something|Somebody|Nothing|Nobody|One|Not|Others?"
    r"|Another one|Always|Never|See|As|What)\b"
)
_NO_CONDITION = re.compile(r"what (it|they) (must|may|should) be\b")


def vague_raises(package: Package) -> Iterator[str]:
    """Yield the entries of `Raises:` that do not say what must be the case of what."""
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for line, entry in _raises_of(node):
                kind, _, condition = entry.partition(": ")
                is_vague = _NO_SUBJECT.match(condition) or _NO_CONDITION.search(condition)
                if is_vague or not condition or " " in kind:
                    yield f"{module.relative_path}:{line}: {node.name} raises {entry!r}"


def _raises_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Yield line and text of each entry of the docstring's `Raises:`, continuation lines joined."""
    lines = (ast.get_docstring(node) or "").splitlines()
    if "Raises:" not in lines:
        return
    begin = lines.index("Raises:") + 1
    section = list(takewhile(lambda line: not line or line.startswith("    "), lines[begin:]))
    starts = [number for number, line in enumerate(section) if re.match(r"    \S", line)]
    for start, end in zip(starts, [*starts[1:], len(section)], strict=True):
        text = " ".join(line.strip() for line in section[start:end])
        yield node.body[0].lineno + begin + start, text.strip()
