"""Read the package as syntax trees and name every breach of the rules; nothing of it is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.layers.floors import (
    COMPAT,
    CONTEXT_READERS,
    DOORS,
    FACADES,
    FLOORS,
    ROOT,
    STRANGERS,
    TENSORS_ONLY,
    TOP,
    VAGUE_NAMES,
    VENDOR_FILES,
)

VENDOR_WORD = "cuda"
CONTEXT_NAME = "global_context"
ASKING_NAME = "launched_job"
_REFUSES_NAMES = re.compile(r"__getattr__ = partial\(refuse_name, (__name__|'colossalai\.[a-z_.]+')\)")


@dataclass(frozen=True)
class Import:
    """One import of a module of the package."""

    target: str
    line: int
    is_run: bool  # False under `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path
    relative_path: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class Package:
    """All files of a package.

    Args:
        folder: The folder of the package; its name counts as `colossalai` whatever it is called.
        aliases: Other spellings of modules: only users import these.
    """

    def __init__(self, folder: Path, aliases: frozenset[str] = frozenset()) -> None:
        self.aliases = aliases
        self.modules = {module.name: module for module in _read(folder)}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """The imports inside the package, by importing module."""
        return {name: list(self._imports_of(module)) for name, module in self.modules.items()}

    def _imports_of(self, module: Module) -> Iterator[Import]:
        type_only = {
            id(node)
            for block in ast.walk(module.tree)
            if _is_type_checking(block)
            for node in ast.walk(block)
        }
        for node in ast.walk(module.tree):
            for target in self._targets(module, node):
                if target.partition(".")[0] == ROOT:
                    yield Import(target, node.lineno, id(node) not in type_only)

    def _targets(self, module: Module, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in self.modules or name in self.aliases else base
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if _is_text(arg))


def violations(package: Package) -> list[str]:
    """Return one line for every breach of every rule."""
    return [line for rule in RULES for line in rule(package)]


def upward_imports(package: Package) -> Iterator[str]:
    """Imports go down: never to a floor above, nor to a facade or the root.

    The face of a package may declare older spellings to type checkers: such an import never runs.
    """
    for module, imported in _all_imports(package):
        source, target = _sub_package(module.name), _sub_package(imported.target)
        where = f"{module.relative_path}:{imported.line}"
        for sub_package in (source, target):
            if sub_package not in FLOORS:
                yield f"{where}: {ROOT}.{sub_package} has no floor: give it one in tests/layers/floors.py"
        is_declared = target == COMPAT and module.is_package and not imported.is_run
        if source == target or is_declared or source not in FLOORS or target not in FLOORS:
            continue
        if FLOORS[target] > FLOORS[source]:
            yield (
                f"{where}: floor {FLOORS[source]} ({source}) imports {imported.target} "
                f"of floor {FLOORS[target]}"
            )
        elif FLOORS[target] == TOP:
            yield f"{where}: imports {imported.target}: nothing inside imports a facade or the package itself"


def forbidden_neighbours(package: Package) -> Iterator[str]:
    """On floor 3 some may not know each other; they meet above."""
    for module, imported in _all_imports(package):
        source, target = _part(module.name), _part(imported.target)
        if source == target or target is None:
            continue
        if source in STRANGERS and target in STRANGERS:
            yield f"{module.relative_path}:{imported.line}: {source} imports {target}: they meet in runtime"
        elif source in TENSORS_ONLY and target in STRANGERS:
            yield f"{module.relative_path}:{imported.line}: {source} knows tensors only, not {target}"


def homes_in_other_packages(package: Package) -> Iterator[str]:
    """The lazy names of a package have their homes in it: other homes are aliases, in `_aliases.NAMES`."""
    for module in package.modules.values():
        own = _sub_package(module.name)
        if not module.is_package or FLOORS.get(own) == TOP:
            continue
        for node in ast.walk(module.tree):
            if _is_text(node) and node.value in package.modules and _sub_package(node.value) != own:
                yield f"{module.relative_path}:{node.lineno}: {node.value} is the home of an alias"


def older_spellings(package: Package) -> Iterator[str]:
    """The modules of `compat` are named by the table of aliases alone; docstrings may name them, too."""
    prefix = f"{ROOT}.{COMPAT}"
    for module in package.modules.values():
        if module.relative_path == "_aliases.py" or _sub_package(module.name) == COMPAT:
            continue
        docstrings = {id(text) for text in _docstrings(module.tree)}
        for node in ast.walk(module.tree):
            is_named = _is_text(node) and f"{node.value}.".startswith(f"{prefix}.")
            if is_named and id(node) not in docstrings:
                yield f"{module.relative_path}:{node.lineno}: names {node.value}: only _aliases.py does"


def wrong_targets(package: Package) -> Iterator[str]:
    """What is imported exists, and under its own name."""
    for module, imported in _all_imports(package):
        where = f"{module.relative_path}:{imported.line}"
        if imported.target in package.aliases:
            yield f"{where}: {imported.target} is an alias for users: import its home"
        elif imported.target not in package.modules:
            yield f"{where}: there is no module {imported.target}"


def cycles(package: Package) -> Iterator[str]:
    """No cycle between modules, nor between sub-packages; imports for the type checker alone do not count."""
    graph: dict[str, set[str]] = {}
    sub_packages: dict[str, set[str]] = {}
    for module, imported in _all_imports(package):
        if imported.is_run and imported.target != module.name:
            graph.setdefault(module.name, set()).add(imported.target)
            source, target = _sub_package(module.name), _sub_package(imported.target)
            if source != target:
                sub_packages.setdefault(source, set()).add(target)
    for what, edges in (("modules", graph), ("sub-packages", sub_packages)):
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            path = [name or ROOT for name in reversed(error.args[1])]
            yield f"import cycle between {what}: {' -> '.join(path)}"


def missing_inits(package: Package) -> Iterator[str]:
    """Every folder with code has an `__init__.py`: without one the packaging leaves it out."""
    for module in package.modules.values():
        above = module.name.rpartition(".")[0]
        if above and above not in package.modules:
            yield f"{module.relative_path}: its folder has no __init__.py"


def star_imports(package: Package) -> Iterator[str]:
    """No `import *`: the reader could not tell where a name comes from."""
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                yield f"{module.relative_path}:{node.lineno}: import *"


def code_in_init(package: Package) -> Iterator[str]:
    """An `__init__` says what the names are; the code is in the files."""
    for module in package.modules.values():
        if module.is_package:
            is_lazy = any(_is_lazy_import(statement) for statement in module.tree.body)
            for statement in module.tree.body:
                if not _may_be_in_init(statement, is_lazy=is_lazy):
                    yield f"{module.relative_path}:{statement.lineno}: code in an __init__"


def vague_names(package: Package) -> Iterator[str]:
    """No file or folder with a name that fits everything; the documented facades are the exception."""
    for module in package.modules.values():
        last = module.name.rpartition(".")[2]
        is_facade = module.is_package and module.name.removeprefix(f"{ROOT}.") in FACADES
        if last.strip("_") in VAGUE_NAMES and not is_facade:
            yield f"{module.relative_path}: {last!r} does not say what is inside"


def vendor_word(package: Package) -> Iterator[str]:
    """Devices go through torch.accelerator; docstrings and comments may name a vendor's."""
    for module in package.modules.values():
        if module.relative_path in VENDOR_FILES:
            continue
        docstrings = {id(text) for text in _docstrings(module.tree)}
        for node in ast.walk(module.tree):
            if id(node) not in docstrings and any(VENDOR_WORD in word for word in _words(node)):
                yield f"{module.relative_path}:{getattr(node, 'lineno', 0)}: spells {VENDOR_WORD}"


def context_readers(package: Package) -> Iterator[str]:
    """Below the doors meshes and options come as arguments: nothing reads the global context but what may.

    It is followed by object: through imports and assignments of any name, and as an attribute of a module.
    """
    known = _names_of_the_context(package)
    for module in package.modules.values():
        sub_package = _sub_package(module.name)
        if sub_package == "context" or FLOORS.get(sub_package, TOP) >= DOORS:
            continue
        if module.relative_path in CONTEXT_READERS:
            continue
        names = known.get(module.name, {})
        yield from (f"{module.relative_path}:{line}: reads the global context" for line in names.values())
        for node in ast.walk(module.tree):
            is_attribute = isinstance(node, ast.Attribute) and node.attr == CONTEXT_NAME
            is_text = isinstance(node, ast.Constant) and node.value == CONTEXT_NAME
            if is_attribute or is_text:
                yield f"{module.relative_path}:{node.lineno}: reads the global context by its name"


def late_askers(package: Package) -> Iterator[str]:
    """What a layer needs of the launched job it asks for in its constructor, never in a forward."""
    for module in package.modules.values():
        for outer in ast.walk(module.tree):
            if not isinstance(outer, ast.ClassDef):
                continue
            for method in outer.body:
                is_late = isinstance(method, ast.FunctionDef) and method.name != "__init__"
                for node in ast.walk(method) if is_late else ():
                    if isinstance(node, ast.Call) and _called_name(node) == ASKING_NAME:
                        where = f"{module.relative_path}:{node.lineno}"
                        yield f"{where}: {outer.name}.{method.name} asks {ASKING_NAME}: ask in __init__"


RULES: tuple[Callable[[Package], Iterator[str]], ...] = (
    upward_imports,
    forbidden_neighbours,
    homes_in_other_packages,
    older_spellings,
    wrong_targets,
    cycles,
    missing_inits,
    star_imports,
    code_in_init,
    vague_names,
    vendor_word,
    context_readers,
    late_askers,
)


def _read(folder: Path) -> Iterator[Module]:
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        parts = relative.parent.parts if path.name == "__init__.py" else relative.with_suffix("").parts
        tree = ast.parse(path.read_text(), str(path))
        yield Module(".".join((ROOT, *parts)), path, relative.as_posix(), tree)


def _names_of_the_context(package: Package) -> dict[str, dict[str, int]]:
    """Return, for each module, the names in it that stand for the global context, with their lines."""
    context = [name for name in package.modules if _sub_package(name) == "context"]
    found = {(name, CONTEXT_NAME): 0 for name in context}  # where it is made, and its face
    bindings = [each for module in package.modules.values() for each in _bindings(module)]
    size = 0
    while size != len(found):  # a name may be bound to one that is bound to it
        size = len(found)
        for new, old, line in bindings:
            if old in found or old[1] == CONTEXT_NAME:
                found.setdefault(new, line)
    return {
        module: {name: line for (where, name), line in found.items() if where == module}
        for module in package.modules
    }


def _bindings(module: Module) -> Iterator[tuple[tuple[str, str], tuple[str, str], int]]:
    """Yield (module, name), the (module, name) that it is imported from or assigned, and the line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = (_absolute(module, node), alias.name)
                yield (module.name, alias.asname or alias.name), source, node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield (module.name, target.id), (module.name, node.value.id), node.lineno


def _all_imports(package: Package) -> Iterator[tuple[Module, Import]]:
    for name, imports in package.imports.items():
        for imported in imports:
            yield package.modules[name], imported


def _sub_package(module: str) -> str:
    """Return the part after the root: `context` of `colossalai.context._mesh`, "" of `colossalai`."""
    return (*module.split("."), "")[1]


def _part(module: str) -> str | None:
    """Return the entry of STRANGERS or TENSORS_ONLY that a module belongs to."""
    for part in (*STRANGERS, *TENSORS_ONLY):
        if f"{module}.".startswith(f"{ROOT}.{part}."):
            return part
    return None


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """Return the module that a `from` names, a relative one made absolute."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def _is_lazy_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.name in ("__getattr__", "__dir__")


def _may_be_in_init(statement: ast.stmt, *, is_lazy: bool) -> bool:
    """Allow imports, text, `__all__`, the lazy import of sub-packages with its table of names, and one line.

    The line raises errors for missing names. A type checker does not see it, and so goes on to refuse
    names that are nowhere.
    """
    if isinstance(statement, ast.Import | ast.ImportFrom) or _is_lazy_import(statement):
        return True
    if isinstance(statement, ast.Expr):
        return _is_text(statement.value)
    if _is_type_checking(statement):
        return all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in statement.body)
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "not TYPE_CHECKING":
        return [bool(_REFUSES_NAMES.fullmatch(ast.unparse(inner))) for inner in statement.body] == [True]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {target.id if isinstance(target, ast.Name) else "" for target in targets}
        return _is_literal(statement.value) and (names == {"__all__"} or is_lazy)
    return False


def _is_literal(node: ast.expr | None) -> bool:
    return node is not None and not any(isinstance(inner, ast.Call | ast.Name) for inner in ast.walk(node))


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield texts that stand as statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            yield node.value


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers and the text that a node holds itself."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, str):
            yield value
