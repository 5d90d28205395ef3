"""`colossalai serve`: a part of the model on each rank, the engine and the HTTP server on rank 0.

The options are one frozen value, which each rank receives as JSON in an argument. One rank runs in this
process; several are started by the launcher, as by `colossalai run`.
"""

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from colossalai.context import Mesh, global_context, launch_from_torch
from colossalai.inference import (
    EngineOptions,
    EngineStats,
    Listener,
    ModelInfo,
    Request,
    Service,
    ServiceInFront,
    ServingConfig,
    ThreadedEngine,
    base_of_adapters,
    check_ranks,
    engine_of_ranks,
    load_tokenizer,
)
from colossalai.launcher import RunOptions
from colossalai.launcher import run as run_ranks
from colossalai.logging import get_dist_logger
from colossalai.serving._options import ServerOptions, is_loopback
from colossalai.serving._server import Server, check_certificate, check_port, reserved_port
from colossalai.serving.command._answer_cache import AnswerCache
from colossalai.serving.command._profanity import ProfanityFilter, ProfanityWords

KEY_VARIABLE = "COLOSSALAI_API_KEY"
_STEP_TOKENS = EngineOptions().max_tokens_per_step
_END_S = 30.0  # after the drain: for aborted requests, connections and ranks to end


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `colossalai serve`: the model, the ranks and the server.

    Attributes:
        model: A `save_pretrained` folder, or a name of `colossalai.inference.models`; None for the model of
            `config`. A peft folder stands for its base model with the adapter applied.
        config: A file in the format of `ServingConfig`; the options given here take precedence.
        name: Name of the model in requests. Default: the name of the folder.
        tokenizer: Folder of the tokenizer. Default: the model's own.
        tp: Number of tensor parallel ranks. Default: the value of `config`, or 1.
        pp: Number of pipeline stages. Default: the value of `config`, or 1.
        max_restarts: Number of restarts of the ranks after one has died.
        api_key_file: A file with the API key. Default: the environment variable COLOSSALAI_API_KEY, or no
            key.
        profanity_file: A file with forbidden words and phrases, one per line; requests and answers that
            contain one get a fixed reply.
        engine: Fields of `EngineOptions`.
        server: Fields of `ServerOptions`, except `api_key`.
    """

    model: str | None = None
    config: str | None = None
    name: str | None = None
    tokenizer: str | None = None
    tp: int | None = None
    pp: int | None = None
    max_restarts: int = 0
    api_key_file: str | None = None
    profanity_file: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the options as JSON; the key is not part of them."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Options of a rank, merged with the config file."""

    model: Any
    name: str
    tokenizer: str | None
    tp: int
    pp: int
    backend: str
    engine: EngineOptions
    server: Mapping[str, Any]
    api_key: str | None
    profanity: ProfanityWords | None
    config: ServingConfig | None
    adapter: str | None  # adapter of requests to the model itself

    def server_options(self) -> ServerOptions:
        return ServerOptions(**self.server, api_key=self.api_key)


def serve(options: ServeOptions) -> int:
    """Serve a model until SIGTERM or SIGINT.

    Args:
        options: The model, the ranks and the server.

    Returns:
        The exit code.

    Raises:
        ValueError: `options` or their files are invalid; nothing has been started.
    """
    plan = _plan(options)
    server = plan.server_options()  # raises before anything is loaded or started
    check_certificate(server)
    check_port(server)
    num_ranks = plan.tp * plan.pp
    if plan.config is not None:
        _set_log_level(plan.config.log_level)
    # Ranks take seconds to start, and weights may take minutes to load.
    ranks = f"{num_ranks} ranks (tp {plan.tp}, pp {plan.pp})" if num_ranks > 1 else "one rank"
    get_dist_logger("colossalai.serving").info(f"loading {plan.name} on {ranks}")
    if num_ranks == 1 and not options.max_restarts:
        serve_rank(options)
        return 0
    if plan.config is None or plan.config.engine_server is None:
        check_ranks(plan.model, plan.engine, tokenizer=plan.tokenizer, tp=plan.tp, pp=plan.pp)
    if server.port == 0:  # restarted ranks must bind the same port
        with reserved_port(server.host) as port:
            return _run_on_ranks(replace(options, server={**options.server, "port": port}), plan)
    return _run_on_ranks(options, plan)


def _run_on_ranks(options: ServeOptions, plan: "_Plan") -> int:
    server = plan.server_options()
    meeting = ("127.0.0.1", 0) if plan.config is None else (plan.config.host, plan.config.port)
    return run_ranks(
        RunOptions(
            target="colossalai.serving.command",
            is_module=True,
            args=(options.to_json(),),
            num_procs=plan.tp * plan.pp,
            max_restarts=options.max_restarts or None,
            drain_s=server.drain_s + _END_S,
            master_addr=None if is_loopback(meeting[0]) else meeting[0],
            master_port=meeting[1],
            env=(KEY_VARIABLE,) if KEY_VARIABLE in os.environ else (),
        )
    )


def serve_rank(options: ServeOptions) -> None:
    """Serve on this rank: rank 0 until SIGTERM or SIGINT, the others until rank 0 ends.

    Raises:
        ValueError: `options` do not fit the model.
        RuntimeError: The engine has failed.
    """
    plan = _plan(options)
    if plan.config is not None:
        _set_log_level(plan.config.log_level)
    mesh: Mesh | None = None
    if plan.tp * plan.pp > 1:
        parallel = {"pipeline": {"size": plan.pp}, "tensor": {"size": plan.tp, "mode": "1d"}}
        launch_from_torch({"parallel": parallel}, backend=plan.backend, verbose=False)
        mesh = global_context.mesh
    if plan.config is not None and plan.config.engine_server is not None:
        _serve_http(plan, plan.config.engine_server(plan.config))
        return
    is_first = mesh is None or mesh.rank == 0
    began = time.monotonic()
    tokenizer = load_tokenizer(plan.model, plan.tokenizer) if is_first else None
    engine = engine_of_ranks(plan.model, plan.engine, mesh=mesh, tokenizer=tokenizer)
    if engine is None:
        return
    info = ModelInfo(
        name=plan.name,
        max_length=engine.limits.max_length,
        vocab_size=engine.limits.vocab_size,
        created=int(time.time()),
        adapters=tuple(each for each in engine.limits.adapters if each != plan.adapter),
        facts={"tp": plan.tp, "pp": plan.pp, "blocks": engine.scheduler.pool.num_blocks},
    )
    logger = get_dist_logger("colossalai.serving")
    pool = engine.scheduler.pool
    room = pool.num_blocks * pool.block_size
    logger.info(
        f"{plan.name} is loaded in {time.monotonic() - began:.1f} s: {pool.num_blocks} blocks of "
        f"{pool.block_size} tokens, {room / info.max_length:.1f} requests of {info.max_length} tokens fit"
    )
    service = ThreadedEngine(engine, info)
    thread = threading.Thread(target=service.run, name="colossalai-engine", daemon=True)
    thread.start()
    try:
        _serve_http(plan, service)
    finally:
        service.stop("the server has ended")
        thread.join()
    if service.error is not None:
        raise RuntimeError(f"the engine has failed: {service.error}") from service.error


def _serve_http(plan: _Plan, service: Service) -> None:
    config, front = plan.config, service
    if plan.adapter is not None:
        front = AdaptedModel(front, plan.adapter)
    if config is not None and config.cache_size:
        front = AnswerCache(
            front,
            num_requests=config.cache_size,
            most_answers=config.cache_list_size,
            fixed=config.fixed_cache_keys,
        )
    if plan.profanity is not None:  # outermost: cached answers are unfiltered
        front = ProfanityFilter(front, plan.profanity)
    server = Server(front, plan.server_options())
    if isinstance(service, ThreadedEngine):
        # A failed engine has sent the error to its clients; the process ends, and may be restarted.
        service.on_end(server.ask_to_stop)
    server.serve()


class AdaptedModel(ServiceInFront):
    """An engine that applies one adapter to all requests that name no adapter.

    Args:
        service: The engine.
        adapter: Name of the adapter in the engine.
    """

    def __init__(self, service: Service, adapter: str) -> None:
        super().__init__(service)
        self._adapter = adapter

    def submit(self, request: Request, listener: Listener) -> None:
        """Forward a request; see `Service.submit`."""
        adapter = self._adapter if request.adapter is None else request.adapter
        self._service.submit(replace(request, adapter=adapter), listener)

    def stats(self) -> EngineStats:
        """Return the state of the engine."""
        return self._service.stats()

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Load new values of the base model; see `Service.update_weights`."""
        self._service.update_weights(path, in_flight=in_flight)


def _set_log_level(level: str) -> None:
    for name in ("colossalai", "colossalai.serving", "colossalai.inference"):
        get_dist_logger(name).set_level("debug" if level == "trace" else level)


def _plan(options: ServeOptions) -> _Plan:
    """Merge the options with their config file.

    Raises:
        ValueError: `options` contradict their config, have no model, or name unreadable files.
    """
    config = None if options.config is None else ServingConfig.from_file(options.config)
    if config is None and options.model is None:
        raise ValueError("no model to serve: give a folder of save_pretrained or --config with a model_class")
    model: Any = options.model if options.model is not None else config and config.model_class
    engine, server = dict(options.engine), dict(options.server)
    tokenizer, tp, pp, backend = options.tokenizer, options.tp or 1, options.pp or 1, "auto"
    if config is not None:
        resolved = config.resolve()
        said_engine: dict[str, Any] = {
            "checkpoint": None if config.checkpoint is None else str(config.checkpoint),
            "dtype": str(config.dtype_of(resolved)).removeprefix("torch."),
            "max_running": config.executor_max_batch_size,
            "max_tokens_per_step": max(_STEP_TOKENS, config.executor_max_batch_size),
            "max_queue": config.executor_max_queue_size or None,
        }
        said_server: dict[str, Any] = {
            "host": config.server_host,
            "port": config.server_port,
            "allow_cors": config.allow_cors,
            "keep_alive_s": math.ceil(config.timeout_keep_alive),
        }
        engine, server = said_engine | engine, said_server | server
        tp, pp = options.tp or config.tp_init_size, options.pp or config.pp_init_size
        tokenizer = tokenizer or (None if config.tokenizer_path is None else str(config.tokenizer_path))
        backend = config.backend
    is_path = isinstance(model, str | Path)
    name = Path(os.path.abspath(model)).name if is_path else getattr(model, "__name__", "model")
    name = options.name or name
    adapter = None
    if name in engine.get("adapters", {}):
        raise ValueError(f"the adapter {name!r} has the name of the model: give one of them another (--name)")
    if is_path and (base := base_of_adapters(model)) is not None:
        adapter = name
        engine = {**engine, "adapters": {name: os.fspath(model), **engine.get("adapters", {})}}
        has_tokenizer = Path(model, "tokenizer_config.json").is_file()
        tokenizer = tokenizer or (os.fspath(model) if has_tokenizer else None)
        model = base
    settings = EngineOptions(**engine)
    if settings.adapters and config is not None and config.engine_server is not None:
        raise ValueError(
            "the config has an engine_server of its own, which takes no adapters: leave --lora out"
        )
    return _Plan(
        model=model,
        name=name,
        tokenizer=tokenizer,
        tp=tp,
        pp=pp,
        backend=backend,
        engine=settings,
        server=server,
        api_key=_api_key(options.api_key_file),
        profanity=None if options.profanity_file is None else ProfanityWords.of_file(options.profanity_file),
        config=config,
        adapter=adapter,
    )


def _api_key(file: str | None) -> str | None:
    """Return the key of the file, else of the environment, else None.

    Raises:
        ValueError: `file` cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError:  # its message has a byte of the key
        raise ValueError(f"--api-key-file {file} is not in UTF-8: write the key into it as text") from None
    if not key:
        raise ValueError(f"--api-key-file {file} is empty: write the key into it")
    return key
