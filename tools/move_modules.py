"""Move and join modules of the package by a plan, and rewrite every mention of them.

    python tools/move_modules.py tools/rooms.json

The plan is JSON with these keys, each of which may be left out:

    packages   from a new package to its docstring
    folders    from a folder to its new name
    modules    from a module's new name to its old one, or to several, which are joined in the order of their
               imports of each other
    names      from a package to {name: the package that it is imported from now}
    files      from a path to its whole new text, after the moves
    keep       files whose imports of private modules stay as they are, by path, with the reason
    words      pages of the design, by path: `_old` in backticks becomes the new name there
    edits      [path, old text, new text] in the end

After the moves, imports of private modules of another package go through its face, which gets the names that
it lacks. What is left for a person is printed. Run `make format` and the tests afterwards.
"""

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = "colossalai"
UNTOUCHED = ("CHANGELOG.md", "tests/surface/surface.txt", "tests/surface/promised.txt")
GROUND = {f"{ROOT}.{name}" for name in ("_version", "_lazy", "_aliases", "_not_landed")}


def path_of(module: str) -> Path:
    """Return the file of a module that is named below the package."""
    return Path(ROOT) / f"{module.replace('.', '/')}.py"


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git knows."""
    listed = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout
    return [path for path in map(Path, listed.split()) if path.exists()]


def imports_from(text: str) -> Iterator[ast.ImportFrom]:
    """Yield the absolute from-imports of the package in a source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOT) and not node.level:
            yield node


def replace_imports(text: str, replaced: list[tuple[ast.ImportFrom, list[str]]]) -> str:
    """Put other lines in the place of some imports."""
    lines = text.split("\n")
    for node, new in sorted(replaced, key=lambda item: -item[0].lineno):
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
    return "\n".join(lines)


def written(alias: ast.alias) -> str:
    """Return an imported name as it stands in a source."""
    return alias.name + (f" as {alias.asname}" if alias.asname else "")


class Moves:
    """The moves of a plan: files, and every mention of them.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._sources = {
            new: [old] if isinstance(old, str) else old for new, old in plan.get("modules", {}).items()
        }
        moved = {old: new for new, olds in self._sources.items() for old in olds if old != new}
        self.new_names: dict[str, str] = {**plan.get("folders", {}), **moved}

    def move_files(self) -> None:
        """Make the packages, move the files, and join those that become one."""
        for package, docstring in self._plan.get("packages", {}).items():
            face = Path(ROOT) / package.replace(".", "/") / "__init__.py"
            face.parent.mkdir(parents=True, exist_ok=True)
            if not face.exists():
                face.write_text(f'"""{docstring}"""\n')
        for old, new in self._plan.get("folders", {}).items():
            (Path(ROOT) / old.replace(".", "/")).rename(Path(ROOT) / new.replace(".", "/"))
        for new, olds in self._sources.items():
            texts = {old: path_of(old).read_text() for old in olds}
            for old in olds:
                path_of(old).unlink()
            path_of(new).write_text(_joined(new, texts) if len(texts) > 1 else texts[olds[0]])
        subprocess.run(["git", "add", "--all", ROOT], check=True)

    def rewrite_mentions(self) -> None:
        """Rewrite dotted names and paths everywhere, and imports of modules by their own names."""
        olds = sorted(self.new_names, key=len, reverse=True)
        dotted = re.compile(rf"\b{ROOT}\.({'|'.join(map(re.escape, olds))})(?!\w)")
        paths = "|".join(re.escape(old.replace(".", "/")) for old in olds)
        pathed = re.compile(rf"(?<![\w/])((?:{ROOT}/)?)({paths})\.py\b")
        for path in tracked("*.py", "*.md", "*.toml", "Makefile"):
            if str(path) in UNTOUCHED:
                continue
            text = dotted.sub(lambda hit: f"{ROOT}.{self.new_names[hit[1]]}", path.read_text())
            text = pathed.sub(
                lambda hit: f"{hit[1]}{self.new_names[hit[2].replace('/', '.')].replace('.', '/')}.py",
                text,
            )
            if path.suffix == ".py":
                text = self._without_imports_of_itself(path, self._with_moved_modules(path, text))
            if text != path.read_text():
                path.write_text(text)

    def _with_moved_modules(self, path: Path, text: str) -> str:
        """Rewrite `from package import _module` where the module has moved, and its uses."""
        replaced, renamed = [], {}
        for node in imports_from(text):
            package = (node.module or "").removeprefix(ROOT).removeprefix(".")
            lines, kept = [], []
            for alias in node.names:
                new = self.new_names.get(f"{package}.{alias.name}" if package else alias.name)
                if new is None:
                    kept.append(written(alias))
                    continue
                parent, _, name = new.rpartition(".")
                suffix = f" as {alias.asname}" if alias.asname else ""
                lines.append(f"from {ROOT}.{parent} import {name}{suffix}")
                if not alias.asname and name != alias.name:
                    renamed[alias.name] = name
            if lines:
                rest = [f"from {node.module} import {', '.join(kept)}"] if kept else []
                replaced.append((node, rest + lines))
        text = replace_imports(text, replaced)
        for old, name in renamed.items():
            print(f"{path}: {old} is called {name} now")
            text = re.sub(rf"(?<![\w.\"'/]){old}(?=[.,)\]])", name, text)
        return text

    @staticmethod
    def _without_imports_of_itself(path: Path, text: str) -> str:
        if path.parts[0] != ROOT or path.name == "__init__.py":
            return text
        own = ".".join(path.with_suffix("").parts)
        return replace_imports(text, [(node, []) for node in imports_from(text) if node.module == own])

    def rewrite_words(self) -> None:
        """Rewrite `_old` in backticks on the pages that the plan names."""
        for page, package in self._plan.get("words", {}).items():
            text = Path(page).read_text()
            for old, new in self.new_names.items():
                parent, _, name = old.rpartition(".")
                if parent == package:
                    short = new.removeprefix(f"{package}.").replace(".", "/")
                    text = re.sub(rf"`{name}(\.py)?`", rf"`{short}\1`", text)
            Path(page).write_text(text)


def _joined(new: str, texts: Mapping[str, str]) -> str:
    """Return modules as one: the first docstring, all imports, and what is imported before who imports it."""
    order: list[str] = []

    def visit(old: str) -> None:
        if old in order:
            return
        for other in texts:
            if other != old and f"from {ROOT}.{other} import" in texts[old]:
                visit(other)
        order.append(old)

    for old in texts:
        visit(old)
    seen: set[str] = set()
    for old in texts:
        names = {node.name for node in ast.parse(texts[old]).body if hasattr(node, "name")}
        if clash := names & seen:
            print(f"{path_of(new)}: {sorted(clash)} stands in several of the modules that are joined here")
        seen |= names
    parts = {old: _taken_apart(text) for old, text in texts.items()}
    imports = dict.fromkeys(line for old in order for line in parts[old][1])
    docstring = parts[next(iter(texts))][0]
    return "\n".join([docstring, "", *imports, "", "", "\n\n\n".join(parts[old][2] for old in order), ""])


def _taken_apart(text: str) -> tuple[str, list[str], str]:
    """Return the docstring of a source, its imports at the top level, and the rest."""
    tree, lines = ast.parse(text), text.split("\n")
    begin = tree.body[0].end_lineno or 0  # every module has a docstring
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found]
    taken = {number for node in found for number in range(node.lineno - 1, node.end_lineno or 0)}
    rest = [line for number, line in enumerate(lines) if number >= begin and number not in taken]
    return "\n".join(lines[:begin]), imports, "\n".join(rest).strip("\n")


def import_from_new_packages(names: Mapping[str, Mapping[str, str]]) -> None:
    """Rewrite imports of public names that have another package now."""
    for path in tracked("*.py"):
        text, replaced = path.read_text(), []
        for node in imports_from(text):
            homes = names.get(node.module or "", {})
            if not any(alias.name in homes for alias in node.names):
                continue
            by_home: dict[str, list[str]] = {}
            for alias in node.names:
                by_home.setdefault(homes.get(alias.name, node.module or ""), []).append(written(alias))
            replaced.append(
                (node, [f"from {home} import {', '.join(each)}" for home, each in by_home.items()])
            )
        if replaced:
            path.write_text(replace_imports(text, replaced))


def go_through_faces(keep: Mapping[str, str]) -> None:
    """Import what is private to another package from its face, and let the faces have it."""
    wanted: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(Path(ROOT).rglob("*.py")):
        if str(path) in keep:
            continue
        text, replaced = path.read_text(), []
        own = ".".join(path.parent.parts)
        for node in imports_from(text):
            package, _, name = (node.module or "").rpartition(".")
            is_inside = f"{own}.".startswith(f"{package}.")
            if name.startswith("_") and node.module not in GROUND and not is_inside:
                wanted.setdefault(package, set()).update(
                    (node.module or "", each.name) for each in node.names
                )
                imported = ", ".join(map(written, node.names))
                replaced.append((node, [f"from {package} import {imported}"]))
            elif (
                path.name != "__init__.py" and f"{own}.".startswith(f"{node.module}.") and node.module != ROOT
            ):
                replaced += _from_own_modules(path, node)
        if replaced:
            path.write_text(replace_imports(text, replaced))
    for package, names in sorted(wanted.items()):
        _widen(Path(package.replace(".", "/")) / "__init__.py", names)


def _from_own_modules(path: Path, node: ast.ImportFrom) -> list[tuple[ast.ImportFrom, list[str]]]:
    """Import from the modules themselves what a module takes from the face of its own package."""
    face = Path((node.module or "").replace(".", "/")) / "__init__.py"
    homes = {alias.asname: each.module for each in imports_from(face.read_text()) for alias in each.names}
    if not all(alias.name in homes for alias in node.names):
        return []  # modules, which a face does not name
    return [(node, [f"from {homes[alias.name]} import {written(alias)}" for alias in node.names])]


def _widen(face: Path, names: set[tuple[str, str]]) -> None:
    """Add names to a face; to the table of one that imports them when they are asked for."""
    text = face.read_text()
    have = {alias.asname for node in imports_from(text) for alias in node.names}
    missing = [(module, name) for module, name in sorted(names) if name not in have]
    lines = [f"from {module} import {name} as {name}" for module, name in missing]
    if "_HOMES = {\n" in text:
        text = text.replace(
            "if TYPE_CHECKING:\n", "if TYPE_CHECKING:\n" + "".join(f"    {x}\n" for x in lines)
        )
        rows = "".join(f'    "{name}": "{module}",\n' for module, name in missing)
        face.write_text(text.replace("_HOMES = {\n", "_HOMES = {\n" + rows))
        return
    tree = ast.parse(text)
    ends = [node.end_lineno or 0 for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    at = max(ends, default=tree.body[0].end_lineno or 0)
    all_lines = text.split("\n")
    all_lines[at:at] = [*([] if ends else [""]), *lines]
    face.write_text("\n".join(all_lines))


def main() -> None:
    """Carry out a plan in the current folder, the root of a checkout without changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    plan = json.loads(parser.parse_args().plan.read_text())
    moves = Moves(plan)
    moves.move_files()
    moves.rewrite_mentions()
    import_from_new_packages(plan.get("names", {}))
    for name, text in plan.get("files", {}).items():
        Path(name).write_text(text)
    go_through_faces(plan.get("keep", {}))
    moves.rewrite_words()
    for name, old, new in plan.get("edits", []):
        path = Path(name)
        if old not in path.read_text():
            print(f"{name}: nothing to edit: {old!r}")
        path.write_text(path.read_text().replace(old, new))


if __name__ == "__main__":
    main()
