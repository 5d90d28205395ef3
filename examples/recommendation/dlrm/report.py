"""Reports of a run: a table of evaluations, a progress bar on a terminal, statistics of the caches."""

import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from colossalai.booster import Booster

COLUMNS = {"samples": "12,", "loss": "10.4f", "auroc": "10.4f", "hit_rate": "10.1%", "speed": "13,.0f"}
TITLES = ("samples", "loss", "AUROC", "hit rate", "samples/s")


class Report:
    """Output of rank 0; the methods of the other ranks print nothing.

    Args:
        rank: The rank of this process.
        samples: Number of training samples that the run has seen before.
        total: Number of all training samples.
    """

    def __init__(self, rank: int, *, samples: int, total: int) -> None:
        columns = BarColumn(None), MofNCompleteColumn(), TextColumn("samples"), TimeRemainingColumn()
        console, has_bar = Console(quiet=rank != 0), rank == 0 and sys.stdout.isatty()
        self._bar = Progress(*columns, console=console, expand=True, disable=not has_bar)
        self._task = self._bar.add_task("training", total=total, completed=samples)
        self._bar.start()
        widths = [spec.partition(".")[0].rstrip(",") for spec in COLUMNS.values()]
        self._header = "".join(f"{title:>{width}}" for title, width in zip(TITLES, widths, strict=True))

    def say(self, message: str) -> None:
        """Print lines above the bar."""
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def say_header(self) -> None:
        """Print the titles of the table."""
        self.say(self._header)

    def add(self, record: dict[str, Any]) -> None:
        """Print a line of the table."""
        self.say("".join(f"{record[key]:{spec}}" for key, spec in COLUMNS.items()))

    def advance(self, samples: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=samples)

    def close(self) -> None:
        """End the bar."""
        self._bar.stop()


class Meter:
    """Statistics of training steps, without those of evaluations.

    Args:
        booster: Its ranks are those of the sums.
        caches: The cached bags of this rank.

    Attributes:
        totals: Of all intervals: rows found in a cache, rows missed, bytes read from the tables, bytes
            written to them.
        seconds: Of all intervals.
    """

    def __init__(self, booster: Booster, caches: list[Any]) -> None:
        self._booster, self._caches = booster, caches
        self.totals = torch.zeros(4, dtype=torch.float64)
        self.seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin an interval of training steps."""
        self._num_lookups = [len(cache.num_hits_history) for cache in self._caches]
        self._losses: list[torch.Tensor] = []
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """Add a step."""
        self._losses.append(loss.detach())

    def end(self) -> dict[str, float]:
        """End an interval, and return its mean loss, hit rate and seconds; all ranks call it."""
        seconds = time.perf_counter() - self._started
        own = torch.zeros(5, dtype=torch.float64)
        for cache, begin in zip(self._caches, self._num_lookups, strict=True):
            row_bytes = cache.cache_weight_mgr.param[0].nbytes
            hits, misses = sum(cache.num_hits_history[begin:]), sum(cache.num_miss_history[begin:])
            written = sum(cache.num_write_back_history[begin:])
            own[:4] += torch.tensor([hits, misses, misses * row_bytes, written * row_bytes])
        own[4] = torch.stack(self._losses).double().mean()
        # Of another kind of loader than a prepared one, so it returns the rows of all ranks.
        by_rank = self._booster.gather_for_metrics(own.unsqueeze(0), dataloader=())
        counts = by_rank[:, :4].sum(0).cpu()
        self.totals += counts
        self.seconds += seconds
        return {
            "loss": by_rank[:, 4].mean().item(),
            "hit_rate": (counts[0] / (counts[0] + counts[1])).item(),
            "seconds": seconds,
            "steps": len(self._losses),
        }

    def summary(self) -> str:
        """Describe all intervals."""
        hits, misses, read, written = self.totals.tolist()
        return (
            f"caches: {hits / max(hits + misses, 1):.1%} of the rows were found\n"
            f"moved: {read / 1e6:,.1f} MB from the tables, {written / 1e6:,.1f} MB to the tables"
        )
