"""The largest GPT-2 that trains on one accelerator, and its speed: plain torch, FSDP2, DeepSpeed, Gemini.

    python benchmarks/gemini_gpu.py --dir /mnt/nvme --json benchmarks/results/gemini_gpu.json

The number of layers is doubled, from `--layers` on, until a process fails: it runs out of device or host
memory, or exceeds `--timeout`. Each attempt is a separate process, so that no memory is left over. All
variants compute in bfloat16 with float32 masters (autocast for plain torch, which lacks them), recompute each
block, and use AdamW. Libraries that are not installed are skipped with a message. `--device cpu` tests the
script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from harness.rounds import report
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin

Step = Callable[[torch.Tensor], object]
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # a launcher's variables
LEARNING_RATE = 1e-4
RAN_OUT = 3  # the exit status of a process that ran out of memory


def build(args: argparse.Namespace) -> nn.Module:
    """Return a GPT-2 of transformers in host memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=args.hidden,
        n_head=max(1, args.hidden // 64),
        n_layer=args.layers,
        n_positions=args.seq,
        vocab_size=args.vocab,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def by_torch(args: argparse.Namespace, device: torch.device) -> Step:
    """Return a step of the plain model, entirely on the device."""
    model = build(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_fsdp2(args: argparse.Namespace, device: torch.device) -> Step:
    """Return a step under torch's FSDP2 with everything offloaded to host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = build(args)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    if device.type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor) -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_deepspeed(args: argparse.Namespace, device: torch.device) -> Step:
    """Return a step under DeepSpeed's ZeRO 3 with parameters and states in host memory."""
    import deepspeed

    on_host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(args)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()

    return step


def by_gemini(args: argparse.Namespace, device: torch.device, *, policy: str) -> Step:
    """Return a step under Gemini."""
    options: dict[str, Any] = {"placement_policy": policy}
    if policy == "nvme":
        options["offload_dir"] = args.dir
        options["memory_budget" if device.type == "cpu" else "host_budget"] = int(args.host_gib * 2**30)
    plugin = GeminiPlugin(
        precision="bf16", hidden_dim=args.hidden, pin_memory=device.type != "cpu", **options
    )
    raw = build(args)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=LEARNING_RATE, fused=True)
    booster = Booster(plugin=plugin)
    model, wrapped, *_ = booster.boost(raw, optimizer)

    def step(tokens: torch.Tensor) -> None:
        booster.backward(model(tokens, labels=tokens).loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()

    return step


VARIANTS: dict[str, Callable[..., Step]] = {
    "torch": by_torch,
    "fsdp2, on host": by_fsdp2,
    "deepspeed 3, on host": by_deepspeed,
    "gemini auto": partial(by_gemini, policy="auto"),
    "gemini nvme": partial(by_gemini, policy="nvme"),
}


def worker(args: argparse.Namespace) -> None:
    """Train a few steps and print tokens a second; exit with `RAN_OUT` when memory is not enough."""
    colossalai.launch_from_torch(config={}, verbose=False)
    device = torch.device("cpu")
    if args.device != "cpu" and (found := torch.accelerator.current_accelerator()) is not None:
        device = found
    tokens = torch.randint(args.vocab, (args.batch, args.seq)).to(device)
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else nullcontext
    try:
        step = VARIANTS[args.worker](args, device)
        for _ in range(2):  # Gemini records the first
            step(tokens)
        synchronize()
        start = time.perf_counter()
        for _ in range(args.steps):
            step(tokens)
        synchronize()
    except (torch.OutOfMemoryError, MemoryError):
        sys.exit(RAN_OUT)
    seconds = (time.perf_counter() - start) / args.steps
    print(json.dumps({"tokens_per_s": args.batch * args.seq / seconds}), flush=True)
    dist.destroy_process_group()


def attempt(args: argparse.Namespace, variant: str, layers: int) -> tuple[float | None, str]:
    """Return tokens per second of a variant with `layers` layers, or None and the reason."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", variant, "--layers", str(layers)]
    alone = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, env=alone, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return None, f"took more than {args.timeout} s"
    if run.returncode == 0:
        last = [line for line in run.stdout.splitlines() if line.startswith("{")][-1]
        return float(json.loads(last)["tokens_per_s"]), ""
    if run.returncode in (RAN_OUT, -9):  # the kernel kills a process with SIGKILL when memory runs out
        return None, "out of memory"
    return None, (run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1][:200]


def climb(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Double the layers until it fails; return a row of the table."""
    layers, last = args.layers, None
    while True:
        speed, why = attempt(args, variant, layers)
        print(f"{variant}, {layers} layers: {why or f'{speed:.0f} tokens/s'}", file=sys.stderr, flush=True)
        if speed is None:
            break
        last = (layers, speed)
        if layers >= args.most_layers:
            why = "the most that was tried"
            break
        layers *= 2
    numel = 0 if last is None else 12 * args.hidden**2 * last[0] + args.vocab * args.hidden
    return {
        "variant": variant,
        "layers": 0 if last is None else last[0],
        "parameters": f"{numel / 1e9:.2f} G",
        "tokens/s": 0 if last is None else round(last[1]),
        "ended by": why,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    parser.add_argument("--layers", type=int, default=12, help="to begin with (default: %(default)s)")
    parser.add_argument("--most-layers", type=int, default=3072, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1600, help="default: %(default)s, as GPT-2 XL")
    parser.add_argument("--vocab", type=int, default=50257, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a try (default: %(default)s)")
    parser.add_argument("--dir", help="a folder on a fast disk (default: the temporary one)")
    parser.add_argument("--host-gib", type=float, default=64, help='for "nvme" (default: %(default)s)')
    parser.add_argument("--device", choices=("accelerator", "cpu"), default="accelerator")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dir = args.dir or tempfile.gettempdir()
    if args.worker:
        worker(args)
        return
    if os.environ.get("RANK", "0") != "0":
        return  # the script starts its processes itself; rank 0 prints the table
    if args.device != "cpu" and not torch.accelerator.is_available():
        parser.error("there is no accelerator here; --device cpu tries the script itself")
    rows = []
    for variant in args.variants:
        if variant.startswith("deepspeed") and find_spec("deepspeed") is None:
            print("deepspeed is not installed: left out", file=sys.stderr)
            continue
        rows.append(climb(args, variant))
    report("the largest GPT-2 on one device", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
