"""Overhead of the watchdog: step time of a tensor-parallel GPT with it and without it, in one run.

    colossalai run --nproc_per_node 2 benchmarks/watchdog.py --json benchmarks/results/watchdog.json

Every round runs some steps without the watchdog, some with the default interval between its checks (5 s, the
longest), and some with a timeout of a second (checks every 0.1 s), in an order that rotates. The ratio of two
variants of the same round is nearly free of the machine's noise. "Without" also removes the code of the
watchdog from the step: the names of its sections, and the recording of messages. torch's flight recorder is
on in all variants, as by default in torch.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness.rounds import compare, report
from torch import nn
from torch.distributed import distributed_c10d

import colossalai
from colossalai.communication import ledger
from colossalai.context import Config
from colossalai.context._supervision import start_watching, stop_watching
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.monitor._last_calls import MessageRecord, SignatureRecord
from colossalai.monitor._sections import section
from colossalai.monitor._wait_timer import WaitTimer

CONFIG = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "watchdog": False, "matmul": "torch"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "default": {"timeout": 1620.0},
    "timeout 1 s": {"timeout": 1.0, "action": "report"},
}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Steps:
    """Training steps of a small GPT.

    Args:
        batch: Number of sequences.
        seq: Number of tokens in a sequence.
    """

    def __init__(self, *, batch: int, seq: int) -> None:
        shape = GPTConfig(
            vocab_size=2048,
            max_position_embeddings=seq,
            hidden_size=256,
            num_layers=6,
            num_attention_heads=8,
            embedding_dropout=0.0,
            dropout=0.0,
            attention_dropout=0.0,
        )
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self._engine, *_ = colossalai.initialize(model, optimizer, loss_of, verbose=False)
        tokens = torch.randint(shape.vocab_size, (batch, seq + 1))
        self._batch = (tokens[:, :-1], tokens[:, 1:])

    def run(self, count: int) -> float:
        """Return the mean seconds of `count` steps."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self._engine.zero_grad()
            loss = self._engine.criterion(self._engine(self._batch[0]), self._batch[1])
            self._engine.backward(loss)
            self._engine.step()
        return (time.perf_counter() - start) / count


def _noop(*_args: object) -> None:
    """Empty replacement for the watchdog's code in a step."""


@contextmanager
def run_watchdog(options: dict[str, Any] | None, number: int) -> Iterator[None]:
    """Run the watchdog within the block, or remove its code from the step."""
    if options is None:
        with (
            mock.patch.object(section, "__enter__", _noop),
            mock.patch.object(section, "__exit__", _noop),
        ):
            yield
        return
    store = dist.PrefixStore(f"benchmark/{number}", distributed_c10d._get_default_store())
    start_watching(
        Config(watchdog=options, matmul="torch"),
        store,
        rank=dist.get_rank(),
        world_size=2,
        axis_of=lambda _ranks: "tp",
        device=torch.device("cpu"),
        verbose=False,
    )
    try:
        yield
    finally:
        dist.barrier()  # all ranks stop together: a missing rank would be reported
        stop_watching()


def microseconds(call: Callable[[], Any], *, count: int = 2000) -> float:
    """Return the median time of a call."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(1e6 * statistics.median(seconds), 2)


def share_of_pieces(step_s: float, *, num_sections: int, num_backwards: int) -> dict[str, float]:
    """Return the time of each part and their share of a step, which are less noisy than the ratios."""

    def enter() -> None:
        with _SECTION:
            pass

    record = MessageRecord()
    progress = WaitTimer(record, watches_sections=True)
    pieces = {
        "section_us": microseconds(enter),
        "look_us": microseconds(lambda: progress.look(1.0), count=300),
        **signature_pieces(),
    }
    signature = pieces["noted_us"] - pieces["unnoted_us"]
    num_calls = 2 * num_backwards  # one call in forward and one in backward
    in_step = 1e-6 * (num_sections * pieces["section_us"] + num_calls * signature)
    looks = 1e-6 * pieces["look_us"] / 0.1  # per second; ten checks for a timeout of a second
    return pieces | {"share_percent": round(100 * (in_step / step_s + looks), 4)}


def signature_pieces() -> dict[str, float]:
    """Return the microseconds of a collective's call with and without recording, and of an all-reduce."""
    values = torch.ones(8, 128)
    group, options = distributed_c10d._get_default_group(), dist.AllreduceOptions()
    pieces = {"all_reduce_us": microseconds(lambda: dist.all_reduce(values), count=500)}
    with mock.patch.object(dist.ProcessGroup, "allreduce", _noop):
        pieces["unnoted_us"] = microseconds(lambda: group.allreduce([values], options))
        record = SignatureRecord()
        with record.recording():
            pieces["noted_us"] = microseconds(lambda: group.allreduce([values], options))
        record.close()
    return pieces


_SECTION = section("nothing")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a round (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    colossalai.launch_from_torch(config=CONFIG, verbose=False)
    steps = Steps(batch=args.batch, seq=args.seq)
    with ledger() as book:
        steps.run(1)
    names = list(VARIANTS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, args.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            with run_watchdog(VARIANTS[name], number=number * len(names) + names.index(name)):
                seconds = steps.run(args.steps)
            if number >= 0:
                times[name].append(seconds)
    pieces = share_of_pieces(statistics.median(times["without"]), num_sections=3, num_backwards=book.count())
    if dist.get_rank() == 0:
        print(pieces)
    report(
        f"Watchdog, tensor-parallel GPT, {book.count()} collectives in a step",
        compare(times, baseline="without"),
        settings=vars(args) | {"collectives": book.count()} | pieces,
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
