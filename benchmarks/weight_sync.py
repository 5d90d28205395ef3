"""New weights for the rollout engines of a job: passed in memory, and through a checkpoint on disk.

    colossalai run --nproc_per_node 4 benchmarks/weight_sync.py --json benchmarks/results/weight_sync.json

A Llama of 65M parameters is trained by 2 tensor ranks in each of 2 replicas under ZeRO-1; each rank has an
engine with a whole copy. "sync" is `RolloutEngine.sync`; "checkpoint" writes the model as safetensors with
`booster.save_model`, and reads it into each engine with `load_model`. "copy" is a plain copy of the same
number of bytes on all ranks at once, a lower bound.

- A step ends when its slowest rank ends; `ratio` is relative to "sync".
- `sent_per_rank` are the bytes that a rank sends (a broadcast counted as on a ring), `missing` the bytes that
  it lacks: half of each tensor that is sharded over the tensor ranks.
- `peak` is the most additional memory during a sync; `largest` is the size of the largest tensor in bytes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.llama import byte_tokenizer, llama_of, llama_parser
from harness.memory import AllocatedPeak
from harness.rounds import compare, report, time_rounds

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.chat import RolloutEngine
from colossalai.checkpoint_io import load_model
from colossalai.communication import ledger
from colossalai.core import global_context as gpc


def rows_of(args: argparse.Namespace, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the times of all variants, and the bytes of a sync."""
    heads = {"kv_heads": args.hidden // 64}  # as many as query heads, so that ranks can share them
    raw, twin = llama_of(args, **heads), llama_of(args, **heads)
    whole = {name: param.shape for name, param in raw.named_parameters()}
    sizes = [param.nbytes for param in raw.parameters()]
    size = 2 if gpc.mesh.world_size > 1 else 1
    booster = Booster(plugin=HybridParallelPlugin(tp_size=size, zero_stage=1, precision="fp32"))
    model, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))
    engine = RolloutEngine(model, byte_tokenizer(args.vocab), max_length=64, max_running=2, has_copy=True)
    values = [param.data for param in twin.parameters()]
    others = [torch.empty_like(value) for value in values]

    def checkpoint() -> None:
        booster.save_model(model, folder, shard=True, use_safetensors=True)
        load_model(twin, folder)

    def copy() -> None:
        for value, other in zip(values, others, strict=True):
            other.copy_(value)

    def meeting(step: Any) -> Any:
        def met() -> None:
            dist.barrier()
            step()
            dist.barrier()

        return met

    steps = {"sync": engine.sync, "checkpoint": checkpoint, "copy": copy}
    times = time_rounds({name: meeting(step) for name, step in steps.items()}, rounds=args.rounds, warmup=1)
    with ledger() as book, AllocatedPeak() as peak:
        engine.sync()
    cut = [
        param.nbytes * size for name, param in model.unwrap().named_parameters() if param.shape != whole[name]
    ]
    more = {
        "sent_per_rank": int(book.num_bytes("broadcast")),
        "missing": sum(cut) * (size - 1) // size,
        "peak": peak.rise,
        "largest": max(sizes),
        "bytes": sum(sizes),
    }
    return compare(times, baseline="sync"), [more]


def main() -> None:
    """Measure and report."""
    parser = llama_parser(__doc__, rounds=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    colossalai.launch_from_torch({}, verbose=False)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        rows, sizes = rows_of(args, str(Path(shared[0], "model")))
        dist.barrier()  # all ranks must have read the files before rank 0 deletes the folder
    title, more = "Weights of a Llama on their way to engines", {"bytes of a sync": sizes}
    report(title, rows, settings=vars(args), json_file=args.json, more=more)


if __name__ == "__main__":
    main()
