"""Options of `colossalai memory`. Its implementation is imported lazily, so that `--help` is quick."""

import sys
from typing import Any

import click
from click.core import ParameterSource

# \b keeps click from filling the lines.
_EXAMPLES = """\b
Examples:
  colossalai memory --model gpt2-xl --dp 8 --zero 2
  colossalai memory --model gpt3 --dp 16 --tp 8 --pp 12 --zero 1 \\
    --recompute --explain
  colossalai memory --model path/to/config.json --batch 4 --seq 512 \\
    --precision bf16 --json
  colossalai memory --model gpt2-small --trace out.png \\
    --memory-budget 768MiB --offload-dir /tmp/chunks
  colossalai memory --serve bloom_175B --tp 8 --quantize int8 --memory 80GiB
  colossalai memory --rlhf --memory 80GiB
  colossalai memory --rlhf --model path/to/config.json --lora-rank 8 \\
    --batch 16 --seq 1024 --json
  colossalai memory --serve path/to/model --kv-dtype int8 \\
    --max-length 4096 --json"""

_TRACE_OPTIONS = ("memory_budget", "offload_dir", "placement_policy", "blocks", "min_chunk_size_mb")
_SERVE_OPTIONS = (
    "quantize",
    "kv_dtype",
    "dtype",
    "block_size",
    "max_length",
    "max_running",
    "memory",
    "row_tables",
)
_OPTIONS_OF_BOTH = ("serve", "tp", "pp", "as_json")
_RLHF_OPTIONS = ("model", "precision", "batch", "seq", "lora_rank", "memory", "as_json", "explain")

_POSITIVE = click.IntRange(min=1)


@click.command(epilog=_EXAMPLES)
@click.option(
    "--model",
    metavar="NAME",
    help="A model such as gpt2-xl (a wrong name lists all), or a config.json of Hugging Face transformers.",
)
@click.option("--dp", type=_POSITIVE, default=1, show_default=True, metavar="N", help="Data-parallel ranks.")
@click.option(
    "--tp", type=_POSITIVE, default=1, show_default=True, metavar="T", help="Ranks that share a layer (1d)."
)
@click.option(
    "--pp", type=_POSITIVE, default=1, show_default=True, metavar="P", help="Pipeline ranks (1f1b)."
)
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="Stage of ZeRO: 1 cuts optimizer states over the data-parallel ranks, 2 gradients, 3 parameters.",
)
@click.option(
    "--precision",
    default="bf16_master",
    show_default=True,
    metavar="NAME",
    help="fp32; bf16, fp16 (autocast); bf16_master, fp16_naive (16 bits and float32 masters, as ZeRO's).",
)
@click.option(
    "--batch",
    type=_POSITIVE,
    default=1,
    show_default=True,
    metavar="B",
    help="Samples in a forward of a rank.",
)
@click.option(
    "--seq", type=_POSITIVE, metavar="S", help="Length of the sequences; the model's longest if not given."
)
@click.option("--recompute", is_flag=True, help="Blocks keep their input only and are recomputed.")
@click.option(
    "--attention",
    type=click.Choice(["sdpa", "eager"]),
    default="sdpa",
    show_default=True,
    help="Fused, or with attention weights written out.",
)
@click.option("--explain", is_flag=True, help="Also print the formula of each row, with its numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, formulas included, without tables.")
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE.png",
    help="Train two iterations under Gemini, and draw the memory over time. The options below are its.",
)
@click.option("--memory-budget", "--memory_budget", metavar="SIZE", help="Bytes of a rank, or as 256MiB.")
@click.option("--offload-dir", "--offload_dir", metavar="FOLDER", help="For chunks beyond the budget.")
@click.option(
    "--placement-policy",
    "--placement_policy",
    metavar="NAME",
    help="One of those of GeminiPlugin; auto if there is a budget, cpu if not.",
)
@click.option(
    "--blocks", type=_POSITIVE, metavar="N", help="Train with N blocks of the model; 4 if not given."
)
@click.option(
    "--min-chunk-size-mb",
    "--min_chunk_size_mb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="The least size of a chunk, in MB of 2**20 elements; a sixteenth of the model if not given.",
)
@click.option(
    "--serve", metavar="MODEL", help="Memory of `colossalai serve MODEL` instead. The options below are its."
)
@click.option("--quantize", metavar="WAY", help="int8, int8-weights, int4 or int4:GROUP, as for serve.")
@click.option(
    "--kv-dtype", type=click.Choice(["auto", "int8"]), default="auto", help="Keys and values in 8 bits."
)
@click.option("--dtype", default="auto", metavar="NAME", help="Default: the dtype of the files.")
@click.option(
    "--block-size", type=_POSITIVE, default=16, show_default=True, help="Tokens of a block of the cache."
)
@click.option("--max-length", type=_POSITIVE, help="Tokens of a prompt and its answer; the window.")
@click.option(
    "--max-running", type=_POSITIVE, default=64, show_default=True, help="Answers that are made at a time."
)
@click.option(
    "--row-tables/--no-row-tables",
    default=None,
    help="Also count copies of the weights that steps of one token read on a CPU.",
)
@click.option(
    "--rlhf",
    is_flag=True,
    help="Memory of PPO's models under each plan over 1, 4, 8 ranks; of --model, OPT-1.3B if not given.",
)
@click.option(
    "--lora-rank",
    "--lora_rank",
    type=_POSITIVE,
    default=16,
    show_default=True,
    metavar="R",
    help="Of --rlhf: rank of the adapters that may be trained alone.",
)
@click.option(
    "--memory",
    "--budget",
    metavar="SIZE",
    help="Of the device of each rank, such as 80GiB; for --serve and --rlhf, there that of this machine.",
)
@click.pass_context
def memory(
    context: click.Context,
    /,
    serve: str | None,
    *,
    as_json: bool,
    explain: bool,
    trace_file: str | None,
    rlhf: bool,
    **settings: Any,
) -> None:
    """Estimate the memory of a rank in training with Adam: parameters, gradients, states, activations.

    Neither weights nor ranks are needed: parameters are counted on the meta device. With a pipeline, the
    stage that needs most is shown.

    With --serve MODEL (a folder of save_pretrained, or a name such as bloom_175B): the memory of each rank of
    a server: weights, the cache of keys and values, and how many requests fit.

    With --rlhf: actor, critic, reference, reward model and rollouts of PPO, for each plan, with all
    parameters trained or adapters (LoRA) alone, and which plans fit into the device.

    With --trace nothing is estimated: --dp ranks train with random data, on this machine, by default with 4
    blocks on 128 tokens.
    """
    given = {name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT}
    if serve is not None:
        _show_serving(serve, given, as_json=as_json, settings=settings)
        return
    if rlhf:
        _show_rlhf(given, settings, as_json=as_json, explain=explain)
        return
    _refuse_others(given, settings, is_traced=trace_file is not None, explain=explain)
    from colossalai.cli._memory import show_memory, trace_memory

    if as_json and explain:
        raise click.UsageError("--json has the formulas: leave --explain out")
    try:
        if trace_file is None:
            show_memory(**settings, as_json=as_json, explain=explain)
        else:
            sys.exit(trace_memory(trace_file, **settings, as_json=as_json))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse_others(given: set[str], settings: dict[str, Any], *, is_traced: bool, explain: bool) -> None:
    """Raise for options of other modes of the command, and remove them from the settings."""
    if wrong := [name for name in _SERVE_OPTIONS if settings.pop(name) is not None and name in given]:
        beside = " or --rlhf" if wrong[0] == "memory" else ""
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} is an option of --serve MODEL{beside}")
    if settings.pop("lora_rank") and "lora_rank" in given:
        raise click.UsageError("--lora-rank is an option of --rlhf")
    if settings["model"] is None:
        raise click.UsageError("choose a model: --model NAME in training, or --serve MODEL in a server")
    if not is_traced:
        if wrong := [name for name in _TRACE_OPTIONS if settings.pop(name) is not None]:
            raise click.UsageError(f"--{wrong[0].replace('_', '-')} is an option of --trace FILE.png")
    elif explain:
        raise click.UsageError("--trace measures, and has no formulas: leave --explain out")


def _show_serving(model: str, given: set[str], *, as_json: bool, settings: dict[str, Any]) -> None:
    if wrong := sorted(given - {*_SERVE_OPTIONS, *_OPTIONS_OF_BOTH}):
        name = {"trace_file": "trace"}.get(wrong[0], wrong[0]).replace("_", "-")
        raise click.UsageError(f"--{name} is about training: leave it out with --serve")
    from colossalai.cli._memory import show_serving

    try:
        show_serving(
            model,
            tp=settings["tp"],
            pp=settings["pp"],
            as_json=as_json,
            **{name: settings[name] for name in _SERVE_OPTIONS},
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _show_rlhf(given: set[str], settings: dict[str, Any], *, as_json: bool, explain: bool) -> None:
    if wrong := sorted(given - {"rlhf", *_RLHF_OPTIONS}):
        name = {"trace_file": "trace"}.get(wrong[0], wrong[0]).replace("_", "-")
        raise click.UsageError(
            f"--{name} has no meaning with --rlhf, whose table has every plan: leave it out"
        )
    if as_json and explain:
        raise click.UsageError("--json has the formulas: leave --explain out")
    from colossalai.cli._memory import show_rlhf

    names = ("model", "precision", "seq", "lora_rank", "memory")
    try:
        show_rlhf(
            **{name: settings[name] for name in names},
            batch=settings["batch"] if "batch" in given else None,
            as_json=as_json,
            explain=explain,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
