"""`colossalai memory --serve`: weights and cache of each rank of a server, and the requests that fit."""

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._picture import bytes_of, size_text
from colossalai.inference import EngineOptions, ServingMemory, serving_memory


def show_serving(
    model: str,
    *,
    tp: int,
    pp: int,
    memory: str | None,
    max_running: int,
    as_json: bool,
    row_tables: bool | None = None,
    **options: Any,
) -> None:
    """Print the memory of each rank of a server, as a table or as JSON.

    Args:
        model: A folder, or a name of `colossalai.inference.models`.
        tp: Number of ranks that share each layer.
        pp: Number of pipeline stages.
        memory: Memory of the device of each rank, with a unit; None: requests that fit are not counted.
        max_running: Number of concurrent answers that the cache has to hold.
        as_json: Whether to print JSON.
        row_tables: Whether to count row tables, one per product; None: no.
        options: Other fields of `EngineOptions`.

    Raises:
        ValueError: `model` cannot be served or counted like that; see `serving_memory`.
    """
    num_bytes = None if memory is None else bytes_of("--memory", memory)
    settings = EngineOptions(max_running=max_running, has_row_tables=row_tables, **options)
    found = serving_memory(model, settings, tp=tp, pp=pp)
    if as_json:
        said = {**options, **_as_dict(found, num_bytes, max_running)}  # a length that was found goes first
        sys.stdout.write(json.dumps({**said, "tp": tp, "pp": pp}, indent=2) + "\n")
        return
    console = Console(highlight=False, markup=False)
    cache = "8 bits" if options["kv_dtype"] == "int8" else found.dtype
    console.print(
        f"{found.model}: {found.num_params:,} parameters, {found.way or found.dtype}, cache in {cache}; "
        f"tp {tp}, pp {pp}; up to {found.max_length:,} tokens a request, blocks of {found.block_size}",
        soft_wrap=True,
    )
    console.print(_table(found, num_bytes, max_running))
    if num_bytes is not None:
        fitting = _num_fitting(found, num_bytes)
        console.print(
            f"{fitting:,} requests of full length fit into {size_text(num_bytes)} of each rank."
            if fitting >= 0
            else f"{size_text(num_bytes)} of each rank do not hold the weights: more ranks or fewer bits do.",
            soft_wrap=True,
        )
    console.print("Activations of a step, and what the library takes, come on top.", soft_wrap=True)


def _num_fitting(found: ServingMemory, memory: int) -> int:
    """Return the number of requests that fit on all ranks; -1 if the weights of a stage do not fit."""
    return min(found.num_fitting(stage, memory) for stage in found.stages)


def _table(found: ServingMemory, memory: int | None, max_running: int) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("each of ranks", no_wrap=True)
    has_tables = any(stage.row_table_bytes for stage in found.stages)
    for name in (
        "with row tables" if has_tables else "weights",
        "KV of a token",
        f"KV of {max_running} requests",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    if memory is not None:
        table.add_column("fit", justify="right", no_wrap=True)
    for stage in found.stages:
        first, last = stage.ranks[0], stage.ranks[-1]
        row = [
            str(first) if first == last else f"{first}-{last}",
            size_text(stage.weight_bytes + stage.row_table_bytes),
            size_text(round(found.token_bytes(stage))),
            size_text(found.cache_bytes(stage, max_running)),
        ]
        if memory is not None:
            fitting = found.num_fitting(stage, memory)
            row.append(f"{fitting:,}" if fitting >= 0 else "no weights")
        table.add_row(*row)
    return table


def _as_dict(found: ServingMemory, memory: int | None, max_running: int) -> dict[str, Any]:
    ranks = []
    for number, stage in enumerate(found.stages):
        fitting = None if memory is None else found.num_fitting(stage, memory)
        figures = {
            "stage": number,
            "weight_bytes": stage.weight_bytes,
            "row_table_bytes": stage.row_table_bytes,
            "kv_bytes_per_token": found.token_bytes(stage),
            "kv_bytes_per_block": stage.block_bytes,
            "cache_bytes": found.cache_bytes(stage, max_running),
            "requests_that_fit": fitting if fitting is None else max(fitting, 0),
            "weights_fit": fitting if fitting is None else fitting >= 0,
        }
        ranks += [{"rank": rank, **figures} for rank in stage.ranks]
    return {
        "model": found.model,
        "num_params": found.num_params,
        "model_dtype": found.dtype,
        "max_length": found.max_length,
        "max_running": max_running,
        "memory": memory,
        "requests_that_fit": None if memory is None else max(_num_fitting(found, memory), 0),
        "ranks": ranks,
    }
