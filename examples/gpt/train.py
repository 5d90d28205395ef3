r"""Train a small GPT on text: launch, colossalai.initialize, Engine.

    colossalai run --nproc_per_node 2 examples/gpt/train.py
    colossalai run --nproc_per_node 2 examples/gpt/train.py --data texts \
      --fresh
    colossalai run --nproc_per_node 4 examples/gpt/train.py \
      --config examples/gpt/config_hybrid.py

Run again, it goes on from the newest complete checkpoint, with the data order,
random states and losses of a run that was never interrupted.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build import Training, build_training
from folder import CHECKPOINT_FOLDER, claim, default_folder, remove_run, write_results
from report import FileReport, Report
from tokens import load_text_data

import colossalai
from colossalai.checkpoint_io import latest_training_state
from colossalai.cluster import DistCoordinator
from colossalai.context import Config, ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine


def main() -> None:
    started = time.perf_counter()
    args = parse_args()
    seed = Config.from_file(args.config).SEED
    colossalai.launch_from_torch(args.config, backend=args.backend, seed=seed, verbose=False)
    config = gpc.config  # with the values of `colossalai run --set`
    if seed != config.SEED:
        raise ValueError(f"SEED={config.SEED} comes too late, after the launch: change it in {args.config}")
    folder = args.output or default_folder(args.data)
    num_microbatches = (config.get("gradient_accumulation") or 1) * gpc.get_world_size(ParallelMode.DATA)
    batch_size = config.BATCH_SIZE * num_microbatches
    rank_0_first = DistCoordinator().priority_execution  # the others read the files of rank 0
    with rank_0_first():
        data = load_text_data(args.data, cache=args.cache, vocab_size=config.VOCAB_SIZE)
        if args.fresh:
            remove_run(folder)
    is_new = latest_training_state(folder / CHECKPOINT_FOLDER) is None
    with rank_0_first():
        claim(folder, data, config, batch_size=batch_size, is_new=is_new)
    training = build_training(data, config)
    resumed = training.engine.load(folder / CHECKPOINT_FOLDER)
    step = resumed.step if resumed else 0
    report = Report()  # a silent report; all ranks have the loss
    if gpc.get_global_rank() == 0:
        report = FileReport(
            folder, first_step=step, total_steps=config.TOTAL_STEPS, unigram_entropy=data.unigram_entropy
        )
    try:
        report.say(
            f"on {training.engine.device.type}: {data.train.size:,} tokens to train on, "
            f"{data.validation.size:,} to validate on; "
            f"{'resuming' if step else 'starting'} at step {step} of {config.TOTAL_STEPS}"
        )
        report.say(f"Ctrl-C stops it; started again, it goes on. The losses are drawn in {folder}/loss.png")
        train(training, config, report, folder, step=step, num_tokens=batch_size * config.SEQ_LEN)
        loss = validate(training.engine, training.validation_loader)
        report.validation(config.TOTAL_STEPS, loss=loss)
        dist.barrier()  # all end together: the other ranks wait for the reporting one
        gpc.destroy()
        write_results(folder, data, config, report, loss=loss)
        report.say(f"{time.perf_counter() - started:.0f} seconds in all")
    finally:
        report.close()
    if loss >= data.unigram_entropy:
        sys.exit(f"validation loss {loss:.3f} is not below the unigram entropy {data.unigram_entropy:.3f}")


def parse_args() -> argparse.Namespace:
    parser = colossalai.get_default_parser()
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(config=str(Path(__file__).with_name("config.py")))
    parser.add_argument(
        "--data", type=Path, help="a .txt or .jsonl file, or a folder (default: Python's library)"
    )
    parser.add_argument("--output", type=Path, help="folder for the results of the run (default: runs/gpt)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/gpt"), help="folder for tokens")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    return parser.parse_args()


def train(
    training: Training, config: Config, report: Report, folder: Path, *, step: int, num_tokens: int
) -> None:
    """Train from the present step to the last, with validations and checkpoints."""
    engine = training.engine
    batches = endless(training.train_loader)
    engine.train()
    while step < config.TOTAL_STEPS:
        engine.zero_grad()
        engine.execute_schedule(batches, return_output_label=False)
        if not engine.step():
            continue
        lr = engine.optimizer.param_groups[0]["lr"]
        training.lr_scheduler.step()
        step += 1
        loss = engine.optimizer.mean_loss.item()  # over all tokens of the step, on all ranks
        report.train(step, loss=loss, lr=lr, num_tokens=num_tokens)
        is_last = step == config.TOTAL_STEPS
        if step % config.VALIDATE_EVERY == 0 and not is_last:
            report.validation(step, loss=validate(engine, training.probe_loader))
        if step % config.CHECKPOINT_EVERY == 0 or is_last:
            engine.save(folder / CHECKPOINT_FOLDER, step=step)


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


if __name__ == "__main__":
    main()
