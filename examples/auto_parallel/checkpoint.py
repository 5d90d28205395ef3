"""Train a model within decreasing memory budgets, and measure the cost in time.

    python examples/auto_parallel/checkpoint.py --model resnet

For each part of the bytes that the model takes by itself a solver chooses
which blocks are recomputed. The losses are those of the model as it is, bit
for bit.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import CheckpointSolverChen, CheckpointSolverRotor
from colossalai.fx import metainfo_trace, symbolic_trace
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.model_zoo.resnet import resnet18

SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)
CLASSES = 10


def build(name: str, batch: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return a model, its criterion, a batch and the labels."""
    torch.manual_seed(0)
    if name == "gpt":
        config = GPTConfig(
            vocab_size=1000,
            max_position_embeddings=128,
            hidden_size=128,
            num_layers=12,
            num_attention_heads=4,
        )
        tokens = torch.randint(config.vocab_size, (batch, config.max_position_embeddings))
        return GPT(config), GPTLMLoss(), tokens, tokens
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))
    return resnet18(num_classes=CLASSES, small_input=True), nn.CrossEntropyLoss(), images, labels


def train(model: nn.Module, criterion: nn.Module, batch: Tensor, labels: Tensor, steps: int) -> str:
    """Take some steps from the same start; return their time and the last loss, as a part of a row."""
    torch.manual_seed(1)  # masks of dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(batch), labels)
        loss.backward()
        optimizer.step()
    return f"{(time.perf_counter() - start) / steps:.3f} s | {loss.item():.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["resnet", "gpt"], default="resnet")
    parser.add_argument("--batch", type=int, default=32, help="samples in a batch")
    parser.add_argument("--steps", type=int, default=3, help="steps for each row")
    args = parser.parse_args()

    model, criterion, batch, labels = build(args.model, args.batch)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    argument = "input_ids" if args.model == "gpt" else "images"
    gm = metainfo_trace(symbolic_trace(model, meta_args={argument: batch.to("meta")}), batch)
    whole = gm.graph

    graphs = {"Chen": CheckpointSolverChen(whole).solve()}
    for share in SHARES:
        solver = CheckpointSolverRotor(whole, free_memory=share * whole.peak_bytes, optim_multiplier=0)
        try:
            graphs[f"rotor, {share:.0%}"] = solver.solve()
        except ValueError as error:  # names the smallest budget that works
            print(error)
            break
    print("| solver | peak of activations | recomputed | predicted | a step | last loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, graph in graphs.items():
        gm.graph = graph
        gm.load_state_dict(start)
        blocks = f"{len(graph.recomputed)} of {len(graph.blocks)} blocks"
        slower = f"{graph.step_seconds / whole.step_seconds:.2f} times"
        row = train(gm, criterion, batch, labels, args.steps)
        print(f"| {name} | {graph.peak_bytes / 2**20:.1f} MiB | {blocks} | {slower} | {row} |")


if __name__ == "__main__":
    main()
