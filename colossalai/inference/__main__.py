"""Entry point of a rank of `RemoteEngine`, in a process of its own."""

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial

from colossalai.context import global_context, launch_from_torch
from colossalai.inference._build import engine_of_ranks
from colossalai.inference._load import EngineOptions, load_tokenizer
from colossalai.inference._remote import serve_connection
from colossalai.inference._service import ModelInfo
from colossalai.inference._threaded import ThreadedEngine
from colossalai.launcher import refuse


def main(text: str) -> None:
    """Load this rank's part of a model, and serve the process that started the ranks."""
    told = json.loads(text)
    parallel = {"pipeline": {"size": told["pp"]}, "tensor": {"size": told["tp"], "mode": "1d"}}
    launch_from_torch({"parallel": parallel}, backend="auto", verbose=False)
    mesh = global_context.mesh
    tokenizer = load_tokenizer(told["model"], told["tokenizer"]) if mesh.rank == 0 else None
    options = EngineOptions(**told["options"])
    engine = engine_of_ranks(told["model"], options, mesh=mesh, tokenizer=tokenizer)
    if engine is None:
        return
    info = ModelInfo(
        name="model",
        max_length=engine.limits.max_length,
        vocab_size=engine.limits.vocab_size,
        created=int(time.time()),
        adapters=engine.limits.adapters,
    )
    service = ThreadedEngine(engine, info)
    thread = threading.Thread(target=service.run, name="colossalai-engine", daemon=True)
    thread.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(told["address"])
        # After a failure of the engine the other process must see the end of the connection.
        service.on_end(partial(_hang_up, connection))
        serve_connection(service, connection)
    service.stop("nobody asks any more")
    thread.join()
    if service.error is not None:
        raise RuntimeError(f"the engine has failed: {service.error}") from service.error


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # the other process has done so already
        connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ValueError as refusal:
        refuse(refusal)
