r"""Stage 3: proximal policy optimization on prompts, with a reward model.

Examples:
    colossalai run --nproc_per_node 2 train_prompts.py --pretrain coati \
      --model llama --rm_path rm --prompt_dataset prompts.json
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
from options import (
    FAMILIES,
    add_sampling,
    at_least,
    check_family,
    load,
    load_causal,
    make_booster,
    make_parser,
    plain_errors,
    sampling_of,
    trained,
    with_adapters,
    writes_whole,
)
from training import save, say
from transformers import AutoTokenizer

import colossalai
from colossalai.chat import PPO, ModelReward, ValueModel, chat_data, load_reward_model, with_value_head


def reward_of(args: argparse.Namespace, tokenizer: Any) -> ValueModel | ModelReward:
    """Return a reward model, which reads the policy's tokens if its tokenizer has the same ones."""
    own = None
    if Path(args.rm_path, "tokenizer_config.json").is_file():
        own = AutoTokenizer.from_pretrained(args.rm_path)
    is_same = own is None or own.get_vocab() == tokenizer.get_vocab()
    if not is_same and args.rm_pretrain is None:
        raise SystemExit(
            f"--rm_path {args.rm_path} has another tokenizer than --pretrain {args.pretrain}, so the critic, "
            "which reads the tokens that are drawn, cannot begin with it: give --rm_pretrain a causal model "
            "that has the tokenizer of --pretrain"
        )
    model = load_reward_model(args.rm_path, dtype=torch.float32)
    return model if is_same else ModelReward(model=model, tokenizer=own)


def read_options() -> argparse.Namespace:
    """Return the options."""
    parser = make_parser(
        __doc__, epochs=5, learned="the answers of an update", dataset="--prompt_dataset", has_batches=False
    )
    add = parser.add_argument
    add("--pretrain_dataset", help="texts that are learned as well, by --ptx_coef")
    add("--rm_path", required=True, help="a folder of train_reward_model.py")
    add(
        "--rm_model",
        choices=(*FAMILIES, "auto"),
        default="auto",
        help="the family of --rm_path; default: auto",
    )
    add("--rm_pretrain", help="a causal model that the critic begins with; default: the reward model")
    counts = {
        "num_episodes": (10, "rounds of --max_timesteps batches; "),
        "max_timesteps": (10, "batches of prompts of an episode; "),
        "update_timesteps": (10, "batches between updates; "),
        "experience_batch_size": (8, "prompts of a batch; "),
        "train_batch_size": (8, "answers of a step; "),
        "ptx_batch_size": (1, "texts beside a batch of prompts; "),
    }
    for name, (default, text) in counts.items():
        add(f"--{name}", type=at_least(1), default=default, help=f"{text}default: %(default)s")
    add("--kl_coef", type=at_least(0.0), default=0.1, help="of the reference; default: %(default)s")
    add("--max_kl", type=float, help="end when the KL from --pretrain is above it for 10 steps in a row")
    add("--ptx_coef", type=at_least(0.0), default=0.9, help="with --pretrain_dataset; default: %(default)s")
    add_sampling(parser)
    args = parser.parse_args()
    if (batches := args.num_episodes * args.max_timesteps) < args.update_timesteps:
        raise SystemExit(
            f"--update_timesteps {args.update_timesteps}: --num_episodes and --max_timesteps make {batches} "
            f"batches in all, so there would be no update; give at most {batches}"
        )
    if args.pretrain_dataset is None:
        for name in ("ptx_coef", "ptx_batch_size"):
            if getattr(args, name) != parser.get_default(name):
                raise SystemExit(f"--{name} without --pretrain_dataset: there are no further texts to learn")
    return args


def main() -> None:
    """Train and save."""
    args = read_options()
    colossalai.launch_from_torch({}, seed=args.seed, verbose=False)
    check_family("--rm_model", args.rm_model, args.rm_path)
    if args.rm_pretrain is not None:
        check_family("--rm_model", args.rm_model, args.rm_pretrain)
    booster = make_booster(args)
    data = chat_data(args.dataset, "prompts", max_size=args.max_datasets_size, subset=args.subset)
    pretrain = chat_data(args.pretrain_dataset, "sft") if args.pretrain_dataset else None
    model, tokenizer = load(args)
    reward = reward_of(args, tokenizer)
    if args.rm_pretrain is None:
        critic = load_reward_model(args.rm_path, dtype=torch.float32)
    else:
        critic = with_value_head(load_causal(args.rm_pretrain))
    # Without its adapters a model is its own reference.
    reference = copy.deepcopy(model) if args.kl_coef > 0 and args.lora_rank == 0 else None
    model, critic = (with_adapters(each, args.lora_rank) for each in (model, critic))
    minibatches = math.ceil(args.experience_batch_size * args.update_timesteps / args.train_batch_size)
    method = PPO(
        reward=reward,
        max_length=args.max_len,
        iterations=args.max_epochs,
        minibatches=minibatches,
        kl_coef=args.kl_coef,
        max_kl=args.max_kl,
        ptx_coef=args.ptx_coef if args.pretrain_dataset else 0.0,
    )
    updates = args.num_episodes * args.max_timesteps // args.update_timesteps
    result = method.fit(
        model,
        torch.optim.AdamW(trained(model), lr=args.lr),
        critic=critic,
        critic_optimizer=torch.optim.AdamW(trained(critic), lr=args.lr),
        reference=reference,
        pretrain=pretrain,
        booster=booster,
        data=data,
        tokenizer=tokenizer,
        **sampling_of(args),
        steps=updates * args.max_epochs * minibatches,
        batch_size=args.experience_batch_size,
        accumulation=args.update_timesteps,
        rows_at_once=args.train_batch_size,
        ptx_batch_size=args.ptx_batch_size,
        max_norm=args.max_norm,
        seed=args.seed,
        log=f"{args.save_path}/log",
        save=args.resume,
        save_every=args.save_interval,
        resume=args.resume,
        on_step=lambda record: say(record, args.log_interval),
    )
    save(result, args, booster=booster, tokenizer=tokenizer, merges=writes_whole(args))


if __name__ == "__main__":
    with plain_errors():
        main()
