"""Soak test of `colossalai serve`: thousands of requests with faults, disconnections and stalled clients.

    python benchmarks/soak.py
    python benchmarks/soak.py --requests 1000 --json results.json

The server is a process with a tiny random Llama, a cache that is too small for all running requests, and a
short queue. Clients are processes; two of them are stopped for some seconds (SIGSTOP). A tenth of the
requests is malformed, and in another tenth the client disconnects. At the end both sides are compared: every
request has one end in the client's records, one line in the server's log, and one outcome in /metrics; no
block and no file descriptor is leaked, and memory does not grow. Differences are printed, and the exit code
is 1.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from harness.rounds import report
from rich.progress import Progress

CLIENTS = Path(__file__).parent / "harness" / "soak_clients.py"
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
START_S, SETTLE_S, END_S = 180.0, 60.0, 90.0
OUTCOMES = ("finished", "aborted", "rejected", "failed")


def save_model(folder: Path) -> None:
    """Write a tiny random Llama with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog, and "] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class SoakedServer:
    """`colossalai serve` in a separate process.

    Args:
        folder: Folder of the model; the log is written next to it.
        words: Further arguments of the command.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = folder.parent / "log"
        command = [sys.executable, "-m", "colossalai.cli", "serve", str(folder), "--port", "0", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.info = psutil.Process(self.process.pid)
        self.port = self._wait_for_port()

    @property
    def log(self) -> str:
        """Output of the server so far."""
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by their names and labels but the model's."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=START_S) as answer:
            text = answer.read().decode()
        found: Counter[str] = Counter()
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[re.sub(r'model="[^"]*",?|\{\}', "", name).replace("{}", "")] += float(value)
        return dict(found)

    def settle(self) -> dict[str, float]:
        """Wait until all received requests have ended, and return the metrics."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = self.metrics()
            under_way = found["colossalai_requests_running"] + found["colossalai_requests_queued"]
            ended = sum(found[outcome_name(each)] for each in OUTCOMES)
            if not under_way and ended == found["colossalai_requests_received_total"]:
                return found
            if time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def num_files(self) -> int:
        """Return the number of open file descriptors, after idle connections have been closed."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and any(
            each.status != psutil.CONN_LISTEN for each in self.info.net_connections()
        ):
            time.sleep(0.1)
        return self.info.num_fds()

    def end(self) -> int:
        """Terminate the server, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def _wait_for_port(self) -> int:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"serving on http://[\d.]+:(\d+)", self.log)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.1)
        return int(found[1])


def outcome_name(outcome: str) -> str:
    return f'colossalai_requests_total{{outcome="{outcome}"}}'


def soak(
    server: SoakedServer, args: argparse.Namespace, *, requests: int, seed: int, title: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """Send requests; return the ends that clients saw, and the server's memory at each of them."""
    ends: list[dict[str, Any]] = []
    memory: list[int] = []
    lock = threading.Lock()
    processes = []
    for number in range(args.processes):
        told = {
            "port": server.port,
            "requests": requests // args.processes + (number < requests % args.processes),
            "clients": max(1, args.clients // args.processes),
            "seed": f"{seed}-{number}",
        }
        command = [sys.executable, str(CLIENTS), json.dumps(told)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    with Progress() as progress:
        bar = progress.add_task(title, total=requests)

        def listen(process: subprocess.Popen[str]) -> None:
            assert process.stdout is not None
            for line in process.stdout:
                rss = server.info.memory_info().rss
                with lock:
                    ends.append(json.loads(line))
                    memory.append(rss)
                progress.advance(bar)

        threads = [threading.Thread(target=listen, args=(process,)) for process in processes]
        for thread in threads:
            thread.start()
        for pause in range(args.pauses):
            while len(ends) < requests * (pause + 1) // (args.pauses + 1) and any(
                thread.is_alive() for thread in threads
            ):
                time.sleep(0.02)
            stopped = processes[pause % args.processes]
            if stopped.poll() is None:
                stopped.send_signal(signal.SIGSTOP)
                time.sleep(args.pause_s)
                stopped.send_signal(signal.SIGCONT)
        for thread in threads:
            thread.join()
    for process in processes:
        process.wait()
    return ends, memory


def faults(
    ends: Sequence[Mapping[str, Any]], before: Mapping[str, float], after: Mapping[str, float], log: str
) -> list[str]:
    """Return the differences between the clients' records, /metrics and the log."""
    found = [f"lost: {end}" for end in ends if end["end"] not in ("answered", "refused", "left")]
    count = Counter(end["end"] for end in ends)
    num_sent = sum(end["kind"] != "no http" for end in ends)  # not counted by the server
    came = {name: after[name] - before[name] for name in after if name in before}
    received = came["colossalai_requests_received_total"]
    ended = {outcome: came[outcome_name(outcome)] for outcome in OUTCOMES}
    refused = sum(end["end"] == "refused" and end["kind"] != "no http" for end in ends)
    lines = re.findall(r"((?:gen|cmpl|chatcmpl)-[0-9a-f]{32}) POST \S+ \S+ (\w+) ", log)
    checks = {
        "received equals sent": (received, num_sent),
        "outcomes add up": (sum(ended.values()), received),
        "nothing failed": (ended["failed"], 0),
        "finished and answered, except for disconnected clients": (
            ended["finished"] - count["answered"] + ended["aborted"] + ended["rejected"] - refused,
            count["left"],
        ),
        "a line for each": (len(lines), after["colossalai_requests_received_total"]),
        "one line for each": (len({name for name, _ in lines}), len(lines)),
        "no block is held": (after['colossalai_kv_blocks{state="used"}'], 0),
        "all blocks are there": (
            sum(after[f'colossalai_kv_blocks{{state="{state}"}}'] for state in ("free", "cached")),
            sum(before[f'colossalai_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")),
        ),
        "no traceback": (log.count("Traceback"), 0),
    }
    least = (ended["finished"] - count["answered"], ended["rejected"] - refused)
    if min(least) < 0:
        found.append(f"answers without a record in the server: {least}")
    logged = Counter(outcome for _, outcome in lines)
    checks["the log has the outcomes"] = (
        {outcome: float(logged[outcome]) for outcome in OUTCOMES},
        {outcome: after[outcome_name(outcome)] for outcome in OUTCOMES},
    )
    return found + [f"{name}: {seen}, not {due}" for name, (seen, due) in checks.items() if seen != due]


def rows_of(ends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ends and the answer times of each kind of request."""
    rows = []
    for kind in ("all", *sorted({end["kind"] for end in ends if end["status"] == 200}), "refused"):
        chosen = [end for end in ends if kind in ("all", end["kind"], end["end"])]
        count = Counter(end["end"] for end in chosen)
        answered = [end for end in chosen if end["end"] == ("refused" if kind == "refused" else "answered")]
        seconds = sorted(end["seconds"] for end in answered)
        firsts = sorted(end["first_s"] for end in answered)
        rows.append(
            {
                "kind": kind,
                "sent": len(chosen),
                **{name: count[name] for name in ("answered", "refused", "left", "failed", "lost")},
                "p50_ms": _percentile(seconds, 50),
                "p99_ms": _percentile(seconds, 99),
                "first_p50_ms": _percentile(firsts, 50),
                "first_p99_ms": _percentile(firsts, 99),
            }
        )
    return rows


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return None
    return round(1e3 * statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("requests", 10_000), ("clients", 64), ("processes", 4), ("pauses", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warm-up", type=int, default=500, help="requests before anything is measured")
    parser.add_argument("--pause-s", type=float, default=5.0)
    parser.add_argument("--most-growth", type=float, default=0.05, help="of memory, last third to first")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny"
        save_model(folder)
        words = (
            "--kv-memory",
            "128KiB",
            "--max-running",
            "16",
            "--max-queue",
            "64",
            "--request-timeout",
            "60",
        )
        server = SoakedServer(folder, *words)
        try:
            before = server.metrics()
            warm, _ = soak(server, args, requests=args.warm_up, seed=args.seed + 1, title="warm-up")
            files = server.num_files()
            began = time.monotonic()
            ends, memory = soak(server, args, requests=args.requests, seed=args.seed, title="requests")
            seconds = time.monotonic() - began
            after = server.settle()
            wrong = faults([*warm, *ends], before, after, server.log)
            files_after = server.num_files()
        finally:
            code = server.end()
    third = max(1, len(memory) // 3)
    growth = statistics.mean(memory[-third:]) / statistics.mean(memory[:third]) - 1
    if files_after != files:
        wrong.append(f"file descriptors: {files_after}, not {files}")
    if growth > args.most_growth:
        wrong.append(f"memory has grown by {100 * growth:.1f} %")
    if len(ends) != args.requests:
        wrong.append(f"ends: {len(ends)}, not {args.requests}")
    if code:
        wrong.append(f"the server ended with {code}")
    rows = rows_of(ends)
    kept = {name: after[name] for name in after if "bucket" not in name and "seconds" not in name}
    rows[0] |= {"per_s": round(len(ends) / seconds, 1), "rss_growth": round(growth, 4), "faults": len(wrong)}
    for row in rows[1:]:
        row |= dict.fromkeys(("per_s", "rss_growth", "faults"))
    tenth = max(1, len(memory) // 10)
    mib = [round(statistics.mean(memory[at : at + tenth]) / 2**20, 1) for at in range(0, len(memory), tenth)]
    settings = {
        **vars(args),
        "server": words,
        "rss_mib_of_tenths": mib,
        "metrics": kept,
        "files": [files, files_after],
    }
    report("Soak of colossalai serve", rows, settings=settings, json_file=args.json)
    if wrong:
        sys.exit("\n".join(["differences:", *wrong[:20], f"{len(wrong)} in all"]))


if __name__ == "__main__":
    main()
