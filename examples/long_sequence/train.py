r"""Train GPT or BERT on sequences that are cut over all processes of the job.

Examples:
    colossalai run --nproc_per_node 2 examples/long_sequence/train.py
    colossalai run --nproc_per_node 4 examples/long_sequence/train.py \
      --attention ulysses
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from memory import MB, SavedActivations
from torch import Tensor

import colossalai
from colossalai.cluster.dist_coordinator import priority_execution
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.model_zoo.bert import Bert, BertConfig, BertMLMLoss
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.utils import get_current_device, print_rank_0

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))
from data import TokenWindows
from tokens import load_text_data

MASKED = 0.15  # of the tokens, hidden from BERT
NO_DROPOUT = {"embedding_dropout": 0.0, "dropout": 0.0, "attention_dropout": 0.0}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--attention", choices=("ring", "ulysses"), default="ring", help="(ring)")
    parser.add_argument("--memory-budget", type=float, default=48.0, help="MB that a rank keeps (48)")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a whole sequence (4096)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of a step (1)")
    parser.add_argument("--steps", type=int, default=30, help="(30)")
    parser.add_argument("--hidden-size", type=int, default=128, help="(128)")
    parser.add_argument("--layers", type=int, default=2, help="(2)")
    parser.add_argument("--heads", type=int, default=4, help="(4)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens of the tokenizer (2048)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(0.003)")
    parser.add_argument("--data", type=Path, help="a .txt or .jsonl file, or a folder (Python's library)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/gpt"), help="folder for tokens")
    parser.add_argument("--report", type=Path, help="write losses and bytes here as JSON")
    return parser.parse_args()


def build_engine(args: argparse.Namespace) -> Engine:
    """Build the model, whose layers are whole on every rank, with its optimizer."""
    shape = {
        "hidden_size": args.hidden_size,
        "num_layers": args.layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.seq_length,
        "vocab_size": args.vocab_size + 1,  # the last one hides a token from BERT
    }
    model = (GPT if args.model == "gpt" else Bert)(
        (GPTConfig if args.model == "gpt" else BertConfig)(**shape, **NO_DROPOUT)
    )
    criterion = (GPTLMLoss if args.model == "gpt" else BertMLMLoss)(with_count=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    return engine


def make_batch(args: argparse.Namespace, windows: TokenWindows, step: int) -> tuple[Tensor, Tensor]:
    """Return whole (ids, labels), the same on every rank: the model takes this rank's part of them."""
    indices = [(step * args.batch_size + sample) % len(windows) for sample in range(args.batch_size)]
    ids = torch.stack([windows[index][0] for index in indices])
    if args.model == "gpt":
        return ids, ids
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < MASKED
    return ids.masked_fill(hidden, args.vocab_size), ids.masked_fill(~hidden, -100)


def train_step(engine: Engine, ids: Tensor, labels: Tensor, *, budget: int) -> tuple[float, int]:
    """Make one step; return the loss over the whole sequences, and the bytes that were kept for the backward.

    Raises:
        BudgetExceededError: They are more than the budget.
    """
    engine.zero_grad()
    with SavedActivations(engine.model.parameters(), budget=budget) as saved:
        loss = engine.criterion(
            engine(ids), labels
        )  # (sum, count): BERT hides as many tokens as chance wills
    engine.backward(loss)
    engine.step()
    return engine.optimizer.mean_loss.item(), saved.num_bytes


def main() -> None:
    args = parse_arguments()
    num_ranks = int(os.environ["WORLD_SIZE"])
    sequence = {"size": num_ranks, "attention": args.attention}
    config = {"parallel": {"sequence": sequence}, "clip_grad_norm": 1.0}
    colossalai.launch_from_torch(config, backend=args.backend, verbose=False)
    with priority_execution():  # rank 0 prepares the text, the others find it in the cache
        data = load_text_data(args.data, cache=args.cache, vocab_size=args.vocab_size)
    windows = TokenWindows(data.train, length=args.seq_length)
    engine = build_engine(args)
    print_rank_0(
        f"{args.model}: sequences of {args.seq_length} tokens, {args.seq_length // num_ranks} on each of "
        f"{num_ranks} ranks, which keep at most {args.memory_budget:g} MB for the backward"
    )
    losses = []
    for step in range(args.steps):
        batch = (part.to(get_current_device()) for part in make_batch(args, windows, step))
        loss, num_bytes = train_step(engine, *batch, budget=int(args.memory_budget * MB))
        losses.append(loss)
        if step % 10 == 0 or step == args.steps - 1:
            print_rank_0(f"step {step:4d}  loss {loss:6.3f}  kept for the backward {num_bytes / MB:6.1f} MB")
    if args.report and gpc.get_global_rank() == 0:
        args.report.write_text(json.dumps({"losses": losses, "saved_bytes": num_bytes}))
    gpc.destroy()


if __name__ == "__main__":
    main()
