"""Options of `colossalai checkpoint`. Its implementation is imported lazily, so that `--help` is quick."""

import sys
from collections.abc import Callable
from typing import Any

import click

_EXAMPLES = """\b
Examples:
  colossalai checkpoint inspect checkpoints/step-00000120
  colossalai checkpoint convert checkpoints/step-00000120 my-gpt2 --to hf
  colossalai checkpoint diff checkpoints/step-00000120 my-gpt2"""
_INSPECT_EXAMPLES = """\b
Examples:
  colossalai checkpoint inspect checkpoints/step-00000120
  colossalai checkpoint inspect model.safetensors --json"""
_VERIFY_EXAMPLES = """\b
Example:
  colossalai checkpoint verify checkpoints/step-00000120"""
_CONVERT_EXAMPLES = """\b
Examples:
  colossalai checkpoint convert checkpoints/step-00000120 my-gpt2 \\
    --to hf --dtype bf16
  colossalai checkpoint convert my-gpt2 start/step-00000000 --to state
  colossalai checkpoint convert torch-dcp-folder model.pt --to pt \\
    --allow-pickle"""
_MERGE_EXAMPLES = """\b
Examples:
  colossalai checkpoint merge checkpoints/step-00000120 model.safetensors
  colossalai checkpoint merge stage0.pt stage1.pt model.pt"""
_DIFF_EXAMPLES = """\b
Examples:
  colossalai checkpoint diff checkpoints/step-00000120 my-gpt2
  colossalai checkpoint diff one.pt other.pt --tolerance 1e-6"""

_DTYPES = ("fp32", "fp16", "bf16", "fp64")
_variant = click.option(
    "--variant",
    metavar="WORD",
    help="Which weights of a Hugging Face folder: fp16 for model.fp16.safetensors.",
)
_allow_pickle = click.option(
    "--allow-pickle",
    "--allow_pickle",
    is_flag=True,
    help="Read the index of a distributed checkpoint of torch, a pickle, which may run any code.",
)
_buffer_size = click.option(
    "--buffer-size",
    "--buffer_size",
    type=click.FloatRange(min=0, min_open=True),
    default=512,
    show_default=True,
    metavar="MB",
    help="The most memory that it may take.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, without tables.")


@click.group(epilog=_EXAMPLES)
def checkpoint() -> None:
    """Look into checkpoints, verify, convert, merge and compare them, without the code of the model.

    They may be training states, folders of chunks, Hugging Face folders, single files of torch or
    safetensors, files of save_checkpoint, and distributed checkpoints of torch.
    """


@checkpoint.command(epilog=_INSPECT_EXAMPLES)
@click.argument("path")
@_variant
@_allow_pickle
@_as_json
def inspect(**options: Any) -> None:
    """Show the contents of PATH: names, shapes, dtypes, sizes, and the files of the tensors."""
    from colossalai.cli._checkpoint import inspect as show

    _run(show, options)


@checkpoint.command(epilog=_VERIFY_EXAMPLES)
@click.argument("path")
@_variant
@_as_json
def verify(**options: Any) -> None:
    """Compare every file of PATH with its checksums; exit code 1 if anything is wrong."""
    from colossalai.cli._checkpoint import verify as run

    _run(run, options)


@checkpoint.command(epilog=_CONVERT_EXAMPLES)
@click.argument("source")
@click.argument("target")
@click.option(
    "--to",
    type=click.Choice(["hf", "safetensors", "pt", "state"]),
    required=True,
    help="A Hugging Face folder, a single file of safetensors or torch, or a training state.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the weights; as they are if not given.")
@click.option(
    "--size-per-shard",
    "--size_per_shard",
    type=click.FloatRange(min=0, min_open=True),
    default=1024,
    show_default=True,
    metavar="MB",
    help="Size of the files of a Hugging Face folder.",
)
@click.option(
    "--step", type=click.IntRange(min=0), help="The step of a training state, if SOURCE does not have one."
)
@_variant
@_allow_pickle
@_buffer_size
def convert(**options: Any) -> None:
    """Write SOURCE as TARGET in another form; the optimizer goes along where the form can hold it."""
    from colossalai.cli._checkpoint import convert as run

    _run(run, options)


@checkpoint.command(epilog=_MERGE_EXAMPLES)
@click.argument("sources", nargs=-1, required=True)
@click.argument("target")
@_variant
@_allow_pickle
@_buffer_size
def merge(**options: Any) -> None:
    """Write the weights of SOURCES, files of ranks or whole checkpoints, into one file TARGET.

    TARGET is a file of safetensors if it ends with .safetensors, else of torch. The same name in two sources
    must have the same values.
    """
    from colossalai.cli._checkpoint import merge as run

    _run(run, options)


@checkpoint.command(epilog=_DIFF_EXAMPLES)
@click.argument("first")
@click.argument("second")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0,
    show_default=True,
    metavar="X",
    help="The largest absolute difference that is none.",
)
@_variant
@_allow_pickle
@_as_json
def diff(**options: Any) -> None:
    """Show the largest absolute difference of each tensor; exit code 1 if the checkpoints differ.

    Names that only one of them has, other shapes and other dtypes are differences.
    """
    from colossalai.cli._checkpoint import diff as run

    _run(run, options)


def _run(command: Callable[..., int], options: dict[str, Any]) -> None:
    try:
        sys.exit(command(**options))
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)
