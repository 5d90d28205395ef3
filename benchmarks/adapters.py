"""Throughput of a small Llama with LoRA adapters: the overhead of unused adapters, and of several per batch.

    python benchmarks/adapters.py --json benchmarks/results/adapters.json

Every variant answers the same requests (64-token prompts, 32 new tokens, no prefix cache) in one process.
`tokens_per_s` is the median over the rounds of tokens per second of CPU time, prompts included. The adapters
cover all seven linear layers of each block, with a rank of 16. "none" has no adapters. "loaded" has four that
no request uses. All requests use the same adapter in "one", four adapters in turn in "four", and every other
request uses one in "half".
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import compare, report, time_rounds
from safetensors.torch import save_file

from colossalai.inference import LLM, SamplingParams

LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NAMES = ("a", "b", "c", "d")


def save(folder: str, args: argparse.Namespace) -> None:
    """Save a random model and adapters of it."""
    model = llama_of(args, heads=args.heads, kv_heads=args.heads // 2)
    model.save_pretrained(f"{folder}/base")
    said = {"peft_type": "LORA", "r": args.rank, "lora_alpha": args.rank}
    said["target_modules"] = [name.rpartition(".")[2] for name in LAYERS]
    for name in NAMES:
        tensors = {}
        for layer, part in model.named_modules():
            if layer.endswith(LAYERS) and isinstance(part, torch.nn.Linear):
                start = f"base_model.model.{layer}.lora_"
                tensors[f"{start}A.weight"] = torch.randn(args.rank, part.in_features) * 0.02
                tensors[f"{start}B.weight"] = torch.randn(part.out_features, args.rank) * 0.02
        Path(folder, name).mkdir()
        Path(folder, name, "adapter_config.json").write_text(json.dumps(said))
        save_file(tensors, f"{folder}/{name}/adapter_model.safetensors")


def answer(
    llm: LLM, prompts: list[list[int]], num_tokens: int, asked: tuple[str | None, ...]
) -> Callable[[], None]:
    """Return a function that answers the prompts, with the adapters of `asked` in turn."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    names = [asked[number % len(asked)] for number in range(len(prompts))]

    def run() -> None:
        llm.generate(prompts, params, adapter=names)

    return run


def rows_of(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all variants."""
    found: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        settings: dict[str, Any] = {"dtype": dtype, "kv_memory": 2**28, "has_prefix_cache": False}
        plain = LLM(f"{folder}/base", **settings)
        adapted = LLM(f"{folder}/base", adapters={name: f"{folder}/{name}" for name in NAMES}, **settings)
        for num_requests in args.requests:
            prompts = torch.randint(0, args.vocab, (num_requests, args.prompt)).tolist()
            steps = {
                "none": answer(plain, prompts, args.new, (None,)),
                "loaded": answer(adapted, prompts, args.new, (None,)),
                "one": answer(adapted, prompts, args.new, ("a",)),
            }
            if num_requests > 1:
                steps["half"] = answer(adapted, prompts, args.new, ("a", None))
                steps["four"] = answer(adapted, prompts, args.new, NAMES)
            times = time_rounds(steps, rounds=args.rounds, warmup=1, clock=time.process_time)
            for row in compare(times, baseline="none"):
                seconds = statistics.median(times[row["variant"]])
                speed = round(num_requests * args.new / seconds, 1)
                found.append({"dtype": dtype, "requests": num_requests, **row, "tokens_per_s": speed})
    return found


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, heads=10, rank=16, prompt=64, new=32, rounds=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, args)
        rows = rows_of(folder, args)
    report("Serving a small Llama with adapters, one thread", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
