"""Runs of a method by the scripts of this folder: train by their options, report progress, save."""

import argparse
from typing import Any

import torch
from options import load, make_booster, trained, with_adapters, writes_whole

from colossalai.booster import Booster
from colossalai.chat import GRPO, ChatData, FitResult, TextMethod, save_pretrained
from colossalai.core import global_context as gpc


def train(
    method: TextMethod | GRPO, data: ChatData, args: argparse.Namespace, *, change: Any = None, **options: Any
) -> None:
    """Train a model by the options, and save it.

    Args:
        method: Learning method.
        data: Training data.
        args: The options of `make_parser`.
        change: Makes of the causal model the reward model that is trained; None: it is trained itself.
        options: Further ones of the method's `fit`.
    """
    model, tokenizer = load(args, is_reward=change is not None)
    booster = make_booster(args)
    if change is not None and args.model_path is None:
        model = change(model)
    model = with_adapters(model, args.lora_rank)
    result = method.fit(
        model,
        torch.optim.AdamW(trained(model), lr=args.lr),
        booster=booster,
        data=data,
        tokenizer=tokenizer,
        epochs=args.max_epochs,
        batch_size=args.batch_size,
        accumulation=args.accumulation_steps,
        max_norm=args.max_norm,
        seed=args.seed,
        log=f"{args.save_path}/log",
        save=args.resume,
        save_every=args.save_interval,
        resume=args.resume,
        on_step=lambda record: say(record, args.log_interval),
        **options,
    )
    merges = writes_whole(args, is_reward=change is not None)
    save(result, args, booster=booster, tokenizer=tokenizer, merges=merges)


def say(record: Any, interval: int) -> None:
    """Print every so many records."""
    if gpc.get_global_rank() == 0 and (record["step"] == 1 or record["step"] % interval == 0):
        named = ", ".join(
            f"{name} {value:.4f}" for name, value in record.items() if name not in ("step", "seconds")
        )
        print(f"step {record['step']:.0f}: {named} ({record['seconds']:.2f} s)", flush=True)


def save(
    result: FitResult, args: argparse.Namespace, *, booster: Booster, tokenizer: Any, merges: bool = False
) -> None:
    """Write the model, or its adapters, with the tokenizer; and the optimizer, if requested."""
    save_pretrained(result.model, args.save_path, booster=booster, tokenizer=tokenizer, merges=merges)
    if args.need_optim_ckpt:
        booster.save_optimizer(result.optimizer, f"{args.save_path}/optimizer", shard=True)
    if gpc.get_global_rank() == 0:
        print(f"the model is in {args.save_path}, its curves in {args.save_path}/log", flush=True)
