"""Share of each operator in a training step on one core: the upper bound for faster matrix products.

    python benchmarks/operator_share.py --json benchmarks/results/operator_share.json

A step is forward, backward and fused AdamW of a model of `--layers` blocks on `--batch` sequences. The
figures are shares of the time of all operators, by torch's profiler. `matmul="onednn"` replaces `mm` and
`addmm`; it does not replace `bmm` and `baddbmm` (attention without a fused kernel) and `addmm_act` (with an
activation).
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness.rounds import report
from torch import nn
from torch.profiler import profile

from colossalai.model_zoo.gpt import GPT, GPTConfig

COLUMNS = {
    "mm": ("aten::mm",),
    "addmm": ("aten::addmm",),
    "bmm": ("aten::bmm", "aten::baddbmm"),
    "addmm_act": ("aten::_addmm_activation",),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
}


def steps(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return a step of each model, by name; those of transformers where it is installed."""
    made = {}
    for hidden, length in ((64, 128), (256, 128), (512, 128), (256, 512)):
        config = GPTConfig(
            vocab_size=1024,
            max_position_embeddings=length,
            hidden_size=hidden,
            num_layers=args.layers,
            num_attention_heads=hidden // 32,
        )
        ids = torch.randint(0, 1024, (max(1, args.batch * 128 // length), length))
        made[f"GPT, hidden {hidden}, length {length}"] = _step(GPT(config), _loss, ids)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return made
    for attention in ("sdpa", "eager"):
        config = GPT2Config(
            vocab_size=1024,
            n_positions=512,
            n_embd=256,
            n_layer=args.layers,
            n_head=8,
            attn_pdrop=0.0,
            attn_implementation=attention,
            bos_token_id=0,
            eos_token_id=0,
        )
        ids = torch.randint(0, 1024, (max(1, args.batch // 4), 512))
        made[f"GPT-2 of transformers, {attention}, length 512"] = _step(
            GPT2LMHeadModel(config), _hugging_face_loss, ids
        )
    return made


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _hugging_face_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _step(model: nn.Module, loss: Callable[..., torch.Tensor], ids: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, ids).backward()
        optimizer.step()

    return step


def shares(step: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Return the time of a step and the share of each column."""
    step()
    with profile() as profiled:
        for _ in range(rounds):
            step()
    times = {row.key: row.self_cpu_time_total for row in profiled.key_averages()}
    total = sum(times.values())
    found = {name: sum(times.get(key, 0.0) for key in keys) / total for name, keys in COLUMNS.items()}
    return {
        "step_ms": round(1e-3 * total / rounds, 1),
        **{name: round(part, 3) for name, part in found.items()},
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="blocks of each model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each (default: %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [{"model": name, **shares(step, args.rounds)} for name, step in steps(args).items()]
    report("Shares of a step, one core", rows, settings=vars(args), json_file=args.json)


if __name__ == "__main__":
    main()
