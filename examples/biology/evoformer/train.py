r"""Train an Evoformer to predict which residues of a protein touch.

    colossalai run --nproc_per_node 2 \
      examples/biology/evoformer/train.py \
      --config examples/biology/evoformer/configs/dap.py
    colossalai run --nproc_per_node 2 \
      examples/biology/evoformer/train.py --resume

Families of proteins are drawn from a seed; with --data they are files.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alignment import Alignment
from build import Training, build_training
from data import SEPARATION
from loss import contact_loss, letter_loss
from metric import mutual_information, precision
from plot import write
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import colossalai
from colossalai.checkpoint_io import latest_training_state
from colossalai.core import global_context as gpc

LETTER_WEIGHT = 0.1  # of the loss of masked letters
HEADER = f"{'families':>12}{'loss':>10}{'precision':>11}{'families/s':>12}"


def main() -> None:
    args = parse_args()
    colossalai.launch_from_torch(args.config, backend=args.backend, verbose=False)
    folder: Path = args.output or Path("runs") / f"evoformer-{Path(args.config).stem}"
    has_checkpoint = latest_training_state(folder / "checkpoints") is not None
    if has_checkpoint and not args.resume:
        raise ValueError(f"{folder} has checkpoints: go on with --resume, or choose another --output")
    if args.resume and not has_checkpoint:
        raise FileNotFoundError(f"--resume: {folder} has no checkpoint; leave it out to start")
    training = build_training(gpc.config, args.data)
    train(training, folder, data="files" if args.data else "drawn families")
    gpc.destroy()


def parse_args() -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(config=str(Path(__file__).with_name("configs") / "dap.py"))
    parser.add_argument("--data", type=Path, help="a folder of NAME.a3m with NAME.pdb (default: drawn)")
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/evoformer-CONFIG)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args()


def train(training: Training, folder: Path, *, data: str) -> None:
    """Train from the newest checkpoint, if any, to the last step; evaluate and save along the way.

    Raises:
        ValueError: The checkpoint is of a run on another kind of `data`.
    """
    booster = training.booster
    components = training.model, training.optimizer, training.scheduler, training.train_loader
    resumed = booster.load(folder / "checkpoints", *components)
    step, records = (resumed.step, list(resumed.extra["records"])) if resumed else (0, [])
    if resumed and resumed.extra["data"] != data:
        raise ValueError(f"--resume: the run is on {resumed.extra['data']}, not on {data}; see --data")
    baseline = evaluate_baseline(training)
    console, is_first = Console(quiet=dist.get_rank() != 0), dist.get_rank() == 0
    with Progress(console=console, disable=not is_first or not sys.stdout.isatty()) as bar:
        task = bar.add_task("families", total=training.num_steps * training.batch_size)
        console.print(HEADER, *map(line_of, records), sep="\n", highlight=False)
        losses, begin = [], time.perf_counter()
        # After its last batch the loader would begin again.
        for batch in training.train_loader if step < training.num_steps else ():
            losses.append(train_step(training, batch))
            step += 1
            bar.update(task, completed=step * training.batch_size)
            if step % training.evaluate_every and step < training.num_steps:
                continue
            # The losses are not those of samples of a loader, of which the last ones can be repeated.
            loss = booster.gather_for_metrics(torch.stack(losses).mean(), dataloader=()).mean().item()
            speed = len(losses) * training.batch_size / (time.perf_counter() - begin)
            found, example = evaluate(training)
            families = step * training.batch_size
            records.append({"families": families, "loss": loss, "precision": found, "speed": speed})
            console.print(line_of(records[-1]), highlight=False)
            if is_first:
                write({"records": records, "baseline": baseline, **example}, folder)
            extra = {"records": records, "data": data}
            booster.save(folder / "checkpoints", *components, step=step, extra=extra)
            losses, begin = [], time.perf_counter()
        console.print(
            f"precision {records[-1]['precision']:.3f}, mutual information {baseline:.3f}", highlight=False
        )


def line_of(record: dict[str, Any]) -> str:
    """Return a line of the table."""
    return "{families:>12,}{loss:>10.4f}{precision:>11.3f}{speed:>12.1f}".format(**record)


def train_step(training: Training, batch: Alignment) -> Tensor:
    """Train on a batch, and return its loss."""
    contacts, letters = training.model(batch.inputs, batch.exists)
    loss = contact_loss(contacts, batch.contacts) + LETTER_WEIGHT * letter_loss(letters, batch)
    training.booster.backward(loss, training.optimizer)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()
    return loss.detach()


@torch.no_grad()
def evaluate(training: Training) -> tuple[float, dict[str, Any]]:
    """Return the mean precision of all evaluation families, and maps of the first one of this rank."""
    training.model.eval()
    values, example = [], {}
    for batch in training.evaluation_loader:
        logits, _ = training.model(batch.inputs, batch.exists)
        values += precisions(logits.float(), batch)
        if not example:
            size = int(batch.exists[0, 0].sum())
            pairs = (batch.contacts[0, :size, :size].triu(SEPARATION) == 1).nonzero()
            predicted = logits[0, :size, :size].float().sigmoid()
            predicted = predicted.triu(SEPARATION) + predicted.tril(-SEPARATION)  # others are not trained
            example = {"map": predicted.cpu().round(decimals=3).tolist(), "contacts": pairs.tolist()}
    training.model.train()
    return mean_of_ranks(training, values), example


def evaluate_baseline(training: Training) -> float:
    """Return the mean precision of mutual information."""
    values = []
    for batch in training.evaluation_loader:
        scores = torch.zeros_like(batch.contacts)
        for each, letters, exists in zip(scores, batch.letters, batch.exists, strict=True):
            rows, size = int(exists[:, 0].sum()), int(exists[0].sum())
            each[:size, :size] = mutual_information(letters[:rows, :size])
        values += precisions(scores, batch)
    return mean_of_ranks(training, values)


def precisions(scores: Tensor, batch: Alignment) -> list[float]:
    """Return the precision of each family of a batch."""
    return [
        precision(each, contacts, num_residues=int(exists[0].sum()))
        for each, contacts, exists in zip(scores, batch.contacts, batch.exists, strict=True)
    ]


def mean_of_ranks(training: Training, values: list[float]) -> float:
    """Return the mean over the families of all ranks, each once, without those of unknown contacts."""
    found = training.booster.gather_for_metrics(torch.tensor(values, dtype=torch.float64))
    return found.nanmean().item()


if __name__ == "__main__":
    main()
