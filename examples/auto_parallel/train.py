r"""Train a model with the fastest sharding over the available ranks.

    colossalai run --nproc_per_node 4 examples/auto_parallel/train.py \
      --model gpt2
    colossalai run --nproc_per_node 4 examples/auto_parallel/train.py \
      --model resnet --mesh 2 2

The loop does not change. The models are made from configs, with random
weights. With `--mesh`, the first axes of the grid of ranks are for data, or
the last ones for the features of layers.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import autoparallelize, initialize_model
from colossalai.device import DeviceMesh
from colossalai.logging import get_dist_logger
from colossalai.model_zoo.resnet import resnet18

CLASSES, WORDS, LENGTH = 10, 512, 32


def build(name: str, batch: int) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """Return a model, the arguments of its forward on a batch, and the labels."""
    torch.manual_seed(0)
    if name == "gpt2":
        import transformers

        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=4,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        tokens = torch.randint(WORDS, (batch, LENGTH))
        return transformers.GPT2LMHeadModel(config), {"input_ids": tokens}, tokens
    images = torch.randn(batch, 3, 32, 32)
    return (
        resnet18(num_classes=CLASSES, small_input=True),
        {"images": images},
        torch.randint(CLASSES, (batch,)),
    )


def loss_of(output: object, labels: Tensor) -> Tensor:
    """Return the cross entropy of classes, or of each next token."""
    logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "resnet"], default="resnet")
    parser.add_argument("--mesh", type=int, nargs="+", help="extents of the grid of ranks")
    parser.add_argument("--batch", type=int, default=16, help="samples in a batch, of all ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--solver-preference", choices=["standard", "tp", "dp"], default="standard")
    args = parser.parse_args()

    colossalai.launch_from_torch(config={})
    logger = get_dist_logger()
    model, given, labels = build(args.model, args.batch)
    meta_args = {name: value.to("meta") for name, value in given.items()}
    how = {"solver_preference": args.solver_preference, "return_solution": True}
    if args.mesh is None:
        model, solution = autoparallelize(model, meta_args, **how)
    else:
        ranks = torch.arange(dist.get_world_size())
        mesh = DeviceMesh(physical_mesh_id=ranks, mesh_shape=args.mesh, init_process_group=True)
        model, solution = initialize_model(model, meta_args, device_mesh=mesh, overlap=True, **how)
    cut = [line for line in solution if not line.endswith(": whole")]
    logger.info(f"{len(solution)} operations, {len(cut)} of them cut", ranks=[0])
    for line in cut[:8]:
        logger.info(line, ranks=[0])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(**given), labels)  # of the whole batch, on every rank
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        logger.info(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - start:.3f} s", ranks=[0])


if __name__ == "__main__":
    main()
