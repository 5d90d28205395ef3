"""Sampling of the next tokens of a batch: `draw_tokens`, and the sampling of `generate` of transformers.

    python benchmarks/sampling.py --json benchmarks/results/sampling.json

Rows of float32 logits, normally distributed with the deviation of the case, on one thread; times are CPU
times of the thread. `generate_us` is the time of transformers' processors for the same settings, softmax and
`multinomial`, or `argmax`. It supports one setting for all rows; the column is empty for other cases. `build`
is the time to create the `Draws` of the batch from 16 SamplingParams.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness.rounds import report, time_rounds
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from colossalai.inference import SamplingParams
from colossalai.inference.sampling import Draws, draw_of, draw_tokens, uniform_of

GREEDY = SamplingParams(temperature=0)
CASES: dict[str, tuple[SamplingParams, float]] = {
    "greedy": (GREEDY, 3),
    "greedy, logprobs 5": (SamplingParams(temperature=0, logprobs=5), 3),
    "greedy, half masked": (GREEDY, 3),
    "greedy, repetition penalty": (SamplingParams(temperature=0, repetition_penalty=1.2), 3),
    "temperature": (SamplingParams(temperature=0.7), 3),
    "top_k 50": (SamplingParams(top_k=50), 3),
    "top_k 1000": (SamplingParams(top_k=1000), 3),
    "top_p 0.9, peaked": (SamplingParams(top_p=0.9), 6),
    "top_p 0.9, flat": (SamplingParams(top_p=0.9), 0.3),
    "top_k 50, top_p 0.9": (SamplingParams(top_k=50, top_p=0.9), 3),
    "min_p 0.1": (SamplingParams(min_p=0.1), 3),
    "one row top_p, others greedy": (SamplingParams(top_p=0.9), 6),
}
TOKENS = tuple(range(0, 4000, 8))


def draws(name: str, *, rows: int, vocab: int) -> Draws:
    """Return the draws of a case's rows."""
    params = CASES[name][0]
    words = np.random.default_rng(0).integers(-(2**31), 2**31, size=-(-vocab // 32), dtype=np.int32)
    mask = words if "masked" in name else None
    return Draws.of(
        [
            draw_of(
                params if number == 0 or not name.startswith("one row") else GREEDY,
                prompt_token_ids=[token % vocab for token in TOKENS],
                answer_token_ids=[token % vocab for token in TOKENS[:100]],
                uniform=uniform_of(0, 0, number),
                mask=mask,
            )
            for number in range(rows)
        ]
    )


def generate_step(name: str, logits: torch.Tensor) -> Callable[[], Any] | None:
    """Return the sampling of `generate` for the logits of a step, or None for unsupported cases."""
    params = CASES[name][0]
    if params.logprobs is not None or "masked" in name or name.startswith("one row"):
        return None
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature not in (0, 1):
        processors.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(logits_process.MinPLogitsWarper(params.min_p))
    tokens = torch.tensor([TOKENS] * len(logits)) % logits.shape[1]
    if params.is_greedy:
        return lambda: processors(tokens, logits).argmax(-1)
    return lambda: torch.multinomial(processors(tokens, logits).softmax(-1), 1)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[8192, 128000], help="sizes (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="rows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for vocab in args.vocab:
        for name, (_, deviation) in CASES.items():
            logits = torch.randn(args.batch, vocab, generator=torch.Generator().manual_seed(0)) * deviation
            asked = draws(name, rows=args.batch, vocab=vocab)
            variants: dict[str, Callable[[], Any]] = {
                "ours": lambda logits=logits, asked=asked: draw_tokens(logits, asked),
                "build": lambda name=name, vocab=vocab: draws(name, rows=args.batch, vocab=vocab),
            }
            if peer := generate_step(name, logits):
                variants["generate"] = peer
            times = time_rounds(variants, rounds=args.rounds, warmup=3, clock=time.thread_time)
            row: dict[str, Any] = {"vocab": vocab, "case": name}
            for variant in ("ours", "build", "generate"):
                known = variant in times
                row[f"{variant}_us"] = round(1e6 * statistics.median(times[variant]), 1) if known else None
            rows.append(row)
    report(
        f"Drawing the tokens of {args.batch} rows, one thread",
        rows,
        settings=vars(args),
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
