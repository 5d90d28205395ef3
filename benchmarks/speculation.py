"""Speculative decoding: tokens per second with and without drafts, for one request and for several.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --batch 16 --new 128 --json results.json

One random Llama (by default of 65M parameters), one thread, prompts of 64 random tokens. Three texts:

- "loops": greedy. The greedy text of a random model eventually repeats, so that prompt lookup finds more and
  more of it, as in text with quotations.
- "does not repeat": sampled with temperature 1 from a flat distribution; prompt lookup finds wrong tokens
  only.
- "agreeing model": greedy, with the first layer of the model as the draft model. The outputs of the other
  layers are multiplied by a small number, so that both mostly agree: the best case of a draft model.

The variants take turns in every round; "with / without" is the median over rounds of the ratio of tokens per
second, and "drafted" and "accepted" are counts per token of the text.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness.llama import llama_of, llama_parser
from harness.rounds import quartiles, report
from transformers import LlamaForCausalLM

from colossalai.inference import LLM, RequestOutput, SamplingParams

LOADS = {
    "loops": ("plain", "ngram"),
    "does not repeat": ("plain", "ngram"),
    "agreeing model": ("plain faint", "small model"),
}


def build(args: argparse.Namespace, num_layers: int) -> LlamaForCausalLM:
    return llama_of(args, layers=num_layers, dtype=args.dtype)


@torch.no_grad()
def save_models(args: argparse.Namespace, folder: Path) -> None:
    """Save the model, a copy with weak layers after the first one, and the first layer alone."""
    whole = build(args, args.layers)
    whole.save_pretrained(folder / "whole")
    for layer in whole.model.layers[1:]:
        layer.self_attn.o_proj.weight.mul_(args.faint)
        layer.mlp.down_proj.weight.mul_(args.faint)
    whole.save_pretrained(folder / "faint")
    small = build(args, 1)
    small.load_state_dict(whole.state_dict(), strict=False)
    small.save_pretrained(folder / "small")


def engines(args: argparse.Namespace, folder: Path) -> dict[str, LLM]:
    common: dict[str, Any] = {"dtype": args.dtype, "max_running": args.batch, "kv_memory": 2**29}
    return {
        "plain": LLM(folder / "whole", **common),
        "ngram": LLM(folder / "whole", **common, speculate=f"ngram:{args.drafted}"),
        "plain faint": LLM(folder / "faint", **common),
        "small model": LLM(folder / "faint", **common, speculate=f"{folder / 'small'}:{args.drafted}"),
    }


def measure(args: argparse.Namespace, llms: dict[str, LLM]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return the figures of each round by load and variant; the texts of a round are compared."""
    generator = torch.Generator().manual_seed(1)
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number in range(args.rounds + 1):  # the first one warms up
        for load, variants in LOADS.items():
            temperature = 1.0 if load == "does not repeat" else 0.0
            for batch in (1, args.batch):
                prompts = torch.randint(0, args.vocab, (batch, args.prompt), generator=generator).tolist()
                params = [
                    SamplingParams(max_tokens=args.new, temperature=temperature, seed=seed)
                    for seed in range(batch)
                ]
                one: dict[str, Any] = {}
                texts: list[list[RequestOutput]] = []
                for variant in variants:
                    before, began = llms[variant].engine.stats(), time.perf_counter()
                    texts.append(llms[variant].generate(prompts, params))
                    rate = batch * args.new / (time.perf_counter() - began)
                    after = llms[variant].engine.stats()
                    one["with" if "tokens/s" in one else "tokens/s"] = rate
                    for name in ("draft_tokens", "accepted_draft_tokens"):
                        one[name] = (getattr(after, name) - getattr(before, name)) / (batch * args.new)
                one["equal"] = sum(a.token_ids == b.token_ids for a, b in zip(*texts, strict=True)) / batch
                if number:
                    found.setdefault((batch, load), []).append(one)
    return found


def main() -> None:
    parser = llama_parser(__doc__, batch=16, prompt=64, new=128, drafted=4, rounds=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--faint", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_models(args, Path(folder))
        found = measure(args, engines(args, Path(folder)))
    rows = []
    for (batch, load), rounds in found.items():
        low, middle, high = quartiles(one["with"] / one["tokens/s"] for one in rounds)
        median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        rows.append(
            {
                "requests": batch,
                "text": load,
                "tokens/s without": round(median["tokens/s"], 1),
                "with": round(median["with"], 1),
                "with / without": round(middle, 3),
                "quartiles": [round(low, 3), round(high, 3)],
                "drafted": round(median["draft_tokens"], 3),
                "accepted": round(median["accepted_draft_tokens"], 3),
                "equal texts": round(median["equal"], 3),
            }
        )
    report("Speculation, one thread", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
