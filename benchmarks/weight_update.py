"""New weights for a model that is served: seconds and GB/s against a plain copy of the same bytes.

    python benchmarks/weight_update.py --json benchmarks/results/weight_update.json

All variants use one random Llama. "copy" copies every tensor into another of the same shape, a lower bound
for a trainer that shares no memory. "read" reads the bytes of the file into allocated memory. The others are
`LLM.update_weights` of an engine with packed weights: from the model in memory, as after each step of a
trainer; from a folder of safetensors; and the same with weights in 8 bits. `seconds` is the median over the
rounds, `gb_per_s` the bytes of the model's parameters divided by it.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import compare, report, time_rounds
from transformers import LlamaForCausalLM

from colossalai.inference import LLM


def model_of(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a random model."""
    return llama_of(args, heads=args.heads, kv_heads=args.heads // 2, dtype=args.dtype)


def rows_of(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all variants."""
    model = model_of(args)
    model.save_pretrained(folder)
    values = list(model.state_dict().values())
    others = [torch.empty_like(value) for value in values]
    num_bytes = sum(value.nbytes for value in values)
    file = Path(folder, "model.safetensors")
    place = bytearray(file.stat().st_size)
    plain, quantized = (LLM(folder, kv_memory=2**26, quantize=way) for way in (None, "int8"))

    def copy() -> None:
        for value, other in zip(values, others, strict=True):
            other.copy_(value)

    def read() -> None:
        with file.open("rb", buffering=0) as opened:
            opened.readinto(place)

    steps = {
        "copy": copy,
        "read": read,
        "from memory": lambda: plain.update_weights(model),
        "from a folder": lambda: plain.update_weights(folder),
        "int8, from memory": lambda: quantized.update_weights(model),
        "int8, from a folder": lambda: quantized.update_weights(folder),
    }
    times = time_rounds(steps, rounds=args.rounds, warmup=1)
    found = []
    for row in compare(times, baseline="copy"):
        seconds = statistics.median(times[row["variant"]])
        speed = round(num_bytes / seconds / 1e9, 2)
        found.append({**row, "seconds": round(seconds, 4), "gb_per_s": speed, "bytes": num_bytes})
    return found


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, heads=10, rounds=9)
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(folder, args)
    report("New weights of a small Llama, one thread", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
