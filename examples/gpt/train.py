"""Train a small GPT on text through the config door: launch, initialize, Engine.

    colossalai run --nproc_per_node 2 examples/gpt/train.py [--config FILE] [--data PATH] [--fresh]

Run again, it goes on from the newest complete checkpoint, with the data order, random states and losses of a
run that was never interrupted.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.cluster.dist_coordinator import priority_execution
from data import TextData, load_text_data
from job import CHECKPOINT_FOLDER, IDENTITY_FILE, Job, build_job, trained_model
from report import METRICS_FILE, PICTURE_FILE, TENSORBOARD_FOLDER, FileReport, Report
from sample import sample_text

import colossalai
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.engine import Engine

SAMPLE_FILE = "sample.txt"
PROMPT = "def "
SAMPLE_TOKENS = 160


def main() -> None:
    started = time.perf_counter()
    args = parse_args()
    config = Config.from_file(args.config)
    colossalai.launch_from_torch(config, backend=args.backend, seed=config.SEED, verbose=False)
    folder = args.output or default_folder(args.data)
    with priority_execution():  # rank 0 prepares the text, the others find it in the cache
        data = load_text_data(args.data, cache=args.cache, vocab_size=config.VOCAB_SIZE)
        if args.fresh:
            remove_run(folder)
    job = build_job(data, folder)
    job.resume(data)
    report = make_report(job, data)
    try:
        report.say(describe(job, data))
        train(job, report)
        loss = validate(job.engine, job.validation_loader)
        report.validation(job.step, loss=loss)
        dist.barrier()  # all end together: those that do not report wait for the one that does
        gpc.destroy()
        finish(job, data, config, report, loss=loss)
        report.say(f"{time.perf_counter() - started:.0f} seconds in all")
    finally:
        report.close()
    if loss >= data.unigram_entropy:
        sys.exit(f"validation loss {loss:.3f} is not below the unigram entropy {data.unigram_entropy:.3f}")


def parse_args() -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.set_defaults(config=str(Path(__file__).with_name("config.py")))
    parser.add_argument(
        "--data", type=Path, help="a .txt or .jsonl file, or a folder (default: Python's library)"
    )
    parser.add_argument("--output", type=Path, help="folder for what the run leaves (default: runs/gpt)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/gpt"), help="folder for tokens")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    return parser.parse_args()


def default_folder(source: Path | None) -> Path:
    """One folder for each text."""
    return Path("runs/gpt") if source is None else Path("runs") / f"gpt-{source.resolve().stem}"


def remove_run(folder: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else."""
    for name in (CHECKPOINT_FOLDER, TENSORBOARD_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (METRICS_FILE, PICTURE_FILE, SAMPLE_FILE, IDENTITY_FILE):
        (folder / name).unlink(missing_ok=True)


def make_report(job: Job, data: TextData) -> Report:
    """One rank reports; all see the loss."""
    if gpc.get_global_rank() != 0:
        return Report()
    return FileReport(
        job.folder,
        first_step=job.step,
        total_steps=gpc.config.TOTAL_STEPS,
        unigram_entropy=data.unigram_entropy,
    )


def describe(job: Job, data: TextData) -> str:
    start = f"resuming at step {job.step}" if job.step else "starting at step 0"
    return (
        f"{job.num_params / 1e6:.1f}M parameters, {gpc.mesh} on {job.engine.device.type}; "
        f"{data.train.size:,} tokens to train on, {data.validation.size:,} to validate on; "
        f"{start} of {gpc.config.TOTAL_STEPS}"
    )


def train(job: Job, report: Report) -> None:
    """Train from the present step to the last, with validations and checkpoints on the way."""
    config, engine = gpc.config, job.engine
    batches = endless(job.train_loader)
    engine.train()
    while job.step < config.TOTAL_STEPS:
        engine.zero_grad()
        engine.execute_schedule(batches, return_output_label=False)
        if not engine.step():
            continue
        lr = engine.optimizer.param_groups[0]["lr"]
        job.lr_scheduler.step()
        job.step += 1
        loss = engine.optimizer.mean_loss.item()  # over all tokens of the step, on all ranks
        report.train(job.step, loss=loss, lr=lr, num_tokens=job.tokens_in_step)
        is_last = job.step == config.TOTAL_STEPS
        if job.step % config.VALIDATE_EVERY == 0 and not is_last:
            report.validation(job.step, loss=validate(engine, job.probe_loader))
        if job.step % config.CHECKPOINT_EVERY == 0 or is_last:
            job.save()


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Go through the epochs of a loader one after the other."""
    while True:
        yield from loader


def validate(engine: Engine, loader: Any) -> float:
    """Return the mean loss over a loader, in nats per token; the model is left in training mode."""
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # of the losses of all tokens, and their number
    for batch in loader:
        _, _, loss = engine.execute_schedule(iter([batch]), forward_only=True, return_output_label=False)
        sums += torch.tensor([loss.item() * engine.loss_weight.item(), engine.loss_weight.item()])
    engine.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def finish(job: Job, data: TextData, config: Config, report: Report, *, loss: float) -> None:
    """Show the results, and where they are; the job has ended, and one process goes on."""
    if not report.is_active:
        return
    sample = sample_text(
        trained_model(job.folder, config),
        data.tokenizer,
        prompt=PROMPT,
        num_tokens=SAMPLE_TOKENS,
        context=config.SEQ_LEN,
    )
    (job.folder / SAMPLE_FILE).write_text(sample)
    report.draw(title=f"GPT after {job.step} steps, {job.step * job.tokens_in_step:,} tokens")
    report.say(f"\n{sample}\n")
    report.say(results(data, loss=loss))
    report.say(f"in {job.folder}: {', '.join(sorted(path.name for path in job.folder.iterdir()))}")


def results(data: TextData, *, loss: float) -> str:
    """Compare the loss with that of the best model that ignores the context."""
    tokens_per_byte = data.validation.size / data.validation_bytes
    rows = (("validation loss", loss), ("unigram entropy", data.unigram_entropy))
    return "\n".join(
        f"{name}  {nats:6.3f} nats per token  perplexity {math.exp(nats):7.1f}  "
        f"{nats / math.log(2) * tokens_per_byte:.3f} bits per byte"
        for name, nats in rows
    )


if __name__ == "__main__":
    main()
