"""The options of `colossalai plan`. What it does is imported when it is asked for: `--help` is quick."""

import json
import sys
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


@click.command(epilog=_EXAMPLES)
@click.argument("model", required=False)
@click.option("--world-size", "--world_size", type=_POSITIVE, metavar="N", help="Ranks that train it.")
@click.option("--budget", metavar="SIZE", help="Memory of a rank: 4GB is 4*10^9 bytes, 4GiB is 4*2^30.")
@click.option("--batch", type=_POSITIVE, default=8, show_default=True, help="Samples of all ranks.")
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
@click.option("--diff", nargs=2, metavar="A B", help="Say what two files of plans do differently, no more.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, without words.")
def plan(
    model: str | None,
    world_size: int | None,
    budget: str | None,
    batch: int,
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
    from colossalai.cli._picture import bytes_of

    try:
        if diff:
            if model is not None:
                raise ValueError("--diff compares two files of plans; leave MODEL out")
            first, second = map(load_plan, diff)
            click.echo(first.diff(second))
            return
        if model is None or world_size is None:
            raise ValueError("give MODEL and --world-size, or --diff with two files of plans")
        module, meta_args = _model_of(model, batch=batch, seq=seq)
        made = make_plan(
            module,
            meta_args,
            world_size=world_size,
            memory_budget=None if budget is None else bytes_of("--budget", budget),
            optimizer=optimizer,
            precision=precision,
            profile=profile,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if output is not None:
        made.save(output)
    click.echo(made.to_json() if as_json else made.explain(), nl=not as_json)


def _model_of(name: str, *, batch: int, seq: int | None) -> tuple[Any, dict[str, Any]]:
    """Return a model without memory, in training, and the arguments of its forward.

    Raises:
        ValueError: `name` is no folder, known model or function, or there is no model of that.
    """
    import torch

    path = Path(name)
    if path.is_dir() or name.endswith(".json"):
        return _model_of_folder(path if path.is_dir() else path.parent, batch=batch, seq=seq)
    module_name, separator, function = name.partition(":")
    if separator:
        return _model_of_function(module_name, function, batch=batch, seq=seq)
    from colossalai.cli._memory import build_model, shape_of

    shape = shape_of(name)
    with torch.device("meta"):
        model = build_model(name, num_blocks=len(shape.blocks), attention="sdpa")
    if shape.has_fixed_length:
        config: Any = model.config
        size = config.image_size
        return model, {"images": torch.zeros(batch, 3, size, size, device="meta")}
    return model, {"input_ids": _ids(batch, seq or shape.max_length)}


def _model_of_folder(folder: Path, *, batch: int, seq: int | None) -> tuple[Any, dict[str, Any]]:
    import torch

    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            "a folder is read with transformers, which is not installed: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kinds = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(folder)!r} is no folder of a model of transformers: {error}") from error
    kind = getattr(transformers, kinds[0], None)
    with torch.device("meta"):
        model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    if getattr(config, "image_size", None) is not None:
        size = config.image_size
        return model, {"pixel_values": torch.zeros(batch, config.num_channels, size, size, device="meta")}
    ids = _ids(batch, seq or config.max_position_embeddings)
    return model, {"input_ids": ids, "labels": ids} if hasattr(model, "lm_head") else {"input_ids": ids}


def _model_of_function(
    module_name: str, function: str, *, batch: int, seq: int | None
) -> tuple[Any, dict[str, Any]]:
    import importlib

    import torch
    from torch import nn

    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"there is no {module_name}:{function} here: {error}") from error
    finally:
        sys.path.remove("")
    model, given = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{module_name}:{function} returns a {type(model).__name__}; it must return a torch.nn.Module, "
            "or one and a dict of the arguments of its forward"
        )
    if given is None:
        if seq is None:
            raise ValueError(
                f"{module_name}:{function} returns a model alone: give --seq for a language model, or let it "
                "return the arguments of the forward as well"
            )
        given = {"input_ids": _ids(batch, seq)}
    return model, {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in given.items()
    }


def _ids(batch: int, seq: int) -> Any:
    import torch

    return torch.zeros(batch, seq, dtype=torch.long, device="meta")
