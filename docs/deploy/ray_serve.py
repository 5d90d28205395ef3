"""A server with several replicas on Ray: each has an engine of its own, Ray's proxy spreads the requests.

    serve run docs.deploy.ray_serve:make model=path/to/model replicas=2 api_key_file=key.txt

A replica loads the model in its process, and mounts the application that `colossalai serve` runs, with its
routes, limits and errors. For `tp` or `pp` in a replica see kubernetes.yaml: there the command starts ranks.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve

from colossalai.inference import EngineOptions, ModelInfo, ThreadedEngine, engine_of_ranks, load_tokenizer
from colossalai.serving import ServerOptions, make_app

_ENGINE_NUMBERS = ("block_size", "max_length", "max_running", "max_tokens_per_step", "max_queue", "kv_memory")
_ENGINE_WORDS = ("dtype", "checkpoint", "quantize", "kv_dtype")
_MOST_RUNNING = 64  # requests in a replica; others wait in Ray's proxy, and are not lost with a replica


def make(args: Mapping[str, str]) -> serve.Application:
    """Return the application that `serve run` starts.

    Args:
        args: `model`, a folder; `api_key_file`; `replicas` (2), or with `queue` the fewest of them, up to
            `most` (8): Ray then starts another one if more than `queue` requests are in flight in each.
            The rest is as of `EngineOptions`.

    Raises:
        ValueError: `args` has no `model`, or something that is not known.
    """
    known = {"model", "api_key_file", "replicas", "queue", "most", *_ENGINE_NUMBERS, *_ENGINE_WORDS}
    if "model" not in args or not known.issuperset(args):
        raise ValueError(f"give model=FOLDER, and optionally: {', '.join(sorted(known))}")
    words = {name: args[name] for name in _ENGINE_WORDS if name in args}
    numbers = {name: float(args[name]) for name in _ENGINE_NUMBERS if name in args}
    whole = {name: value if name == "kv_memory" else int(value) for name, value in numbers.items()}
    options = EngineOptions(**words, **whole)  # here a mistake ends the command, not a replica
    key_file = args.get("api_key_file")
    key = None if key_file is None else Path(key_file).read_text(encoding="utf-8").strip()
    fewest = int(args.get("replicas", "2"))
    number: dict[str, Any] = {"num_replicas": fewest}
    if "queue" in args:
        scaling = {"min_replicas": fewest, "max_replicas": int(args.get("most", "8"))}
        number = {"autoscaling_config": {**scaling, "target_ongoing_requests": float(args["queue"])}}
    build = partial(build_app, str(Path(args["model"]).resolve()), options, key)
    # Ray calls `build` in each replica: an engine cannot travel there.
    replica = serve.deployment(
        serve.ingress(_without_arguments(build))(),
        name="colossalai",
        max_ongoing_requests=_MOST_RUNNING,
        **number,
    )
    return replica.bind()


def build_app(model: str, options: EngineOptions, api_key: str | None) -> Any:
    """Load a model into this process, and return the application that serves it."""
    tokenizer = load_tokenizer(model, None)
    engine = engine_of_ranks(model, options, mesh=None, tokenizer=tokenizer)
    assert engine is not None, "this process is the only rank"
    info = ModelInfo(
        name=Path(model).name,
        max_length=engine.limits.max_length,
        vocab_size=engine.limits.vocab_size,
        created=int(time.time()),
    )
    service = ThreadedEngine(engine, info)
    # Ray starts another replica where this process ends.
    service.on_end(partial(os._exit, 1))
    threading.Thread(target=service.run, name="colossalai-engine", daemon=True).start()
    # Ray's proxy has no authentication: the application checks the key.
    return make_app(service, ServerOptions(api_key=api_key, no_auth=api_key is None))


def _without_arguments(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a plain function, whose arguments Ray inspects."""

    def builder() -> Any:
        return build()

    return builder
