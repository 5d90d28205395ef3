r"""Train a DLRM on click logs, with cached tables of embeddings.

    colossalai run --nproc_per_node 2 \
      examples/recommendation/dlrm/train.py \
      --config examples/recommendation/dlrm/configs/columns.py
    colossalai run --nproc_per_node 2 \
      examples/recommendation/dlrm/train.py --resume

The click log is drawn from a seed; with --data it is a file of Criteo.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build import Training, build_training
from checkpoints import load, save
from metric import auroc
from plot import draw, saved_steps
from report import Meter, Report
from torch.nn.functional import binary_cross_entropy_with_logits

import colossalai
from colossalai.core import global_context as gpc


def main() -> None:
    args = parse_args()
    colossalai.launch_from_torch(args.config, backend=args.backend, verbose=False)
    folder: Path = args.output or Path("runs") / f"dlrm-{Path(args.config).stem}"
    if saved_steps(folder) and not args.resume:
        raise ValueError(f"{folder} has checkpoints: go on with --resume, or choose another --output")
    training = build_training(gpc.config, args.data)
    progress: dict[str, Any] = {"step": 0, "records": [], "optimum": None}
    if args.resume:
        progress = load(folder, training)
    seen = progress["step"] * training.batch_size
    report = Report(dist.get_rank(), samples=seen, total=training.num_steps * training.batch_size)
    try:
        train(training, folder, progress, report)
    finally:
        report.close()
    if dist.get_rank() == 0:
        draw(progress, folder / "auroc.png")
    gpc.destroy()


def parse_args() -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(config=str(Path(__file__).with_name("configs") / "tables.py"))
    parser.add_argument("--data", type=Path, help="a file of Criteo (default: a log drawn from a seed)")
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/dlrm-CONFIG)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args()


def train(training: Training, folder: Path, progress: dict[str, Any], report: Report) -> None:
    """Train from the step of `progress` to the last one; evaluate and save along the way."""
    step, records = progress["step"], progress["records"]
    meter = Meter(training.booster, training.tables.caches)
    report.say_header()
    for record in records:
        report.add(record)
    training.train_loader.load_state_dict({"epoch": 0, "batch": step})
    # After its last batch the loader would begin again.
    loader = training.tables.prefetch(training.train_loader) if step < training.num_steps else ()
    for batch in loader:
        loss = binary_cross_entropy_with_logits(training.model(batch.dense, batch.ids), batch.labels)
        training.booster.backward(loss, training.optimizers[0])  # of both optimizers
        for optimizer, scheduler in zip(training.optimizers, training.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        step += 1
        meter.add(loss)
        report.advance(step * training.batch_size)
        if step % training.evaluate_every == 0 or step == training.num_steps:
            means = meter.end()
            value, progress["optimum"] = evaluate(training)
            speed = means["steps"] * training.batch_size / means["seconds"]
            samples = step * training.batch_size
            records.append({"samples": samples, "auroc": value, "speed": speed, **means})
            progress["step"] = step
            report.add(records[-1])
            save(folder, training, progress)
            meter.begin()
    if records and progress["optimum"] is not None:
        gap = progress["optimum"] - records[-1]["auroc"]
        report.say(f"AUROC {records[-1]['auroc']:.4f}, optimum {progress['optimum']:.4f}, gap {gap:.4f}")
    if meter.seconds:
        report.say(meter.summary())


@torch.no_grad()
def evaluate(training: Training) -> tuple[float, float | None]:
    """Return the AUROC over all evaluation samples, and that of their known probabilities."""
    training.model.eval()
    scores = [
        (training.model(batch.dense, batch.ids), batch.labels, batch.probabilities)
        for batch in training.evaluation_loader
    ]
    training.model.train()
    own = tuple(map(torch.cat, zip(*scores, strict=True)))
    logits, labels, probabilities = training.booster.gather_for_metrics(own)  # of all ranks, each once
    optimum = auroc(probabilities, labels)
    return auroc(logits, labels), None if probabilities.isnan().any() else optimum


if __name__ == "__main__":
    main()
