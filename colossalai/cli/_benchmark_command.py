"""Options of `colossalai benchmark`. Its implementation is imported lazily, so that `--help` is quick."""

import sys
from typing import Any

import click
from click.core import ParameterSource

# \b keeps click from filling the lines.
_EXAMPLES = """\b
Examples:
  colossalai benchmark --gpus 4
  colossalai benchmark --gpus 8 --batch_size 16 --hidden_size 1024 \\
    --plot modes.png
  colossalai benchmark --gpus 4 --modes 1d,2d --json -
  colossalai benchmark --serve http://127.0.0.1:8020 --clients 32 \\
    --requests 500 --plot times.png
  colossalai benchmark --serve https://host --api-key-file key.txt \\
    --rate 4 --duration 60"""

_SERVE_OPTIONS = (
    "clients", "requests", "duration", "prompt_tokens", "new_tokens", "rate", "seed", "model", "api_key_file"
)  # fmt: skip
_OPTIONS_OF_BOTH = ("serve", "json_file", "plot_file")

_POSITIVE = click.IntRange(min=1)
_MORE_THAN_0 = click.FloatRange(min=0, min_open=True)


class _Range(click.ParamType[tuple[int, int]]):
    """A range of two numbers, or a single number for both ends."""

    name = "range"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        low, dash, high = str(value).partition("-")
        try:
            return int(low), int(high if dash else low)
        except ValueError:
            self.fail(f"{value!r} is not a range such as 16-192", param, ctx)


@click.command(epilog=_EXAMPLES)
@click.option(
    "--gpus",
    "num_procs",
    type=_POSITIVE,
    metavar="N",
    help="Processes to start: one on each of N accelerators, or N on the CPU of a machine without.",
)
@click.option("--batch_size", "--batch-size", type=_POSITIVE, default=8, show_default=True, metavar="B")
@click.option("--seq_length", "--seq-length", type=_POSITIVE, default=128, show_default=True, metavar="S")
@click.option("--hidden_size", "--hidden-size", type=_POSITIVE, default=512, show_default=True, metavar="H")
@click.option("--num_heads", "--num-heads", type=_POSITIVE, default=8, show_default=True, metavar="A")
@click.option("--num_layers", "--num-layers", type=_POSITIVE, default=2, show_default=True, metavar="L")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="W",
    help="Steps before the measured ones.",
)
@click.option("--rounds", type=_POSITIVE, default=10, show_default=True, metavar="R", help="Measured steps.")
@click.option("--modes", metavar="M,...", help="Some of 1d, 2d, 2.5d, 3d; all that fit if not given.")
@click.option(
    "--json", "json_file", metavar="FILE", help="Also write the results as JSON; - is stdout, without tables."
)
@click.option("--plot", "plot_file", metavar="FILE.png", help="Also draw the results.")
@click.option(
    "--serve", metavar="URL", help="Load a server of OpenAI's completions instead. The options below are its."
)
@click.option("--clients", type=_POSITIVE, default=16, show_default=True, help="Concurrent clients.")
@click.option(
    "--requests",
    type=_POSITIVE,
    metavar="N",
    help="Number of requests; 200 if there is no --duration, either.",
)
@click.option("--duration", type=_MORE_THAN_0, metavar="S", help="Seconds after which no request begins.")
@click.option(
    "--prompt-tokens",
    type=_Range(),
    default=(16, 192),
    metavar="LOW-HIGH",
    help="Tokens of a prompt.  [16-192]",
)
@click.option(
    "--new-tokens", type=_Range(), default=(8, 96), metavar="LOW-HIGH", help="Tokens of an answer.  [8-96]"
)
@click.option(
    "--rate",
    type=_MORE_THAN_0,
    metavar="R",
    help="Requests a second at random (Poisson) times; as soon as a client is free if not given.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of lengths, prompts and times.")
@click.option("--model", metavar="NAME", help="Model name in requests; the first of /v1/models if not given.")
@click.option("--api-key-file", metavar="FILE", help="A file with the key.")
@click.pass_context
def benchmark(
    context: click.Context,
    /,
    serve: str | None,
    modes: str | None,
    json_file: str | None,
    plot_file: str | None,
    **settings: Any,
) -> None:
    """Measure every tensor-parallel configuration of N processes on this machine.

    Each is run on a multi-layer perceptron and on a transformer of (batch, sequence, hidden), forward and
    backward. Configurations that do not fit the sizes are listed with the reason.

    With --serve URL: a server under load, as its clients see it: requests and tokens per second, time to the
    first token, between tokens, and to the end. Ctrl-C shows the figures so far.
    """
    given = {name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT}
    loads = {name: settings.pop(name) for name in _SERVE_OPTIONS}
    mine = {*_SERVE_OPTIONS, "serve"} if serve is None else given - {*_SERVE_OPTIONS, *_OPTIONS_OF_BOTH}
    if wrong := sorted(given & mine):
        name = {"num_procs": "gpus"}.get(wrong[0], wrong[0]).replace("_", "-")
        whose = "an option of --serve URL" if serve is None else "for the processes of --gpus"
        raise click.UsageError(f"--{name} is {whose}: leave it out")
    if serve is None and settings["num_procs"] is None:
        raise click.UsageError("choose a measurement: --gpus N processes, or --serve URL")
    try:
        if serve is not None:
            sys.exit(_load(serve, json_file, plot_file, **loads))
        from colossalai.cli._benchmark import BenchmarkOutput, BenchmarkSettings
        from colossalai.cli._benchmark import benchmark as run_benchmark

        chosen = None if modes is None else tuple(mode.strip() for mode in modes.split(","))
        output = BenchmarkOutput(json_file=json_file, plot_file=plot_file)
        sys.exit(run_benchmark(BenchmarkSettings(**settings, configurations=()), chosen, output))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


def _load(
    url: str,
    json_file: str | None,
    plot_file: str | None,
    *,
    requests: int | None,
    duration: float | None,
    model: str | None,
    api_key_file: str | None,
    **settings: Any,
) -> int:
    from colossalai.cli._load import LoadOutput, LoadSettings, run_load

    number = 200 if requests is None and duration is None else requests
    return run_load(
        url,
        LoadSettings(requests=number, duration_s=duration, **settings),
        LoadOutput(json_file=json_file, plot_file=plot_file),
        model=model,
        api_key_file=api_key_file,
    )
