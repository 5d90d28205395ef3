"""`colossalai checkpoint`: inspection, verification, conversion and comparison of checkpoints."""

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from colossalai.checkpoint_io import MODEL, names_by_tensor
from colossalai.checkpoint_io.tools import (
    Conversion,
    Opened,
    convert_checkpoint,
    differences,
    merge_states,
    open_checkpoint,
    size_of,
    verify_checkpoint,
)

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WIDEST = 100_000  # columns; wider than any cell


def inspect(path: str, *, variant: str | None, allow_pickle: bool, as_json: bool) -> int:
    """Print the contents of a checkpoint."""
    opened = open_checkpoint(path, variant=variant, allow_pickle=allow_pickle)
    if as_json:
        print(json.dumps(_as_json(opened), indent=2))
        return 0
    console = _console()
    console.print(f"{opened.path}: {opened.form}", highlight=False, soft_wrap=True)
    for line in _facts(opened):
        console.print(line, highlight=False, soft_wrap=True)
    config = opened.manifest.config if opened.manifest is not None else None
    if isinstance(config, dict) and config:
        _show_settings(console, config)
    for part, tensors in _tensors(opened).items():
        rows = []
        for tensor in tensors:
            also = "".join(f"\n= {name}" for name in tensor["also"])
            where = "\n".join(_place_text(place, tensor["shape"]) for place in tensor["where"])
            shape = "x".join(map(str, tensor["shape"])) or "number"
            rows.append((tensor["name"] + also, shape, tensor["dtype"], f"{tensor['bytes']:,}", where))
        title = f"{part}: {len(tensors)} tensors, {decimal(sum(t['bytes'] for t in tensors))}"
        _show_rows(console, title, ("name", "shape", "dtype", "bytes", "where"), rows)
    return 0


def verify(path: str, *, variant: str | None, as_json: bool) -> int:
    """Compare every file with its checksums; return 1 if a file is damaged."""
    total = sum(file.stat().st_size for file in _files_below(Path(path)))
    verdicts = []
    with _progress("verifying", total, is_silent=as_json) as done:
        for verdict in verify_checkpoint(path, variant=variant):
            done(verdict.size or 0)
            verdicts.append(verdict)
    is_intact = all(verdict.problem is None for verdict in verdicts)
    if as_json:
        rows = [{**dataclasses.asdict(verdict), "file": str(verdict.file)} for verdict in verdicts]
        print(json.dumps({"intact": is_intact, "files": rows}, indent=2))
        return 0 if is_intact else 1
    console = _console()
    console.print(f"{path} is {'intact' if is_intact else 'damaged'}", highlight=False, soft_wrap=True)
    shown = []
    for verdict in verdicts:
        state = verdict.problem or ("intact" if verdict.is_checked else "readable; it has no checksums")
        size = "" if verdict.size is None else f"{verdict.size:,}"
        shown.append((_name_in(path, verdict.file), size, state))
    _show_rows(console, "", ("file", "bytes", "state"), shown)
    return 0 if is_intact else 1


def convert(
    source: str,
    target: str,
    *,
    to: str,
    dtype: str | None,
    variant: str | None,
    allow_pickle: bool,
    step: int | None,
    **options: Any,
) -> int:
    """Write a checkpoint in another form."""
    if step is not None and to != "state":
        raise ValueError(f"--step {step} with --to {to}: only a training state has a step, leave it out")
    opened = open_checkpoint(source, variant=variant, allow_pickle=allow_pickle)
    if step is not None and opened.manifest is not None:
        raise ValueError(f"--step {step}: {source} is of step {opened.manifest.step}, leave it out")
    _check(opened)
    conversion = Conversion(to=to, dtype=_DTYPES[dtype] if dtype else None, step=step, **options)
    return _write(opened, target, conversion)


def merge(
    sources: Sequence[str], target: str, *, variant: str | None, allow_pickle: bool, buffer_size: float
) -> int:
    """Write the weights of several files into one."""
    opened = [open_checkpoint(source, variant=variant, allow_pickle=allow_pickle) for source in sources]
    empty = [str(item.path) for item in opened if MODEL.part not in item.states]
    if empty:
        raise ValueError(f"{', '.join(empty)}: there is no model in it")
    for item in opened:
        _check(item)
    state = merge_states({str(item.path): item.states[MODEL.part] for item in opened})
    whole = dataclasses.replace(opened[0], states={MODEL.part: state}, small={})
    if os.path.realpath(target) in {os.path.realpath(item.path) for item in opened}:
        raise ValueError(f"{target} is one of the sources: give another name")
    to = "safetensors" if target.endswith(".safetensors") else "pt"
    return _write(whole, target, Conversion(to=to, buffer_size=buffer_size))


def diff(
    first: str, second: str, *, tolerance: float, variant: str | None, allow_pickle: bool, as_json: bool
) -> int:
    """Print the differences of two checkpoints; return 1 if there are any."""
    both = [open_checkpoint(path, variant=variant, allow_pickle=allow_pickle) for path in (first, second)]
    found = []
    num_names = sum(len(state.tensors) for opened in both for state in opened.states.values())
    with _progress("comparing", num_names, is_silent=as_json, of_bytes=False) as done:
        for item in differences(*both):
            done(1 if item.note.startswith("only") else 2)
            found.append(item)
    differing = [item for item in found if item.exceeds(tolerance)]
    if as_json:
        rows = [dataclasses.asdict(item) for item in found]
        print(json.dumps({"same": not differing, "tensors": rows}, indent=2))
        return 1 if differing else 0
    if not differing:
        print(f"the same: {len(found)} tensors" + (f", up to {tolerance:g}" if tolerance else ""))
        return 0
    shown = [
        (item.name, item.part, "" if item.largest is None else f"{item.largest:.6g}", item.note)
        for item in differing
    ]
    title = f"{len(differing)} of {len(found)} tensors differ"
    _show_rows(_console(), title, ("name", "part", "largest difference", "note"), shown)
    return 1


def _write(opened: Opened, target: str, conversion: Conversion) -> int:
    with _progress(f"writing {target}", size_of(opened)) as done:
        left_out = convert_checkpoint(opened, target, dataclasses.replace(conversion, progress=done))
    written = open_checkpoint(target)
    print(f"wrote {target}: {written.form}, {decimal(size_of(written))} of tensors")
    if left_out:
        print(f"left out, as {conversion.to} cannot hold it: {', '.join(left_out)}")
    return 0


def _check(opened: Opened) -> None:
    """Raise if the checkpoint is damaged, before anything is written."""
    if opened.form == "distributed checkpoint of torch":
        return  # it has no checksums
    for verdict in verify_checkpoint(opened.path):
        if verdict.problem is not None:
            raise ValueError(verdict.problem)


def _facts(opened: Opened) -> Iterator[str]:
    manifest = opened.manifest
    if manifest is not None:
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        yield f"step {manifest.step}, saved on {manifest.num_ranks} ranks by {versions}"
    if "epoch" in opened.small:
        yield f"epoch {opened.small['epoch']}"
    if opened.small:
        yield f"also: {', '.join(map(str, opened.small))}"


def _tensors(opened: Opened) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for part, state in opened.states.items():
        found[part] = []
        for name, names in names_by_tensor(state.tensors).items():
            tensor = state.tensors[name]
            places = [
                {"file": _name_in(opened.path, file), "offsets": part.offsets, "sizes": part.sizes}
                for file, part in opened.places_of(part, name)
            ]
            found[part].append(
                {
                    "name": name,
                    "also": names[1:],
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "bytes": tensor.nbytes,
                    "where": places,
                }
            )
    return found


def _as_json(opened: Opened) -> dict[str, Any]:
    manifest = opened.manifest
    return {
        "path": str(opened.path),
        "form": opened.form,
        "step": manifest.step if manifest else None,
        "num_ranks": manifest.num_ranks if manifest else None,
        "versions": manifest.versions if manifest else None,
        "config": manifest.config if manifest else None,
        "files": {_name_in(opened.path, file): file.stat().st_size for file in opened.files},
        "other": [str(name) for name in opened.small],
        "tensors": _tensors(opened),
    }


def _place_text(place: dict[str, Any], shape: list[int]) -> str:
    is_whole = list(place["sizes"]) == shape
    ranges = ", ".join(f"{b}:{b + s}" for b, s in zip(place["offsets"], place["sizes"], strict=True))
    return place["file"] if is_whole else f"{place['file']} [{ranges}]"


def _name_in(path: str | Path, file: Path) -> str:
    base = Path(path) if Path(path).is_dir() else Path(path).parent
    return str(file.relative_to(base)) if file.is_relative_to(base) and file != base else str(file)


def _files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)  # for grep


def _show_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; if it is wider than the console, print its rows over several lines.

    Cells are never broken, so that names of files and tensors can be copied.
    """
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="right" if column == "bytes" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    whole = console.options.update(width=_WIDEST)
    if console.measure(table, options=whole).maximum <= console.width:
        console.print(table)
        return
    for line in (f"\n{title}" * bool(title), f"({', '.join(columns)})"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        for line in _flow(row, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _flow(cells: Sequence[str], width: int) -> Iterator[str]:
    """Yield the lines of the first cell, and then the other cells on indented lines, unbroken."""
    yield from (f"  {piece}" for piece in cells[0].splitlines())
    line = ""
    for piece in [piece for cell in cells[1:] for piece in cell.splitlines() if piece]:
        if line and len(line) + 2 + len(piece) > width:
            yield line
            line = ""
        line = f"{line}  {piece}" if line else f"    {piece}"
    yield line


def _show_settings(console: Console, config: Mapping[str, Any]) -> None:
    """Print a nested config in rows of key and value; a value without room next to its key is below it."""
    rows = [(name, json.dumps(value)) for name, value in _leaves(config)]
    beside = min(max(len(name) for name, _ in rows), console.width // 2)
    console.print("\nconfig", markup=False)
    for name, value in rows:
        line = f"  {name:<{beside}}  {value}"
        if len(line) > console.width:
            indent = " " * 6
            broken = textwrap.wrap(
                value,
                console.width - len(indent),
                break_long_words=False,
                break_on_hyphens=False,
            )
            line = "\n".join((f"  {name}", *(indent + part for part in broken)))
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def _progress(what: str, total: int, *, is_silent: bool = False, of_bytes: bool = True) -> Iterator[Any]:
    """Show a progress bar on stderr, if that is a terminal; yield the function that advances it."""
    columns = [
        TextColumn(what),
        BarColumn(),
        *([DownloadColumn()] if of_bytes else []),
        TimeRemainingColumn(),
    ]
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=is_silent or not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
