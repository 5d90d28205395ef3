"""What the watchdog costs: step time of a tensor-parallel GPT with it and without it, in one run.

    colossalai run --nproc_per_node 2 benchmarks/watchdog.py --json benchmarks/results/watchdog.json

Every round runs some steps without the watchdog, some with the longest pause between its looks (5 s, that of
the default), and some with a timeout of a second (0.1 s between looks), in an order that rotates; the ratio
of two variants of the same round is nearly free of what else the machine does. "Without" is also without what
stands in the code of a step for the watchdog: the names of its parts, and the recording of messages.
torch's flight recorder is on in all variants: torch has it on by default.
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
        batch: Sequences.
        seq: Tokens in a sequence.
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
        """Return the seconds of a step, the mean of some."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self._engine.zero_grad()
            loss = self._engine.criterion(self._engine(self._batch[0]), self._batch[1])
            self._engine.backward(loss)
            self._engine.step()
        return (time.perf_counter() - start) / count


def _nothing(*_args: object) -> None:
    """Stand for what a step has for the watchdog."""


@contextmanager
def watched(options: dict[str, Any] | None, number: int) -> Iterator[None]:
    """Within the block the watchdog runs, or nothing of it is there."""
    if options is None:
        with (
            mock.patch.object(section, "__enter__", _nothing),
            mock.patch.object(section, "__exit__", _nothing),
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
        dist.barrier()  # nobody may miss a rank that has left
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
    """Return what the pieces cost, one by one, and their share of a step; the ratios above are noisier."""

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
    num_calls = 2 * num_backwards  # each backward has a forward
    in_step = 1e-6 * (num_sections * pieces["section_us"] + num_calls * signature)
    looks = 1e-6 * pieces["look_us"] / 0.1  # per second; ten looks for a timeout of a second
    return pieces | {"share_percent": round(100 * (in_step / step_s + looks), 4)}


def signature_pieces() -> dict[str, float]:
    """Return what a collective costs a caller without and with a note of it, and what an all-reduce takes."""
    values = torch.ones(8, 128)
    group, options = distributed_c10d._get_default_group(), dist.AllreduceOptions()
    pieces = {"all_reduce_us": microseconds(lambda: dist.all_reduce(values), count=500)}
    with mock.patch.object(dist.ProcessGroup, "allreduce", _nothing):
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
            with watched(VARIANTS[name], number=number * len(names) + names.index(name)):
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
