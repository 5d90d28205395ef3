"""Words: sentences of docstrings, comments, messages, help and documents that match one of `PATTERNS`.

The patterns are habits of this code base that readers of PyTorch's documents stumble over: a clause in place
of a noun, code that speaks, things that stand or lie, negated nouns (`docs/design/README.md`, Words). They
find most of these sentences and few others: 0.6 % of the 11,800 sentences in torch.distributed's fsdp,
pipelining, checkpoint and tensor match.

`python -m tests.layers.dialect [PATH ...]` lists the matches, `--count` prints the numbers only, `--write`
stores them in `dialect_counts.json`. A count may fall, not rise (`test_dialect.py`).
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = Path(__file__).with_name("dialect_counts.json")

_QUESTION = r"(?![^?.]*\?)"

PATTERNS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "starts with a clause": r"^(?:what|who|whom|whose|whoever|whichever|how(?! to| it works)|where)\b"
        + _QUESTION,
        "starts with a pronoun": r"^(?:of each|of an?\b|it[;,])",
        "what": r"(?<!^)\bwhat(?:ever)?\b(?! if\b)" + _QUESTION,
        "who": r"(?<!^)\b(?:who|whom|whoever)\b" + _QUESTION,
        "speaks": r"\b(?:tells?|told|telling|says?|said|saying|hears?|heard|hearing|speaks?|speaking)\b",
        "asks": r"\b(?:asks|asked|asking|ask)\b",
        "knows": r"\b(?:knows|knew)\b",
        "stands": r"\b(?:stands|stood|standing|stand)\b(?! for|-)",
        "lies": r"\b(?:lies|lying|lain)\b|\b(?:that|which|they|both|all|may|can|must|to) (?:lie|lay)\b",
        "is no": r"(?<!there )(?<!here )(?<!it )\b(?:is|are|was|were|be) no "
        r"(?!longer|more|less|fewer|greater|larger|smaller|other)\w+",
        "has not the": r"\b(?:has|have|had) not (?:the|a|an|its|their|this|that)\b",
        "nobody": r"\b(?:nobody|somebody|anybody|everybody)\b",
        "beside": r"\bbesides?\b",
        "elsewhere": r"\belsewhere\b",
        "under way": r"\bunder way\b|\bon (?:its|the|their) way\b",
        "will do": r"\b(?:will|would|must|may) do\b",
        "let be": r"\blet(?:s|ting)?\b[^.;:]{0,40}\bbe\b",
        "door": r"\b(?:front )?doors?\b",
        "landed": r"\blanded\b",
        "one that": r"\b(?:the )?ones? (?:that|which|who)\b|\bthat which\b|\bthat of (?:the|a|an|its|one)\b",
        "in hand": r"\b(?:in|at) hand\b",
        "another's": r"\b(?:another's|others'|fellows?)\b",
    }.items()
}


@dataclass(frozen=True)
class Sentence:
    """One sentence of a file: the line where its text begins, and its words."""

    path: Path
    line: int
    text: str

    def matches(self) -> list[str]:
        """Return the names of the patterns that it matches."""
        return [name for name, pattern in PATTERNS.items() if pattern.search(self.text)]


# The name that begins an entry of `Args:` or of a list, and the types after it.
_ENTRY = re.compile(
    r"^\s*(?:[-*] |\d+\. )?"
    r"(?:\*{0,2}[`\w][`\w.\[\]|]*(?:(?:,| \|) [`\w][`\w.\[\]|]*)*\*{0,2}(?: \([^)]*\))?: )?"
)
_END = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`*\"(])|\n\s*\n")
_SECTION = re.compile(
    r"^\s*(?:Args|Returns|Raises|Yields|Attributes|Note|Notes|Example|Examples|Shapes?|References?):\s*$"
)


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Split a text in sentences: pairs of a line (from 0) and the words, without code and links."""
    block: list[str] = []
    start = 0

    def flush() -> Iterator[tuple[int, str]]:
        whole = " ".join(part.strip() for part in block)
        whole = re.sub(r"`[^`]*`", "`x`", whole)
        whole = re.sub(r"\]\([^)]*\)", "]", whole)
        for sentence in _END.split(_ENTRY.sub("", whole)):
            words = sentence.strip(" *_#|-")
            if len(words.split()) > 1:
                yield start, words

    for number, line in enumerate(text.splitlines()):
        opens = bool(re.match(r"^\s*(?:[-*] |\d+\. |#+ |\w[\w, ]*(?: \([^)]*\))?: )", line))
        if not line.strip() or _SECTION.match(line) or opens or line.lstrip().startswith((">>>", "|")):
            yield from flush()
            block, start = [], number
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                block, start = [cell], number
                yield from flush()
            block = []
        elif line.strip() and not _SECTION.match(line) and not line.lstrip().startswith(">>>"):
            block.append(line)
    yield from flush()


def _string(node: ast.expr) -> str:
    """Return the literal text of a string, an f-string or a sum of them; a value counts as a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(value) or "`x`" for value in node.values)
    if isinstance(node, ast.BinOp):
        return _string(node.left) + _string(node.right)
    return ""


_MESSAGES = ("warn", "warning", "info", "error", "debug", "log_once", "log", "echo", "fail")
_HELP = ("help", "short_help", "epilog", "description")


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors that are raised, of messages that are logged, and of help for options."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        arguments = [keyword.value for keyword in call.keywords if keyword.arg in _HELP]
        if isinstance(node, ast.Raise) or name in _MESSAGES:
            arguments += call.args
        for argument in arguments:
            text = _string(argument)
            if len(text.split()) > 2:
                yield argument.lineno, text


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file, those of consecutive lines as one text."""
    start, last = 0, -1
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|ruff:|!)", token.string):
            continue
        line, stands_alone = token.start[0], not token.line[: token.start[1]].strip()
        if lines and (line != last + 1 or not stands_alone):
            yield start, "\n".join(lines)
            lines = []
        if not lines:
            start = line
        lines.append(token.string.lstrip("# "))
        last = line if stands_alone else -1
    if lines:
        yield start, "\n".join(lines)


def sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a file: docstrings, comments, messages, help texts; the text of Markdown."""
    source = path.read_text()
    if path.suffix == ".md":
        prose = re.sub(
            r"^```.*?^```", lambda code: "\n" * code.group().count("\n"), source, flags=re.M | re.S
        )
        texts: Iterator[tuple[int, str]] = iter([(1, prose)])
    else:
        tree = ast.parse(source)
        texts = iter([*_docstrings(tree), *_comments(source), *_messages(tree)])
    for first, text in texts:
        for offset, words in _split(text):
            yield Sentence(path, first + offset, words)


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of Python and Markdown below `paths`."""
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix in {".py", ".md"})
        else:
            yield path


def rooms() -> dict[str, list[Path]]:
    """Return the paths by room: the packages, the package's own files, and the documents."""
    package = ROOT / "colossalai"
    found = {
        f"colossalai/{p.name}": [p]
        for p in sorted(package.iterdir())
        if p.is_dir() and (p / "__init__.py").exists()
    }
    found["colossalai"] = sorted(package.glob("*.py"))
    for name in ("docs/design", "examples", "applications", "benchmarks"):
        found[name] = [ROOT / name]
    found["docs"] = [p for p in sorted((ROOT / "docs").iterdir()) if p.name != "design"]
    found["README.md"] = [ROOT / "README.md"]
    return found


def count(paths: Sequence[Path]) -> tuple[int, int]:
    """Return how many sentences below `paths` match a pattern, and how many there are."""
    matched = total = 0
    for path in files(paths):
        for sentence in sentences(path):
            total += 1
            matched += bool(sentence.matches())
    return matched, total


def counts() -> dict[str, int]:
    """Return the number of sentences that match, by room."""
    return {room: count(paths)[0] for room, paths in rooms().items()}


def _print_row(room: str, matched: int, total: int) -> None:
    """Print the numbers of a room in one line."""
    print(f"{room:28} {matched:5} of {total:6} sentences {100 * matched / max(total, 1):6.1f} %")


def main() -> None:
    """List or count the matches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: every room")
    parser.add_argument("--count", action="store_true", help="print numbers only")
    parser.add_argument("--write", action="store_true", help=f"store the numbers in {COUNTS.name}")
    options = parser.parse_args()
    if options.write:
        COUNTS.write_text(json.dumps(counts(), indent=2) + "\n")
        return
    chosen = {str(p): [p] for p in options.paths} or rooms()
    all_matched = all_total = 0
    for room, paths in chosen.items():
        if not options.count:
            for path in files(paths):
                for sentence in sentences(path):
                    if found := sentence.matches():
                        print(f"{path}:{sentence.line}: [{', '.join(found)}] {sentence.text}")
        matched, total = count(paths)
        all_matched, all_total = all_matched + matched, all_total + total
        _print_row(room, matched, total)
    _print_row("all", all_matched, all_total)


if __name__ == "__main__":
    main()
