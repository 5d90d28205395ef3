"""`colossalai memory --trace`: memory timeline of two iterations of real training.

The ranks run in a separate job (`_trace_worker.py`), whose rank 0 writes the result of `record_timeline`.
"""

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._memory._shape import ModelShape, shape_of
from colossalai.cli._memory._trace_plot import plot
from colossalai.cli._picture import bytes_of, check_picture, size_text
from colossalai.launcher import Job, launch
from colossalai.zero.gemini import PLACEMENT_POLICIES, Iteration

_WORKER = "colossalai.cli._memory._trace_worker"
PRECISIONS = {"fp32": "fp32", "bf16_master": "bf16", "fp16_naive": "fp16"}  # names of Gemini's precisions
_SMALL_BLOCKS, _SMALL_SEQ = 4, 128
_MOST_CHUNKS = 16  # target for the default chunk size
_STATE_BYTES = 18  # largest size of the states per parameter, with master weights


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of a traced training.

    Attributes:
        model: See `shape_of`.
        num_blocks: Number of its blocks.
        dp: Number of ranks.
        precision: A precision of `GeminiOptions`.
        batch: Number of samples in a forward of a rank.
        seq: Length of the sequences.
        recompute: Whether blocks are recomputed in the backward.
        attention: "sdpa" or "eager".
        placement_policy: One of `PLACEMENT_POLICIES`.
        memory_budget: Memory budget of a rank in bytes; None: no bound.
        offload_dir: Folder for chunks on disk.
        min_chunk_size_mb: See `GeminiOptions`.
    """

    model: str
    num_blocks: int
    dp: int
    precision: str
    batch: int
    seq: int
    recompute: bool
    attention: str
    placement_policy: str
    memory_budget: int | None
    offload_dir: str | None
    min_chunk_size_mb: float


def trace_memory(trace_file: str, *, as_json: bool, **options: Any) -> int:
    """Train, draw and print the timeline, and return the exit code.

    Args:
        trace_file: Path of the picture.
        as_json: Whether to print JSON in place of the table.
        options: Options of the command.

    Raises:
        ValueError: An option is wrong, an output cannot be written, the machine is too small, or Gemini
            refuses the budget.
    """
    check_picture("--trace", trace_file)
    shape = shape_of(options["model"])
    _check_layout(**{name: options.pop(name) for name in ("tp", "pp", "zero")})
    settings = _settings(shape, **options)
    with tempfile.TemporaryDirectory(prefix="colossalai_memory_") as folder:
        file = Path(folder) / "found.json"
        args = (json.dumps(asdict(settings)), str(file))
        exit_code = launch(Job(target=_WORKER, args=args, is_module=True, num_procs=settings.dp))
        if exit_code != 0:
            return exit_code
        found = json.loads(file.read_text())
    if "needed" in found:
        needed = math.ceil(found["needed"] / 2**20)
        raise ValueError(
            f"--memory-budget {options['memory_budget']} is less than the largest chunks take: give "
            f"--memory-budget {needed}MiB, or smaller chunks by --min-chunk-size-mb"
        )
    if "refused" in found:
        raise ValueError(found["refused"])
    iterations = [Iteration.from_dict(content) for content in found["iterations"]]
    if settings.memory_budget is None:
        iterations = iterations[-1:]  # without a plan: the first one differs, as it has no optimizer states
    named = dict(zip(_names(iterations), iterations, strict=True))
    headline = _headline(shape, settings, found)
    plot(trace_file, named, headline)
    if as_json:
        sys.stdout.write(json.dumps({"settings": asdict(settings), **found}, indent=2) + "\n")
    else:
        _show(headline, shape, settings, named)
    return 0


def _names(iterations: Sequence[Iteration]) -> list[str]:
    """Return the names of the iterations, the last of two."""
    kinds = ["planned" if its.is_planned else "recorded" for its in iterations]
    if len(iterations) == 1 or kinds[-1] == "recorded":
        kinds[-1] = "not planned"
    return [f"iteration {place}, {kind}" for place, kind in enumerate(kinds, start=3 - len(kinds))]


def _settings(
    shape: ModelShape,
    *,
    model: str,
    dp: int,
    precision: str,
    seq: int | None,
    blocks: int | None,
    memory_budget: str | None,
    placement_policy: str | None,
    offload_dir: str | None,
    min_chunk_size_mb: float | None,
    **rest: Any,
) -> TraceSettings:
    """Return the settings for the options of the command."""
    if precision not in PRECISIONS:
        raise ValueError(f"--precision {precision} with --trace: choose one of {', '.join(PRECISIONS)}")
    num_blocks = min(_SMALL_BLOCKS, len(shape.blocks)) if blocks is None else blocks
    if num_blocks > len(shape.blocks):
        raise ValueError(f"--blocks {num_blocks}: {shape.name} has {len(shape.blocks)} blocks only")
    if shape.has_fixed_length and seq not in (None, shape.max_length):
        raise ValueError(
            f"--seq {seq}: {shape.name} takes images, of {shape.max_length} patches: leave it out"
        )
    length = shape.max_length if shape.has_fixed_length else min(seq or _SMALL_SEQ, shape.max_length)
    if seq is not None and seq > shape.max_length:
        raise ValueError(f"--seq {seq}: {shape.name} takes at most {shape.max_length}")
    if placement_policy is not None and placement_policy not in PLACEMENT_POLICIES:
        raise ValueError(
            f"--placement-policy {placement_policy}: choose one of {', '.join(PLACEMENT_POLICIES)}"
        )
    budget = None if memory_budget is None else bytes_of("--memory-budget", memory_budget)
    if budget is not None and offload_dir is None and torch.accelerator.device_count() == 0:
        raise ValueError(
            f"--memory-budget {memory_budget}: without an accelerator there is no tier below memory: give "
            "--offload-dir FOLDER as well"
        )
    num_params = count_of(shape, num_blocks)
    _check_machine(num_params, dp, budget)
    return TraceSettings(
        model=model,
        num_blocks=num_blocks,
        dp=dp,
        precision=PRECISIONS[precision],
        seq=length,
        placement_policy=placement_policy or ("cpu" if budget is None else "auto"),
        memory_budget=budget,
        offload_dir=None if offload_dir is None else str(Path(offload_dir).absolute()),
        min_chunk_size_mb=min_chunk_size_mb or num_params / _MOST_CHUNKS / 2**20,
        **rest,
    )


def _check_layout(*, tp: int, pp: int, zero: int) -> None:
    for option, given, allowed in (("--tp", tp, (1,)), ("--pp", pp, (1,)), ("--zero", zero, (0, 3))):
        if given not in allowed:
            raise ValueError(
                f"{option} {given} with --trace, which traces Gemini, which is ZeRO 3: leave it out"
            )


def count_of(shape: ModelShape, num_blocks: int) -> int:
    """Return the number of parameters of a model with `num_blocks` blocks."""
    ends = shape.first + shape.last
    return ends.cut + ends.whole + sum(block.cut + block.whole for block in shape.blocks[:num_blocks])


def _check_machine(num_params: int, dp: int, budget: int | None) -> None:
    """Check that this machine has enough memory; each rank has the whole model before the chunks are made."""
    num_devices = torch.accelerator.device_count()
    if 0 < num_devices < dp:
        raise ValueError(f"--dp {dp}, but this machine has {num_devices} devices; use at most that many")
    needed = dp * (4 * num_params + (budget or 0)) + (0 if budget is not None else _STATE_BYTES * num_params)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"{num_params:,} parameters on {dp} ranks take about {size_text(needed)} to train, and this "
            f"machine has {size_text(free)} free: give fewer --blocks, or a --memory-budget"
        )


def _headline(shape: ModelShape, settings: TraceSettings, found: dict[str, Any]) -> str:
    parts = f"{settings.num_blocks} of {len(shape.blocks)} blocks"
    budget = "no budget" if settings.memory_budget is None else f"budget {size_text(settings.memory_budget)}"
    return (
        f"{shape.name}, {parts}, {settings.precision}, batch {settings.batch} x {settings.seq}; "
        f"rank 0 of {settings.dp}, {settings.placement_policy!r}, {budget}, {found['num_chunks']} chunks"
    )


def _show(
    headline: str, shape: ModelShape, settings: TraceSettings, iterations: dict[str, Iteration]
) -> None:
    """Print a table with a column per iteration."""
    console = Console(highlight=False, markup=False)
    console.print(headline, soft_wrap=True)
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for name in iterations:
        table.add_column(name, justify="right", no_wrap=True)
    every = list(iterations.values())
    table.add_row("peak of model data", *(size_text(its.peak_model_bytes) for its in every))
    table.add_row("peak of other data", *(size_text(its.peak_other_bytes) for its in every))
    table.add_row("peak of both together", *(size_text(its.peak_bytes) for its in every))
    if settings.memory_budget is not None:
        shares = (f"{its.peak_bytes / settings.memory_budget:.1%}" for its in every)
        table.add_row("of the budget", *shares)
    table.add_row("moved in from below", *(size_text(its.bytes_in) for its in every))
    table.add_row("moved out to below", *(size_text(its.bytes_out) for its in every))
    console.print(table)
    if settings.num_blocks < len(shape.blocks):
        console.print(f"--blocks {len(shape.blocks)} trains the whole model.", soft_wrap=True)
