"""Models chunked by `autochunk` to fractions of their activation peak, against the same models as they are.

    python benchmarks/autochunk.py --json benchmarks/results/autochunk.json

Models are in evaluation mode under `no_grad`, with random weights, in float32: the GPT-2 of transformers with
explicit attention scores ("GPT-2"), a ViT with explicit scores ("ViT"), an Evoformer of two blocks
("Evoformer"), the U-Net of diffusers with the sizes of Stable Diffusion 1 ("U-Net"). Each fraction is tried
without and with `inplace`. `budget_mib` is the fraction of the peak that the trace has without chunks;
`counted_mib` is the counted peak of live activations of a run, and `eager_mib` of a run of the user's model,
which keeps local variables. `ratio` is the time relative to the user's model in the same rounds, `predicted`
the estimate of the plan. `plan_s` is the time of `autochunk` including the trace, which alone takes
`trace_s`. With `--plan-only`, models are planned and not run: for `--tokens 16384`, whose scores exceed this
memory, or `--blocks 48`.

"Triangle attention" is that of ESMFold, which has a loop with chunks of `chunk_size`, written by hand. The
budget is the counted peak of that loop, and `ratio` is the time of autochunk's module relative to it.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from harness.memory import PeakBytes
from harness.rounds import compare, report, time_rounds
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel
from transformers.models.esm.modeling_esmfold import EsmFoldTriangleAttention

from colossalai.autochunk import autochunk
from colossalai.model_zoo.evoformer import Evoformer, EvoformerConfig

Case = tuple[nn.Module, dict[str, Any]]


def gpt2(args: argparse.Namespace) -> Case:
    """Return a GPT-2 with explicit scores, and its arguments."""
    config = GPT2Config(
        n_layer=args.blocks,
        n_embd=args.width,
        n_head=args.width // 64,
        n_positions=args.tokens,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    ids = torch.randint(0, 256, (1, args.tokens))
    return GPT2LMHeadModel(config), {"input_ids": ids, "use_cache": False}


def vit(args: argparse.Namespace) -> Case:
    """Return a ViT with explicit scores, and its arguments."""
    config = ViTConfig(
        num_hidden_layers=args.blocks,
        hidden_size=args.width,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
        image_size=args.image,
        patch_size=16,
        attn_implementation="eager",
    )
    return ViTModel(config), {"pixel_values": torch.randn(1, 3, args.image, args.image)}


def evoformer(args: argparse.Namespace) -> Case:
    """Return an Evoformer, and its arguments."""
    config = EvoformerConfig(c_m=args.msa_dim, c_z=args.pair_dim, num_blocks=args.blocks)
    msa = torch.randn(1, args.sequences, args.residues, args.msa_dim)
    return Evoformer(config), {
        "msa": msa,
        "pair": torch.randn(1, args.residues, args.residues, args.pair_dim),
    }


def unet(args: argparse.Namespace) -> Case:
    """Return the U-Net of Stable Diffusion 1, and its arguments."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=args.latents, block_out_channels=args.channels, cross_attention_dim=768
    )
    return model, {
        "sample": torch.randn(1, 4, args.latents, args.latents),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(1, 77, 768),
        "return_dict": False,
    }


MODELS: Mapping[str, Callable[[argparse.Namespace], Case]] = {
    "GPT-2": gpt2,
    "ViT": vit,
    "Evoformer": evoformer,
    "U-Net": unet,
}
TRIANGLE = "Triangle attention"


def run(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        model(**arguments)


def counted(model: nn.Module, arguments: Mapping[str, Any]) -> float:
    """Return the peak of live activations of a run in MiB."""
    with PeakBytes() as peak:
        run(model, arguments)
    return round(peak.peak / 2**20, 2)


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of one model for all budgets."""
    torch.manual_seed(0)
    model, arguments = MODELS[name](args)
    model.eval()
    begin = time.perf_counter()
    torch.export.export(model, (), arguments, strict=False)
    trace_s = round(time.perf_counter() - begin, 1)
    steps: dict[str, Callable[[], None]] = {"model": partial(run, model, arguments)}
    rows: dict[str, dict[str, Any]] = {}
    for fraction, inplace in product(args.fractions, (False, True)):
        variant = f"{fraction:g}" + " in place" * inplace
        begin = time.perf_counter()
        try:
            chunked = autochunk(model, arguments, memory_ratio=fraction, inplace=inplace)
        except ValueError as error:
            print(f"{name}, {variant}: {error}\n")  # the smallest possible budget
            continue
        plan = chunked.plan
        rows[variant] = {
            "trace_s": trace_s,
            "plan_s": round(time.perf_counter() - begin, 1),
            "regions": len(plan.regions),
            "unchunked_mib": round(plan.unchunked_peak / 2**20, 2),
            "budget_mib": round(plan.memory_budget / 2**20, 2),
            "predicted": plan.slowdown,
        }
        if not args.plan_only:
            rows[variant] |= {"counted_mib": counted(chunked, arguments)}
            steps[variant] = partial(run, chunked, arguments)
    if not args.plan_only:
        eager = counted(model, arguments)
        for row in compare(time_rounds(steps, rounds=args.rounds, warmup=1), baseline="model"):
            if (variant := row.pop("variant")) != "model":
                rows[variant] |= {"eager_mib": eager, **row}
    return [{"model": name, "fraction": variant, **row} for variant, row in rows.items()]


def rows_against_chunk_layer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of ESMFold's triangle attention for all chunk sizes."""
    torch.manual_seed(0)
    length, dim = args.residues, args.pair_dim
    model = EsmFoldTriangleAttention(dim, 32, max(1, dim // 32)).eval()
    arguments = {"x": torch.randn(1, length, length, dim), "mask": torch.ones(1, length, length)}
    rows = []
    for size in args.chunk_sizes:
        by_hand = {**arguments, "chunk_size": size}
        budget = counted(model, by_hand)
        chunked = autochunk(model, arguments, memory_budget=f"{budget} MiB", inplace=True)
        steps = {"by hand": partial(run, model, by_hand), "autochunk": partial(run, chunked, arguments)}
        _, row = compare(time_rounds(steps, rounds=args.rounds, warmup=1), baseline="by hand")
        del row["variant"]
        peaks = {"budget_mib": budget, "counted_mib": counted(chunked, arguments)}
        rows.append({"model": TRIANGLE, "chunk_size": size, **peaks, **row})
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*MODELS, TRIANGLE]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.3, 0.2], help="of the peak")
    parser.add_argument("--blocks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=768, help="of GPT-2 and ViT (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="of GPT-2 (default: %(default)s)")
    parser.add_argument("--image", type=int, default=512, help="pixels of ViT (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=64, help="of Evoformer (default: %(default)s)")
    parser.add_argument("--residues", type=int, default=128, help="of Evoformer (default: %(default)s)")
    parser.add_argument("--msa-dim", type=int, default=256, help="of Evoformer (default: %(default)s)")
    parser.add_argument("--pair-dim", type=int, default=128, help="of Evoformer (default: %(default)s)")
    parser.add_argument("--latents", type=int, default=64, help="side of U-Net's (default: %(default)s)")
    parser.add_argument("--channels", type=int, nargs=4, default=[320, 640, 1280, 1280], help="of U-Net")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[64, 16, 4], help="by hand")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="plan, and do not run")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for name in args.models if name != TRIANGLE for row in rows_of(name, args)]
    by_hand = rows_against_chunk_layer(args) if TRIANGLE in args.models else []
    report(
        f"AutoChunk, {args.blocks} blocks, float32, {args.threads} threads",
        rows or by_hand,
        more={"chunk_layer": by_hand} if rows and by_hand else None,
        settings=vars(args),
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
