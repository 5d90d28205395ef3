"""Serving over HTTP: throughput and latency of `colossalai serve` and vLLM's server for 16 clients.

    python benchmarks/serving_http.py
    python benchmarks/serving_http.py --peer vllm=envs/vllm/bin/python --json results.json

Each server has one core and one thread, its clients the other core. The load is that of `colossalai benchmark
--serve` (prompts of 16 to 192 tokens, answers of 8 to 96, as many clients as concurrent answers), so the
servers are in a steady state. They take turns in every round; the other servers are stopped meanwhile. The
model is the random Llama of benchmarks/serving.py. "p99 / p50" refers to the time per token of whole answers.
A peer that does not start is skipped, and the reason is printed.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from harness.llama import byte_tokenizer, llama_of, llama_parser
from harness.rounds import report

START_S, END_S = 300.0, 90.0
LOAD = (sys.executable, "-m", "colossalai.cli", "benchmark", "--json", "-")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ServerProcess:
    """A server and its child processes, on one core.

    Args:
        command: Command line of the server; "{port}" is replaced by the port.
        variables: Environment variables, in addition to those of this process.
        core: Index of the core.
        log: File for its output.

    Raises:
        RuntimeError: The server exited, or did not answer in time.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], *, core: int, log: Path) -> None:
        self.port = free_port()
        words = [word.format(port=self.port) for word in command]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                ["taskset", "--cpu-list", str(core), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            )
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(
                    (log.read_text().strip().splitlines() or ["the server wrote no output"])[-1]
                )
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                is_ok: bool = answer.status == 200
                return is_ok
        except (urllib.error.URLError, OSError):
            return False

    def stand_still(self, is_still: bool) -> None:
        """Stop the server and its child processes, or continue them."""
        for process in self._all():
            process.suspend() if is_still else process.resume()

    def end(self) -> None:
        """Terminate the server and its child processes."""
        known = self._all()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, living = psutil.wait_procs(known, timeout=END_S)
        for process in living:
            process.kill()

    def _all(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def start_servers(folder: Path, args: argparse.Namespace, core: int) -> dict[str, ServerProcess]:
    """Start our server and the peers; all of them are stopped when the function returns."""
    model, batch = str(folder / "model"), str(args.clients)
    ours = (sys.executable, "-m", "colossalai.cli", "serve", model, "--port", "{port}", "--dtype", args.dtype)
    ours += ("--max-running", batch, "--kv-memory", "1GiB", "--no-prefix-cache")
    commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {"colossalai": (ours, {})}
    for given in args.peer:
        name, _, python = given.partition("=")
        if name != "vllm":
            raise SystemExit(f"--peer {given}: known is vllm=PYTHON")
        theirs = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "{port}")
        theirs += ("--host", "127.0.0.1", "--dtype", args.dtype, "--max-num-seqs", batch)
        theirs += ("--max-model-len", "4096", "--no-enable-prefix-caching")
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        commands[name] = theirs, variables
    found = {}
    for name, (command, variables) in commands.items():
        try:
            found[name] = ServerProcess(command, variables, core=core, log=folder / f"{name}.log")
        except (OSError, RuntimeError) as error:
            print(f"without {name}: {error}")
            continue
        found[name].stand_still(True)
    return found


def load(server: ServerProcess, args: argparse.Namespace, *, requests: int, seed: int) -> dict[str, Any]:
    """Run the clients, and return the figures of `colossalai benchmark --serve`."""
    server.stand_still(False)
    words = ("--serve", f"http://127.0.0.1:{server.port}", "--clients", str(args.clients))
    words += ("--requests", str(requests), "--seed", str(seed))
    words += ("--prompt-tokens", args.prompt_tokens, "--new-tokens", args.new_tokens)
    made = subprocess.run([*LOAD, *words], capture_output=True, text=True, check=False)
    server.stand_still(True)
    if made.returncode:
        raise RuntimeError(made.stderr)
    figures: dict[str, Any] = json.loads(made.stdout)["figures"]
    return figures


def row_of(name: str, seen: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds."""

    def middle(values: Sequence[float], digits: int = 1) -> float:
        return round(statistics.median(values), digits)

    rates = [each["output_tokens_per_s"] for each in seen]
    return {
        "server": name,
        "tokens/s": middle(rates),
        "ours / this": middle(
            [mine["output_tokens_per_s"] / rate for mine, rate in zip(ours, rates, strict=True)], 3
        ),
        "first token ms": middle([1e3 * each["first_token_s"]["p50"] for each in seen]),
        "per token ms": middle([1e3 * each["per_token_s"]["p50"] for each in seen]),
        "p99 ms": middle([1e3 * each["per_token_s"]["p99"] for each in seen]),
        "p99 / p50": middle([each["per_token_s"]["p99"] / each["per_token_s"]["p50"] for each in seen], 3),
        "failed": sum(sum(each["failed"].values()) for each in seen),
    }


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, clients=16, requests=100, rounds=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompt-tokens", default="16-192", metavar="LOW-HIGH")
    parser.add_argument("--new-tokens", default="8-96", metavar="LOW-HIGH")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:-1]) or set(cores))  # the last one is the servers'
    model = llama_of(args, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        byte_tokenizer(args.vocab).save_pretrained(folder / "model")
        servers = start_servers(folder, args, cores[-1])
        seen: dict[str, list[dict[str, Any]]] = {each: [] for each in servers}
        try:
            for number in range(args.rounds + 1):  # the first one warms up
                for each, server in servers.items():
                    count = args.requests if number else max(args.clients, args.requests // 4)
                    figures = load(server, args, requests=count, seed=number)
                    if number:
                        seen[each].append(figures)
        finally:
            for server in servers.values():
                server.stand_still(False)
                server.end()
    rows = [row_of(each, found, seen["colossalai"]) for each, found in seen.items()]
    report("Serving over HTTP, one core", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
