"""Dependence of tests on the machine, and on private names: findings by file, whose counts can only fall.

A measured number of seconds depends on the load, and so does the progress of another process during a sleep.
Three rules, each a function from a syntax tree to findings:

`upper_bounds`: an upper bound on a difference of clocks. Lower bounds and the deadlines of waits are allowed.
`sleeps`: `time.sleep` outside of a loop that polls.
`private_imports`: imports of private modules and names of the package.

`python -m tests.layers.machine [FILE ...]` lists the findings, `--write` stores their counts in
`machine_counts.json`, which `test_machine.py` compares: by file for the first two rules, by folder of `tests`
for the third.
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from tests.layers.allowed import MEASUREMENTS

TESTS = Path(__file__).resolve().parents[1]
COUNTS = Path(__file__).with_name("machine_counts.json")

Finding = tuple[int, str]
"""A line and its code."""

_CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
_CLOCKS |= {f"{clock}_ns" for clock in _CLOCKS}
_TIMERS = re.compile(r"seconds_of|timed")
_SECONDS = re.compile(r"(\w+_)?(seconds|elapsed|took|duration)")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_LOOPS = ast.While | ast.For | ast.AsyncFor


def upper_bounds(tree: ast.Module) -> Iterator[Finding]:
    """Yield comparisons of a measured time with an upper bound, those of programs in texts included.

    Measured times are differences of clocks, results of `seconds_of` and `timed`, names assigned from these,
    and in an `assert` names like `seconds`, and a clock outside of a loop. The tests of `if` and `while` are
    parts of waits.
    """
    for first, program in _programs(tree):
        yield from ((first + line - 1, code) for line, code in upper_bounds(program))
    functions = _of_time(tree)
    measured, read = _measurements(tree, functions)
    for node, parents in _walk(tree):
        if not isinstance(node, ast.Compare) or _is_wait(node, parents) or _function(parents) in MEASUREMENTS:
            continue
        is_asserted = any(isinstance(parent, ast.Assert) for parent in parents)
        is_polled = _loop(parents) is not None
        for bounded, bound in _upper_bounds(node):
            name = _base_name(bounded)
            is_named = bool(_SECONDS.fullmatch(name)) and name != _base_name(bound)
            if (
                _is_difference(bounded, functions, read)
                or name in measured
                or (is_asserted and is_named)
                or (is_asserted and not is_polled and _called(bounded, functions) in _CLOCKS)
            ):
                yield node.lineno, ast.unparse(node)
                break


def sleeps(tree: ast.Module) -> Iterator[Finding]:
    """Yield calls of `time.sleep` outside of a loop that ends on a condition."""
    functions = _of_time(tree)
    for node, parents in _walk(tree):
        if _called(node, functions) == "sleep":
            loop = _loop(parents)
            if loop is None or not _polls(loop):
                yield node.lineno, ast.unparse(node)


def private_imports(tree: ast.Module) -> Iterator[Finding]:
    """Yield imports of private modules or names of the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if any(re.match(r"colossalai(\.\w+)*\._(?!_)", name) for name in names):
            yield node.lineno, ast.unparse(node)


RULES: dict[str, tuple[Callable[[ast.Module], Iterator[Finding]], re.Pattern[str]]] = {
    "upper_bounds": (upper_bounds, re.compile(r"\btime\b|seconds|elapsed|took|duration|\btimed\b")),
    "sleeps": (sleeps, re.compile(r"\bsleep\b")),
    "private_imports": (private_imports, re.compile(r"colossalai[\w.]*(\._[a-z]| import\b[^#]*?\b_[a-z])")),
}
"""The rules, each with a pattern without which a file has no finding: most are not parsed."""


def findings(text: str) -> dict[str, list[Finding]]:
    """Return the findings of each rule in the text of a file."""
    due = [name for name, (_, pattern) in RULES.items() if pattern.search(text)]
    tree = ast.parse(text if due else "")
    return {name: sorted(rule(tree)) if name in due else [] for name, (rule, _) in RULES.items()}


def counts() -> dict[str, dict[str, int]]:
    """Return the numbers of findings by rule: of a file, and for private imports of a folder of `tests`."""
    found: dict[str, Counter[str]] = {name: Counter() for name in RULES}
    for path in sorted(TESTS.rglob("*.py")):
        relative = path.relative_to(TESTS)
        if relative.as_posix() == "layers/test_machine.py":  # its texts are planted findings
            continue
        for name, each in findings(path.read_text()).items():
            is_by_folder = name == private_imports.__name__ and len(relative.parts) > 1
            place = relative.parts[0] if is_by_folder else relative.as_posix()
            found[name][place] += len(each)
    return {name: {place: num for place, num in each.items() if num} for name, each in found.items()}


def risen(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each count that is larger than before."""
    return [
        f"{rule}: {place}: {before.get(rule, {}).get(place, 0)} -> {num}"
        for rule, each in now.items()
        for place, num in each.items()
        if num > before.get(rule, {}).get(place, 0)
    ]


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield the nodes of a tree with their parents, the outermost first."""
    rest: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while rest:
        node, parents = rest.pop()
        yield node, parents
        inside = (*parents, node)
        rest += [(child, inside) for child in ast.iter_child_nodes(node)]


def _programs(tree: ast.Module) -> Iterator[tuple[int, ast.Module]]:
    """Yield the programs in the texts of a file, with the line where each starts."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\nimport " in f"\n{node.value}"
        ):
            with suppress(SyntaxError):
                yield node.lineno, ast.parse(node.value)


def _of_time(tree: ast.Module) -> dict[str, str]:
    """Return the names by which a file calls functions of `time`, with those functions."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.asname or alias.name for alias in node.names if alias.name == "time"]
            found |= {f"{module}.{name}": name for module in modules for name in (*_CLOCKS, "sleep")}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _called(node: ast.AST, functions: dict[str, str]) -> str | None:
    """Return the function of `time` that a node calls."""
    if functions and isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        return functions.get(ast.unparse(node.func))
    return None


def _measurements(tree: ast.Module, functions: dict[str, str]) -> tuple[set[str], set[str]]:
    """Return the names assigned from measurements, and those assigned from clocks."""
    measured: set[str] = set()
    read: set[str] = set()
    assignments = [
        (target, value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
        for whole in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target, value in _pairs(whole, node.value)
    ]
    for target, value in assignments:
        if _called(value, functions) in _CLOCKS:
            read.add(target)
    for target, value in assignments:
        if _is_difference(value, functions, read):
            measured.add(target)
    return measured, read


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of an assignment with their values."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, its_value in zip(target.elts, value.elts, strict=False):
            yield from _pairs(each, its_value)


def _is_difference(node: ast.expr, functions: dict[str, str], read: set[str]) -> bool:
    """Return whether an expression is a difference of clocks, or the result of a function that measures."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return bool(_TIMERS.fullmatch(name))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        sides = (node.left, node.right)
        return any(_called(side, functions) in _CLOCKS or _base_name(side) in read for side in sides)
    if isinstance(node, ast.BinOp):
        return any(_is_difference(side, functions, read) for side in (node.left, node.right))
    return False


def _is_wait(node: ast.expr, parents: Sequence[ast.AST]) -> bool:
    """Return whether a node is in the test of an `if` or a `while`."""
    return any(
        isinstance(parent, ast.If | ast.While | ast.IfExp) and child is parent.test
        for parent, child in pairwise((*parents, node))
    )


def _upper_bounds(node: ast.Compare) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the sides of a comparison that have an upper bound, with the bound."""
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Lt | ast.LtE):
            yield left, right
        elif isinstance(operator, ast.Gt | ast.GtE):
            yield right, left


def _base_name(node: ast.expr) -> str:
    """Return the name of a value: `took` of `took` and `took[0]`, `seconds` of `report["seconds"]`."""
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and _SECONDS.fullmatch(str(node.slice.value)):
            return str(node.slice.value)
        return _base_name(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def _function(parents: Sequence[ast.AST]) -> str:
    """Return the name of the innermost function of some parents."""
    names = [parent.name for parent in parents if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)]
    return names[-1] if names else ""


def _loop(parents: Sequence[ast.AST]) -> ast.AST | None:
    """Return the innermost loop around a node, in the same function."""
    for parent in reversed(parents):
        if isinstance(parent, _LOOPS):
            return parent
        if isinstance(parent, _FUNCTIONS):
            return None
    return None


def _polls(loop: ast.AST) -> bool:
    """Return whether a loop ends on a condition: that of a `while`, or an `if` or `assert` that leaves it."""
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        return True
    return any(
        isinstance(inner, ast.Assert)
        or (
            isinstance(inner, ast.If)
            and any(isinstance(each, ast.Break | ast.Return | ast.Raise) for each in ast.walk(inner))
        )
        for inner in ast.walk(loop)
    )


def main() -> None:
    """List the findings or store their counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files; default: all of tests")
    parser.add_argument("--write", action="store_true", help=f"store the counts in {COUNTS.name}")
    options = parser.parse_args()
    if options.write:
        COUNTS.write_text(json.dumps(counts(), indent=2) + "\n")
        return
    for path in options.paths or sorted(TESTS.rglob("*.py")):
        for rule, found in findings(path.read_text()).items():
            for line, code in found:
                print(f"{path}:{line}: [{rule}] {code}")


if __name__ == "__main__":
    main()
