"""`colossalai benchmark --serve`: probe the server's form of requests, load it, and print the figures."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from colossalai.cli._load._client import RequestOutcome, Target, find_target
from colossalai.cli._load._figures import figures_of
from colossalai.cli._load._load import LoadSettings, run_clients
from colossalai.cli._load._show import plot, show
from colossalai.cli._picture import check_folder, check_picture


@dataclass(frozen=True, kw_only=True)
class LoadOutput:
    """Outputs of the results in addition to the table.

    Attributes:
        json_file: Path of a JSON file; "-": stdout, in place of the table.
        plot_file: Path of a picture.
    """

    json_file: str | None = None
    plot_file: str | None = None


def run_load(
    url: str, settings: LoadSettings, output: LoadOutput, *, model: str | None, api_key_file: str | None
) -> int:
    """Load a server, print the figures and return the exit code: 1 if no request succeeded.

    Args:
        url: Address of the server, with or without `/v1`.
        settings: Settings of the load.
        output: Outputs of the results.
        model: Model name in requests; None: the first model that the server lists.
        api_key_file: Path of a file with the API key; None: no key.

    Raises:
        ValueError: The server cannot be reached or accepts no request, `api_key_file` cannot be read, or an
            output cannot be written.
    """
    if output.plot_file is not None:
        check_picture("--plot", output.plot_file)
    if output.json_file not in (None, "-"):
        check_folder(output.json_file)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"--serve {url}: give an address such as http://127.0.0.1:8020")
    base = url.rstrip("/").removesuffix("/v1")
    target = find_target(Target(base, model or "", _key_of(api_key_file)))
    with _progress(settings) as advance:
        result = run_clients(target, settings, after=advance)
    figures = figures_of(result)
    said = {
        "url": base,
        "model": target.model,
        "prompts": "token ids" if target.takes_ids else "texts",
        "tokens_counted_by": "usage" if target.tells_usage else "parts of the stream",
        "settings": asdict(settings),
        "figures": figures.as_dict(),
        "outcomes": [asdict(outcome) for outcome in result.outcomes],
    }
    if output.plot_file is not None:
        plot(result.outcomes, output.plot_file)
    if output.json_file not in (None, "-"):
        Path(output.json_file).write_text(json.dumps(said) + "\n", encoding="utf-8")
    if output.json_file == "-":
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
    else:
        show(figures, result.outcomes)
    if not result.is_whole:
        return 130
    return 0 if figures.finished else 1


def _key_of(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
    if not key:
        raise ValueError(f"--api-key-file {path} is empty")
    return key


@contextmanager
def _progress(settings: LoadSettings) -> Iterator[Callable[[RequestOutcome], object]]:
    """Show a progress bar on a terminal during the load."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("requests", total=settings.requests, failed=0)
        num_failed = 0

        def advance(outcome: RequestOutcome) -> None:
            nonlocal num_failed
            num_failed += outcome.error is not None
            bar.update(task, advance=1, failed=num_failed)

        yield advance
