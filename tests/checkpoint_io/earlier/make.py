"""Writes one checkpoint of each form, for the tests of later versions to load.

Run it three times, on 2 ranks, with the code whose forms shall be kept, and pack what it wrote:

    for plan in data tensor pipeline; do
        colossalai run --nproc_per_node 2 tests/checkpoint_io/earlier/make.py /tmp/forms $plan
    done
    tar --sort=name -C /tmp/forms -cJf tests/checkpoint_io/earlier/79c225b.tar.xz .

`expected.pt` beside the checkpoints is written by torch alone: weights and states as they should come back.
The GPT is saved under two plans, and what both say must be the same.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.utils import save_checkpoint

GPT_SIZES = GPTConfig(
    vocab_size=16,
    max_position_embeddings=4,
    hidden_size=8,
    num_attention_heads=2,
    num_layers=2,
    embedding_dropout=0.0,
    dropout=0.0,
    attention_dropout=0.0,
)
EXTRA = {"best": 0.25, "words": ["a", "b"], "table": torch.arange(3)}


def linear_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)


def boosted(plugin: Any) -> tuple[Booster, Any, Any, Any, Any]:
    """Build the model of linear layers and do two steps on a batch of each rank's own."""
    torch.manual_seed(0)
    booster = Booster(plugin=plugin)
    model = linear_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = booster.plugin.prepare_dataloader(dataset(), batch_size=2, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    for _, (x,) in zip(range(2), loader, strict=False):
        optimizer.zero_grad()
        booster.backward(nn.functional.mse_loss(model(x), x), optimizer)
        optimizer.step()
        scheduler.step()
    return booster, model, optimizer, scheduler, loader


def write_data_parallel(folder: Path) -> dict[str, Any]:
    booster, model, optimizer, scheduler, loader = boosted(TorchDDPPlugin())
    booster.save(folder / "data", model, optimizer, scheduler, loader, step=2, extra=EXTRA)
    booster.save(
        folder / "background", model, optimizer, scheduler, loader, step=2, extra=EXTRA, save_async=True
    )
    booster.save_model(model, folder / "model.pt")
    booster.save_model(model, folder / "model.safetensors", use_safetensors=True)
    booster.save_model(model, folder / "prefix.safetensors", use_safetensors=True, prefix="net.")
    kilobyte = 1 / 1024
    for name, options in {
        "shards_bin": {"size_per_shard": kilobyte / 8},
        "shards_safetensors": {"size_per_shard": kilobyte / 8, "use_safetensors": True},
        "shards_variant": {"variant": "fp32", "use_safetensors": True},
    }.items():
        booster.save_model(model, folder / name, shard=True, **options)
    booster.save_model(model, folder / "slices", gather_dtensor=False)
    booster.save_optimizer(optimizer, folder / "optimizer.pt")
    booster.save_optimizer(optimizer, folder / "optimizer_shards", shard=True, size_per_shard=kilobyte / 8)
    booster.save_optimizer(optimizer, folder / "optimizer_slices", gather_dtensor=False)
    booster.save_lr_scheduler(scheduler, folder / "scheduler.pt")
    save_checkpoint(folder / "checkpoint.pt", 7, model, optimizer, scheduler)
    raw = optimizer.unwrap()
    names = {param: name for name, param in model.unwrap().named_parameters()}
    return {
        "model": dict(model.unwrap().state_dict()),
        "optimizer": {
            names[param]: {key: value.clone() for key, value in state.items()}
            for param, state in raw.state.items()
        },
        "scheduler": scheduler.state_dict()["_last_lr"],
    }


def write_sharded(folder: Path) -> None:
    for name, plugin in {
        "fsdp": TorchFSDPPlugin(),
        "zero1": LowLevelZeroPlugin(stage=1, precision="fp32"),
        "zero2_bf16": LowLevelZeroPlugin(stage=2, precision="bf16"),
    }.items():
        booster, model, optimizer, scheduler, loader = boosted(plugin)
        booster.save(folder / name, model, optimizer, scheduler, loader, step=2, extra=EXTRA)


def write_gpt(folder: Path, name: str, plugin: Any) -> None:
    """Train a GPT for a step under a plan that cuts it."""
    booster = Booster(plugin=plugin)
    torch.manual_seed(0)
    model = GPT(GPT_SIZES)
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), GPTLMLoss()
    )
    tokens = torch.arange(16).reshape(4, 4)
    if plugin.options.pp_size > 1:
        booster.execute_pipeline(iter([(tokens, tokens)]), model, criterion, optimizer)
    else:
        booster.backward(criterion(model(tokens), tokens), optimizer)
    optimizer.step()
    booster.save(folder / name, model, optimizer, step=1)
    booster.save_model(model, folder / f"{name}.safetensors", use_safetensors=True)


def main() -> None:
    folder, plan = Path(sys.argv[1]), sys.argv[2]
    colossalai.launch_from_torch({}, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    if plan == "tensor":
        write_gpt(folder, "gpt_tensor", HybridParallelPlugin(tp_size=2))
    elif plan == "pipeline":
        write_gpt(folder, "gpt_pipeline", HybridParallelPlugin(pp_size=2, num_microbatches=2))
    else:
        expected = write_data_parallel(folder)
        write_sharded(folder)
        if gpc.get_global_rank() == 0:
            torch.save(expected, folder / "expected.pt")
    gpc.destroy()


if __name__ == "__main__":
    main()
