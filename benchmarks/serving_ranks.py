"""Serving over two ranks: tokens per second against one process with one thread.

    python benchmarks/serving_ranks.py
    python benchmarks/serving_ranks.py --json results.json

One random Llama (by default of 65M parameters) in a folder, greedy answers to prompts of 64 tokens, 64 new
ones, with batches of 1 and 16. The variants are one process, two ranks that share each layer (tp), and two
stages (pp). Each rank has one thread, and the machine two cores. Variants take turns in every round; figures
are medians. "step" is the time of one token for all requests without prompts: the difference to a run with
twice the tokens.
"""

import statistics
import tempfile
import time
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import report

from colossalai.inference import LLM, SamplingParams

WAYS: dict[str, dict[str, int]] = {"one process": {}, "tp 2": {"tp_size": 2}, "pp 2": {"pp_size": 2}}


def seconds(llm: LLM, prompts: list[list[int]], num_new: int) -> float:
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=num_new, temperature=0))
    return time.perf_counter() - began


def main() -> None:
    parser = llama_parser(__doc__, batch=16, prompt=64, new=64, rounds=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = llama_of(args, kv_heads=args.hidden // 64, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options: dict[str, Any] = {"dtype": args.dtype, "max_running": args.batch, "has_prefix_cache": False}
        llms = {name: LLM(folder, kv_memory=2**29, **options, **ranks) for name, ranks in WAYS.items()}
        found: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _ in range(args.rounds + 1):
            for batch in (1, args.batch):
                prompts = torch.randint(0, args.vocab, (batch, args.prompt)).tolist()
                for name, llm in llms.items():
                    short, long = (seconds(llm, prompts, count) for count in (args.new, 2 * args.new))
                    rate, step = batch * args.new / short, (long - short) / args.new
                    found.setdefault((batch, name), []).append((rate, step))
        for llm in llms.values():
            llm.close()
    rows = []
    for (batch, name), values in found.items():
        ours, alone = values[1:], found[batch, "one process"][1:]  # the first round warms up
        shares = [mine[1] / other[1] for mine, other in zip(ours, alone, strict=True)]
        gains = [mine[0] / other[0] for mine, other in zip(ours, alone, strict=True)]
        rows.append(
            {
                "requests": batch,
                "ranks": name,
                "tokens/s": round(statistics.median(rate for rate, _ in ours), 1),
                "of one": round(statistics.median(gains), 3),
                "step_ms": round(statistics.median(step for _, step in ours) * 1e3, 2),
                "step of one": round(statistics.median(shares), 3),
            }
        )
    report("Serving on two cores", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
