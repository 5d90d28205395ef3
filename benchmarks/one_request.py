"""A single request: milliseconds per decode step, with row tables and without.

    python benchmarks/one_request.py
    python benchmarks/one_request.py --json results.json

A random Llama (by default of 65M parameters), one thread, a prompt of 64 tokens. The time of a step is the
additional time of an answer that is 64 tokens longer, divided by 64. Engines with and without tables take
turns in every round; "gain" is the median over the rounds of the time without tables over the time with them.
Times are processor times, which depend less on other processes. The number of products with tables is chosen
by a measurement at load, and logged.
"""

import statistics
import tempfile
import time

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import report

from colossalai.inference import LLM, SamplingParams

CASES = (("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8"))


def seconds_of_step(llm: LLM, prompt: list[int], num_new: int) -> float:
    """Return the processor seconds of one more token."""
    times = []
    for num_tokens in (1, 1 + num_new):
        began = time.process_time()
        llm.generate([prompt], SamplingParams(max_tokens=num_tokens, temperature=0))
        times.append(time.process_time() - began)
    return (times[1] - times[0]) / num_new


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, batch=1, prompt=64, new=64, rounds=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype, quantize in CASES:
        generator = torch.Generator().manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            llama_of(args, dtype=dtype).save_pretrained(folder)
            llms = {
                name: LLM(
                    folder,
                    dtype=dtype,
                    quantize=quantize,
                    kv_memory=2**28,
                    has_prefix_cache=False,
                    has_row_tables=has_tables,
                )
                for name, has_tables in (("without", False), ("with", True))
            }
        found: dict[str, list[float]] = {name: [] for name in llms}
        for number in range(args.rounds + 1):
            prompt = torch.randint(0, args.vocab, (args.prompt,), generator=generator).tolist()
            for name, llm in llms.items():
                seconds = seconds_of_step(llm, prompt, args.new)
                if number:  # the first round warms up
                    found[name].append(seconds)
        gains = [slow / fast for slow, fast in zip(found["without"], found["with"], strict=True)]
        rows.append(
            {
                "dtype": dtype,
                "quantize": quantize or "-",
                **{f"ms {name}": round(1e3 * statistics.median(times), 2) for name, times in found.items()},
                "gain": round(statistics.median(gains), 2),
            }
        )
    report("One request alone, one thread", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
