"""The chat methods compared with TRL's: learning of sums, time and memory of steps, share of generation.

    python benchmarks/chat.py --trl envs/trl/bin/python --json benchmarks/results/chat.json --plot sums.png
    python benchmarks/chat.py --part ppo --json benchmarks/results/chat_ppo.json
    python benchmarks/chat.py --part step --trl envs/trl/bin/python
    python benchmarks/chat.py --part memory

Each run of a side is a separate process with one thread. Both sides have the same weights, rows, reward,
batch size, learning rate and gradient clipping, and compute in float32 without recomputation. Times are CPU
times of a process. They are medians over all steps but the first; `whole_ms` is the mean over all steps, with
the preparation before the first. `ratio` is relative to TRL's step, the median over the rounds.

- `sums`: GRPO on `a+b=` of single digits. A Llama of 0.3M parameters (one layer) is pretrained on the
  training sums as texts, at the same rate, in batches of 8; neither stage sees the held-out sums. The reward
  is 1 for the exact answer; 300 steps of 64 answers. `start` and `end` are rewards on the held-out sums: the
  probability of the exact answer at temperature 1. Each seed has its own split, base model and run. Goals:
  not below TRL's by more than the spread of the seeds (lowest to highest end), and a rise of 0.2.
- `ppo`: the same with PPO, one answer to each of 64 prompts, a critic that is initialized with the base
  model's layers, and no penalty. TRL 1.16 has no PPO. Goal: a rise of 0.1.
- `step`: GRPO with a Llama of 5M parameters, 8 prompts of 32 tokens, 8 answers of 64 tokens. Goal: 0.5x.
- `generation`: 16 prompts of 16 to 64 tokens, 8 answers of 8 to 160 each. The engine generates them; in the
  same steps, `generate` of transformers does so from the same weights, as one batch with left padding.
  Answers have random lengths, so sides are compared per token: `engine_faster`, and `step_ratio`, the
  engine's step over the other one. Goal: 3x faster.
- `sft`, `dpo`: 16 texts, or 8 comparisons, with 64 tokens of prompt and 64 of answer, without padding. TRL's
  DPO runs the reference model in each step. With "reference first" it runs before training, as in this
  package, and its time is part of `whole_ms`. The Llama of 5M parameters has 4 layers with 4,096 tokens, and
  6 layers with 80. Goal: 0.8x.
- `memory`: bytes of a policy with adapters (LoRA of all linear layers) that is its own reference, compared
  with two models; computed from the shapes alone. Goal: 0.52x.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.chat_base import LETTERS, base_of_sums, larger_llama, tokenizer
from harness.rounds import report

HARNESS = Path(__file__).parent / "harness"

OURS, THEIRS = "colossalai", "trl"
SCRIPTS = {OURS: "chat_sides.py", THEIRS: "chat_trl.py"}
Found = dict[str, Any]


def run_side(side: str, job: Found, args: argparse.Namespace) -> Found:
    """Run one side in a separate process; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({"out": folder, **job}))
        python = args.trl if side == THEIRS else sys.executable
        # A separate cache: TRL's trainers would reuse the results of earlier runs.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": folder}
        done = subprocess.run(
            [python, str(HARNESS / SCRIPTS[side]), str(path)], env=env, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{side} ended with {done.returncode}: {done.stderr[-2000:]}")
        found: Found = json.loads(path.with_suffix(".told.json").read_text())
        return found


def sides_of(args: argparse.Namespace) -> list[str]:
    return [OURS, *([THEIRS] if args.trl else [])]


def learn_sums(args: argparse.Namespace) -> tuple[list[Found], dict[str, list[Found]]]:
    """Return a row for each side, and the curves of the held-out reward."""
    is_ppo = args.part == "ppo"
    sides = [OURS] if is_ppo else sides_of(args)
    found: dict[str, list[Found]] = {name: [] for name in sides}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            base = {"steps": args.sft_steps, "rate": args.lr, "num_train": args.train_sums, "seed": seed}
            start = base_of_sums(folder, **base)
            job = {"part": args.part, "base": folder, "seed": seed, "num_train": args.train_sums}
            job |= {"steps": args.steps, "lr": args.lr, "every": max(args.steps // 12, 1)}
            job |= {"group": args.group, "iterations": args.iterations}
            job["prompts"] = args.prompts * args.group if is_ppo else args.prompts
            for name in sides:
                found[name].append(run_side(name, job, args) | {"start": start["test"]})
                print(
                    f"seed {seed}, {name}: {start['test']:.3f} .. {found[name][-1]['curve'][-1][1]:.3f}",
                    flush=True,
                )
    rows = []
    for name, runs in found.items():
        starts, ends = [each["start"] for each in runs], [each["curve"][-1][1] for each in runs]
        rows.append(
            {
                "side": name,
                "start": round(statistics.mean(starts), 3),
                "end": round(statistics.mean(ends), 3),
                "rise": round(statistics.mean(ends) - statistics.mean(starts), 3),
                "ends": [round(min(ends), 3), round(max(ends), 3)],
                "training_reward": round(
                    statistics.mean(statistics.mean(each["rewards"][-50:]) for each in runs), 3
                ),
                "step_ms": round(statistics.median(each["step_ms"] for each in runs), 1),
                "generating_ms": round(statistics.median(each["generating_ms"] for each in runs), 1),
            }
        )
    return rows, {"curve": _curves(found)}


def _curves(found: dict[str, list[Found]]) -> list[Found]:
    """Return the mean held-out reward of each side by step, and its range over the seeds."""
    first = next(iter(found.values()))[0]
    rows: list[Found] = []
    for place, step in enumerate([0, *(step for step, _ in first["curve"])]):
        row: Found = {"steps": step}
        for name, runs in found.items():
            values = [each["start"] if place == 0 else each["curve"][place - 1][1] for each in runs]
            row[name] = round(statistics.mean(values), 3)
            row[f"{name}_range"] = [round(min(values), 3), round(max(values), 3)]
        rows.append(row)
    return rows


def draw(rows: Sequence[Found], file: str) -> None:
    """Plot the held-out rewards over the steps, with the range of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [each["steps"] for each in rows]
    for name in (key for key in rows[0] if f"{key}_range" in rows[0]):
        axes.plot(steps, [each[name] for each in rows], label=name)
        low, high = zip(*(each[f"{name}_range"] for each in rows), strict=True)
        axes.fill_between(steps, low, high, alpha=0.2)
    axes.set_xlabel("steps of 64 answers")
    axes.set_ylabel("reward of held-out sums")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def time_steps(args: argparse.Namespace) -> list[Found]:
    """Return a row with step times for each side and model."""
    job: Found = {"part": args.part, "steps": args.timed, "lr": 1e-5, "group": args.group, "rows": args.rows}
    models: dict[str, Found] = {"80 tokens": {"layers": args.layers}}
    if args.part == "step":
        job |= {"prompts": args.prompts, "prompt_tokens": [32, 32], "new_tokens": [args.new] * 2}
    elif args.part == "generation":
        job |= {"prompts": 2 * args.prompts, "prompt_tokens": [16, 64], "new_tokens": [8, 160]}
    else:
        batch_size = 2 * args.prompts if args.part == "sft" else args.prompts
        job |= {"batch_size": batch_size, "text_tokens": args.new}
        models["4096 tokens"] = {"layers": max(args.layers - 2, 1), "vocab": 4096}
    variants = {name: (name, job) for name in sides_of(args)}
    if args.part == "dpo":
        variants = {name: (name, job | {"refers_before": False}) for name in variants}
        if args.trl:
            variants[f"{THEIRS}, reference first"] = (THEIRS, job | {"refers_before": True})
    rows: list[Found] = []
    for model, sizes in models.items():
        found: dict[str, list[Found]] = {name: [] for name in variants}
        with tempfile.TemporaryDirectory() as folder:
            larger_llama(0, **sizes).save_pretrained(folder)
            tokenizer(LETTERS).save_pretrained(folder)
            for number in range(args.rounds):
                shift = number % len(variants)
                for name in [*variants][shift:] + [*variants][:shift]:
                    side, given = variants[name]
                    found[name].append(run_side(side, given | {"base": folder, "seed": number}, args))
                    print(f"round {number}, {name}: {found[name][-1]['step_ms']:.1f} ms", flush=True)
        made = _shares(found) if args.part == "generation" else _ratios(found)
        rows += [{"model": model, **each} for each in made]
    return rows


def _ratios(found: dict[str, list[Found]]) -> list[Found]:
    peers = found.get(THEIRS)
    rows = []
    for name, runs in found.items():
        row: Found = {"side": name}
        for key in ("step_ms", "whole_ms", "generating_ms", "tokens"):
            value = statistics.median(each[key] for each in runs)
            if value:
                row[key] = round(value, 1)
        pairs = list(zip(runs, peers, strict=True)) if peers else []
        for key in ("step_ms", "whole_ms"):
            ratios = [mine[key] / theirs[key] for mine, theirs in pairs]
            row[key.replace("_ms", "_ratio")] = round(statistics.median(ratios), 3) if ratios else None
        rows.append(row)
    return rows


def _shares(found: dict[str, list[Found]]) -> list[Found]:
    """Return a row for the engine, for `generate` in the same steps, and for TRL's steps."""
    names = {OURS: "engine", "generate": "generate", THEIRS: "TRL's step"}
    made = {
        name: [(e["generating_ms"], e["step_ms"], e["tokens"]) for e in runs] for name, runs in found.items()
    }
    made["generate"] = []
    for each in found[OURS]:
        peer = statistics.median(each["peer_ms"][1:] or each["peer_ms"])
        rest = each["step_ms"] - each["generating_ms"]
        made["generate"].append((peer, rest + peer, statistics.mean(each["peer_tokens"])))
    rows = []
    for name, triples in made.items():
        generating, step, tokens = (statistics.median(each) for each in zip(*triples, strict=True))
        pairs = list(zip(made[OURS], triples, strict=True))
        faster = [(theirs[0] / theirs[2]) / (mine[0] / mine[2]) for mine, theirs in pairs]
        ratios = [(mine[1] / mine[2]) / (theirs[1] / theirs[2]) for mine, theirs in pairs]
        rows.append(
            {
                "generation": names[name],
                "generating_ms": round(generating, 1),
                "step_ms": round(step, 1),
                "share": round(generating / step, 3),
                "tokens": round(tokens),
                "engine_faster": round(statistics.median(faster), 2),
                "step_ratio": round(statistics.median(ratios), 3),
            }
        )
    return rows


def count_memory(rank: int) -> list[Found]:
    """Return the parameter bytes of a policy with adapters, and of a policy with a reference model."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from colossalai.chat import adapters_off

    tokens = torch.arange(8).unsqueeze(0)
    policy = larger_llama(0).eval()
    before = policy(input_ids=tokens).logits
    adapted: Any = get_peft_model(
        policy, LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    )
    with torch.no_grad(), adapters_off(adapted):
        assert torch.equal(adapted(input_ids=tokens).logits, before), "it is its own reference"
    rows = []
    for name, hidden, layers, inner in (
        ("5M", 256, 6, 688),
        ("1.2B", 2048, 24, 5504),
        ("6.7B", 4096, 32, 11008),
    ):
        config = LlamaConfig(
            vocab_size=80 if hidden < 1024 else 32000,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
        )
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config)
            plain = _num_bytes(model)
            one = _num_bytes(get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear")))
        rows.append(
            {
                "model": name,
                "rank": rank,
                "adapters_MB": round(one / 2**20, 1),
                "two_models_MB": round(2 * plain / 2**20, 1),
                "ratio": round(one / (2 * plain), 4),
            }
        )
    return rows


def _num_bytes(model: torch.nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in model.parameters())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parts = ("sums", "ppo", "step", "generation", "sft", "dpo", "memory")
    add("--part", choices=parts, default="sums", help="benchmark to run (default: %(default)s)")
    add("--trl", metavar="PYTHON", help="interpreter of an environment with TRL; default: only our side runs")
    for name, default, words in (
        ("steps", 300, "of learning sums"),
        ("seeds", 3, "runs of each side of learning sums"),
        ("group", 8, "answers to a prompt"),
        ("prompts", 8, "prompts of a step; twice as many for generation"),
        ("sft-steps", 110, "steps of learning from texts before"),
        ("train-sums", 80, "sums that are learned; the others are held out"),
        ("iterations", 1, "steps of PPO on the same answers"),
        ("timed", 8, "steps of a run that is timed"),
        ("rounds", 3, "runs of each side that are timed"),
        ("layers", 6, "of the Llama that is timed; 6 have 5M parameters, or 4 with 4,096 tokens"),
        ("new", 64, "tokens of an answer and of a text that is timed"),
        ("rows", 0, "answers of step and generation that this package learns from at once; 0: all, as TRL"),
        ("rank", 8, "of adapters, for memory"),
    ):
        add(f"--{name}", type=int, default=default, help=f"{words} (default: %(default)s)")
    add("--lr", type=float, default=5e-4, help="constant rate of AdamW for sums (default: %(default)s)")
    add("--json", metavar="FILE", help="also write the figures to this file")
    add("--plot", metavar="FILE", help="also draw held-out rewards of sums into this PNG")
    return parser


def main() -> None:
    """Measure and report."""
    args = _parser().parse_args()
    torch.set_num_threads(1)
    more: dict[str, list[Found]] = {}
    if args.part in ("sums", "ppo"):
        rows, more = learn_sums(args)
        held_out = 100 - args.train_sums
        answers = args.prompts * args.group
        title = f"{args.part}: {args.steps} steps of {answers} answers, {held_out} sums held out"
        if args.plot:
            draw(more["curve"], args.plot)
    elif args.part == "memory":
        rows, title = count_memory(args.rank), "bytes of parameters: adapters, and two models"
    else:
        rows, title = time_steps(args), f"CPU time of a step: {args.part}"
    report(title, rows, settings=vars(args), json_file=args.json, more=more)


if __name__ == "__main__":
    main()
