"""Options of `colossalai serve`. Its implementation is imported lazily, so that `--help` is quick."""

import importlib
import re
import sys
from types import ModuleType
from typing import Any

import click

_EXAMPLES = """\b
Examples:
  colossalai serve path/to/opt-125m
  colossalai serve path/to/model --tp 2 --api-key-file key.txt --port 0
  colossalai serve path/to/model --dtype bfloat16 --kv-memory 4GiB \\
    --max-queue 100
  colossalai serve path/to/model --quantize int8 --kv-dtype int8
  colossalai serve path/to/model --lora sql=adapters/sql \\
    --lora chat=adapters/chat
  colossalai serve path/to/model --speculate ngram:4
  colossalai serve --config opt_config.py"""
# The extra "serve" of pyproject.toml.
_LIBRARIES = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "transformers", "tokenizers")
_POSITIVE = click.IntRange(min=1)
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SERVER_OPTIONS = {
    "host": "host",
    "port": "port",
    "no_auth": "no_auth",
    "open_metrics": "open_metrics",
    "allow_weight_updates": "allow_weight_updates",
    "allow_cors": "allow_cors",
    "log_prompts": "log_prompts",
    "max_body_bytes": "max_body_bytes",
    "request_timeout": "request_timeout_s",
    "drain": "drain_s",
    "ssl_keyfile": "ssl_keyfile",
    "ssl_certfile": "ssl_certfile",
}


class _Memory(click.ParamType[float]):
    """A fraction of the free memory, or bytes such as 4GiB."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9.]+)\s*([kmg]i?b)?", str(value).strip().lower())
        try:
            number = float(found.group(1)) * _UNITS[found.group(2) or ""] if found else 0.0
        except ValueError:
            number = 0.0
        if number <= 0:
            self.fail(f"{value!r} is neither a fraction such as 0.5 nor bytes such as 4GiB", param, ctx)
        return number


def _adapters(given: tuple[str, ...]) -> dict[str, str]:
    """Return folders of adapters by name."""
    found: dict[str, str] = {}
    for each in given:
        name, _, folder = each.partition("=")
        if not name or not folder:
            raise click.BadParameter(f"{each!r} is not NAME=DIR, such as sql=adapters/sql")
        if name in found:
            raise click.BadParameter(f"two adapters have the name {name!r}; each needs one of its own")
        found[name] = folder
    return found


@click.command(epilog=_EXAMPLES)
@click.argument("model", required=False)
@click.option("--config", metavar="FILE.py", help="A config with a model_class, as the OPT service has it.")
@click.option("--name", help="Name of the model in requests. Default: the name of its folder.")
@click.option("--tokenizer", metavar="DIR", help="Folder of the tokenizer. Default: the model's folder.")
@click.option("--checkpoint", metavar="PATH", help="The values, where they are not in the model's folder.")
@click.option("--tp", type=_POSITIVE, help="Ranks that share each layer.  [default: 1]")
@click.option("--pp", type=_POSITIVE, help="Stages that share the layers.  [default: 1]")
@click.option("--dtype", help="float32, bfloat16, float16 or float64. Default: the dtype of the files.")
@click.option(
    "--quantize",
    metavar="WAY",
    help="Weights in 8 or 4 bits: int8 (activations, too), int8-weights, int4, int4:GROUP.",
)
@click.option("--kv-dtype", type=click.Choice(["auto", "int8"]), help="Keys and values in 8 bits.")
@click.option(
    "--lora",
    "adapters",
    metavar="NAME=DIR",
    multiple=True,
    callback=lambda _, __, given: _adapters(given) or None,
    help="An adapter in peft's format, chosen by `model` in requests; can be given several times.",
)
@click.option(
    "--speculate",
    metavar="WAY",
    help="Guess tokens, to make several in a step: ngram:K from the text, FOLDER:K by a small model.",
)
@click.option("--block-size", type=_POSITIVE, help="Tokens of a block of the cache.  [default: 16]")
@click.option(
    "--kv-memory",
    type=_Memory(),
    help="Memory of the cache on each rank: a fraction of the free memory, or bytes (4GiB).  [default: 0.5]",
)
@click.option("--max-length", type=_POSITIVE, help="Most tokens of a prompt and its answer.")
@click.option("--max-running", type=_POSITIVE, help="Most answers that are made at a time.  [default: 64]")
@click.option("--max-tokens-per-step", type=_POSITIVE, help="Most tokens of a step.  [default: 512]")
@click.option("--max-queue", type=_POSITIVE, help="Most requests that wait; others get 429.")
@click.option("--no-prefix-cache", is_flag=True, help="Read common beginnings of prompts again each time.")
@click.option(
    "--batch-invariant", is_flag=True, help="Logits that are bit for bit the same in any company; slower."
)
@click.option(
    "--row-tables/--no-row-tables",
    default=None,
    help="Keep a second copy of weights that steps of one token read faster (CPU).  [default: where it takes "
    "at most a tenth of the free memory]",
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 for a free one.  [default: 8020]")
@click.option(
    "--api-key-file", metavar="FILE", help="A file with the key that clients send; or COLOSSALAI_API_KEY."
)
@click.option(
    "--profanity-file", metavar="FILE", help="Words, one on a line; an answer with one of them is replaced."
)
@click.option("--no-auth", is_flag=True, help="Listen on an address that others reach, without a key.")
@click.option("--open-metrics", is_flag=True, help="/metrics answers without the key.")
@click.option("--allow-weight-updates", is_flag=True, help="Offer POST /v1/load_weights.")
@click.option("--allow-cors", is_flag=True, help="Accept requests of pages of other origins.")
@click.option("--log-prompts", is_flag=True, help="Write prompts into the log.")
@click.option("--max-body-bytes", type=_POSITIVE, help="Largest body of a request.  [default: 4 MiB]")
@click.option("--request-timeout", type=float, metavar="S", help="Seconds after which a request ends.")
@click.option(
    "--drain", type=float, metavar="S", help="Seconds to finish requests at the end.  [default: 30]"
)
@click.option("--ssl-keyfile", metavar="FILE", help="Private key for https.")
@click.option("--ssl-certfile", metavar="FILE", help="Certificate for https.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    help="Times that dead ranks are started again.",
)
def serve(
    model: str | None,
    config: str | None,
    name: str | None,
    tokenizer: str | None,
    *,
    tp: int | None,
    pp: int | None,
    api_key_file: str | None,
    profanity_file: str | None,
    max_restarts: int,
    no_prefix_cache: bool,
    batch_invariant: bool,
    row_tables: bool | None,
    **others: Any,
) -> None:
    """Answer requests for a language model over HTTP, in OpenAI's form.

    MODEL is a folder of save_pretrained (or of a training run), or a name such as opt_125M with --checkpoint.
    Without a key the server listens on this machine only.
    """
    # `is not None`: a port, a drain or a time of 0 is a given value.
    given = {key: value for key, value in others.items() if value is not None and value is not False}
    server = {field: given.pop(key) for key, field in _SERVER_OPTIONS.items() if key in given}
    if no_prefix_cache:
        given["has_prefix_cache"] = False
    if batch_invariant:
        given["is_batch_invariant"] = True
    if row_tables is not None:
        given["has_row_tables"] = row_tables
    try:
        serving = _import_serving()  # takes seconds; Ctrl-C is handled meanwhile
        options = serving.ServeOptions(
            model=model,
            config=config,
            name=name,
            tokenizer=tokenizer,
            tp=tp,
            pp=pp,
            max_restarts=max_restarts,
            api_key_file=api_key_file,
            profanity_file=profanity_file,
            engine=given,
            server=server,
        )
        sys.exit(serving.serve(options))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


def _import_serving() -> ModuleType:
    """Return `colossalai.serving`.

    Raises:
        UsageError: A library of the extra "serve" is not installed.
    """
    try:
        return importlib.import_module("colossalai.serving")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        raise click.UsageError(
            f"serving needs the library {library}, which is not installed: pip install {' '.join(_LIBRARIES)}"
        ) from error
