"""Options of `colossalai plan`. Its implementation is imported lazily, so that `--help` is quick."""

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

# \b keeps click from filling the lines.
_EXAMPLES = """\b
Examples:
  colossalai plan gpt2-medium --world-size 4 --budget 4GB --batch 8 \\
    --output plan.json
  colossalai plan path/to/model --world-size 8 --batch 16 --seq 1024 \\
    --precision bf16
  colossalai plan mymodels:make_resnet --world-size 2 --budget 2GiB
  colossalai plan gpt3 --world-size 1024 --batch 1536 \\
    --profile a100-80gb --precision bf16_master
  colossalai plan --diff plan.json other.json"""
_POSITIVE = click.IntRange(min=1)
_BATCH = 8


@click.command(epilog=_EXAMPLES)
@click.argument("model", required=False)
@click.option("--world-size", "--world_size", type=_POSITIVE, metavar="N", help="Ranks that train it.")
@click.option("--budget", metavar="SIZE", help="Memory of a rank: 4GB is 4*10^9 bytes, 4GiB is 4*2^30.")
@click.option("--batch", type=_POSITIVE, help="Samples of all ranks.  [default: 8]")
@click.option("--seq", type=_POSITIVE, help="Length of the sequences; the model's longest if not given.")
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, momentum or sgd.")
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    help="fp32 (the model's own type), bf16, fp16, bf16_master or fp16_naive.",
)
@click.option(
    "--profile", help="Of the machine: a file, or a shipped one by name; two CPU cores if not given."
)
@click.option("--output", type=click.Path(dir_okay=False), help="Write the plan to this file.")
@click.option("--diff", nargs=2, metavar="A B", help="Only print the differences of two files of plans.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, without words.")
def plan(
    model: str | None,
    world_size: int | None,
    budget: str | None,
    batch: int | None,
    seq: int | None,
    optimizer: str,
    precision: str,
    profile: str | None,
    output: str | None,
    diff: tuple[str, str] | None,
    as_json: bool,
) -> None:
    """Find how MODEL is trained fastest on some ranks within a budget; no rank is started.

    MODEL is a folder with a config.json of Hugging Face transformers, a model such as gpt2-xl (as for
    `colossalai memory`), or module:function, which returns a model, or a model and a dict of the arguments of
    its forward.
    """
    from colossalai.auto_parallel import load_plan, make_plan
    from colossalai.cli._picture import bytes_of, check_folder

    try:
        if diff:
            _refuse_beside_diff()
            first, second = map(load_plan, diff)
            click.echo(first.diff(second))
            return
        if model is None or world_size is None:
            raise ValueError("give MODEL and --world-size, or --diff with two files of plans")
        memory_budget = None if budget is None else bytes_of("--budget", budget)
        if output is not None:
            check_folder(output)
        module, meta_args = _model_of(model, batch=batch, seq=seq)
        made = make_plan(
            module,
            meta_args,
            world_size=world_size,
            memory_budget=memory_budget,
            optimizer=optimizer,
            precision=precision,
            profile=profile,
        )
        if output is not None:
            made.save(output)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(made.to_json() if as_json else made.explain(), nl=not as_json)


def _refuse_beside_diff() -> None:
    """Raise for arguments next to --diff, which would have no effect.

    Raises:
        ValueError: MODEL or another option is given.
    """
    context = click.get_current_context()
    given = [
        param.name.upper() if isinstance(param, click.Argument) else param.opts[0]
        for param in context.command.params
        if param.name not in (None, "diff")
        and context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise ValueError(f"--diff compares two files of plans; leave {', '.join(given)} out")


def _model_of(name: str, *, batch: int | None, seq: int | None) -> tuple[Any, dict[str, Any]]:
    """Return a model without memory, in training, and the arguments of its forward.

    Raises:
        ValueError: `name` is not a folder, known model or function, its model cannot be built, or `batch` or
            `seq` contradicts the inputs of the model.
    """
    import torch

    path = Path(name)
    if name and (path.is_dir() or path.name.endswith(".json")):
        return _model_of_config(path / "config.json" if path.is_dir() else path, batch=batch, seq=seq)
    module_name, separator, function = name.partition(":")
    if separator:
        return _model_of_function(module_name, function, batch=batch, seq=seq)
    from colossalai.cli._memory import build_model, shape_of

    shape = shape_of(name)
    with torch.device("meta"):
        model = build_model(name, num_blocks=len(shape.blocks), attention="sdpa")
    if shape.has_fixed_length:
        config: Any = model.config
        _refuse_seq(seq, name)
        size = config.image_size
        return model, {"images": torch.zeros(batch or _BATCH, 3, size, size, device="meta")}
    return model, {"input_ids": _ids(batch, seq or shape.max_length)}


def _refuse_seq(seq: int | None, name: str) -> None:
    if seq is not None:
        raise ValueError(f"--seq {seq}: {name} takes images, not sequences; leave --seq out")


def _model_of_config(path: Path, *, batch: int | None, seq: int | None) -> tuple[Any, dict[str, Any]]:
    """Return the model of a configuration of transformers, and the arguments of its forward."""
    import torch

    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            "a folder is read with transformers, which is not installed: pip install transformers"
        ) from error
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: give a folder with the config.json of a model")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
        kind = getattr(transformers, named[0], None) if isinstance(named, list) and named else None
        with torch.device("meta"):
            model = (
                kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
            )
    except Exception as error:  # configurations fail with errors of any kind
        raise ValueError(
            f"{str(path)!r} is not the configuration of a model of transformers: {error}"
        ) from error
    model.train()
    taken = model.main_input_name
    size = getattr(config, "image_size", None)
    if taken == "pixel_values" and isinstance(size, int):
        _refuse_seq(seq, kind.__name__ if kind else str(path))
        pixels = torch.zeros(batch or _BATCH, config.num_channels, size, size, device="meta")
        return model, {"pixel_values": pixels}
    if taken != "input_ids":
        raise ValueError(
            f"the forward of {type(model).__name__} takes {taken}, whose shape its configuration does not "
            "give: write a function that returns the model and a dict of the arguments of its forward, and "
            "give module:function"
        )
    ids = _ids(batch, _length(config, seq, type(model).__name__))
    return model, {"input_ids": ids, "labels": ids} if hasattr(model, "lm_head") else {"input_ids": ids}


def _length(config: Any, seq: int | None, name: str) -> int:
    """Return the length of the sequences.

    Raises:
        ValueError: `seq` exceeds the number of positions of the model, or is missing for a configuration
            without a limit.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if seq is None and longest is None:
        raise ValueError(f"the configuration of {name} has no longest sequence: give --seq")
    if seq is not None and longest is not None and seq > longest:
        raise ValueError(
            f"--seq {seq}: {name} has max_position_embeddings={longest}; give at most {longest}, or raise it "
            "in the configuration"
        )
    length = seq or longest
    assert length is not None, "one of them is given"
    return length


def _model_of_function(
    module_name: str, function: str, *, batch: int | None, seq: int | None
) -> tuple[Any, dict[str, Any]]:
    """Return the model and the arguments of a user's function, on the meta device."""
    import torch
    from torch import nn

    name = f"{module_name}:{function}"
    made = _call(name, _function_of(module_name, function))
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(given, dict | None):
        found = type(made).__name__
        if isinstance(made, tuple):
            found += f" of {', '.join(type(each).__name__ for each in made) or 'nothing'}"
        raise ValueError(
            f"{name} returns a {found}; it must return a torch.nn.Module, or one and a dict of the arguments "
            "of its forward"
        )
    if given is None:
        if seq is None:
            raise ValueError(
                f"{name} returns a model alone: give --seq for a language model, or let it return the "
                "arguments of the forward as well"
            )
        return model, {"input_ids": _ids(batch, seq)}
    for option, value in (("--batch", batch), ("--seq", seq)):
        if value is not None:
            raise ValueError(
                f"{option} {value}: {name} returns the arguments of the forward, which have shapes already; "
                f"leave {option} out"
            )
    return model, {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in given.items()
    }


def _function_of(module_name: str, function: str) -> Callable[..., Any]:
    """Return a function of a module, which can be in the current folder.

    Raises:
        ValueError: The module cannot be imported, or lacks the function.
    """
    import importlib

    name = f"{module_name}:{function}"
    sys.path.insert(0, "")
    try:
        if not module_name or module_name.startswith("."):
            raise ModuleNotFoundError("a full name of a module is needed, such as mymodels:make_resnet")
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no {name} here: {error}") from error
    except Exception as error:
        raise ValueError(f"{module_name} cannot be imported: {_place_of(error)}") from error
    finally:
        sys.path.remove("")
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None or not callable(found):
        lacks = "has no" if found is None else "has no function"
        raise ValueError(f"there is no {name} here: module {module_name!r} {lacks} {function!r}")
    return found


def _call(name: str, function: Callable[..., Any]) -> Any:
    """Call a user's function and return its result.

    Raises:
        ValueError: The function needs arguments, or raises an error.
    """
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} is called without arguments: {error}") from error
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{name} fails: {_place_of(error)}") from error


def _place_of(error: Exception) -> str:
    """Return an error with the line that raised it, in place of a traceback through this package."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"


def _ids(batch: int | None, seq: int) -> Any:
    import torch

    return torch.zeros(batch or _BATCH, seq, dtype=torch.long, device="meta")
