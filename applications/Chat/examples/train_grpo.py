r"""Rewards of a function: group relative policy optimization on prompts.

Examples:
    colossalai run --nproc_per_node 2 train_grpo.py --pretrain coati \
      --model llama --dataset data.json --reward rewards.py:exact
"""

import argparse
import importlib
import sys
from pathlib import Path

from options import add_sampling, at_least, load, make_parser, plain_errors, sampling_of
from training import train

import colossalai
from colossalai.chat import GRPO, RewardFunction, TimedReward, chat_data


def reward_of(name: str) -> RewardFunction:
    """Return a function (prompt, answer, row) -> number of a Python file."""
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(
            f"{name!r}: there is no file {file!r}; write it as rewards.py:function"
        )
    sys.path.append(str(Path(file).resolve().parent))  # a path that processes of --reward_seconds also have
    module = importlib.import_module(Path(file).stem)
    if module.__file__ is None or not Path(file).samefile(module.__file__):
        raise argparse.ArgumentTypeError(f"{name!r}: there is another module of this name: rename the file")
    if not callable(found := getattr(module, function, None)):
        raise argparse.ArgumentTypeError(f"{name!r}: {file} has no function {function!r}")
    reward: RewardFunction = found
    return reward


def main() -> None:
    """Train and save."""
    parser = make_parser(__doc__, epochs=1)
    add = parser.add_argument
    add("--reward", type=reward_of, required=True, metavar="FILE:FUNCTION", help="of (prompt, answer, row)")
    add("--group_size", type=at_least(2), default=8, help="answers to a prompt; default: %(default)s")
    add_sampling(parser)
    add("--epsilon", type=float, default=0.2, help="limit of a ratio's distance from 1; default: %(default)s")
    add(
        "--kl_coef",
        type=at_least(0.0),
        default=0.0,
        help="holds the model to --pretrain; default: %(default)s",
    )
    add("--max_kl", type=float, help="end when the KL from --pretrain is above it for 10 steps in a row")
    add("--reward_seconds", type=float, help="time limit of a call of --reward, which runs in a process")
    args = parser.parse_args()
    colossalai.launch_from_torch({}, seed=args.seed, verbose=False)
    data = chat_data(args.dataset, "prompts", max_size=args.max_datasets_size, subset=args.subset)
    limit = args.reward_seconds
    method = GRPO(
        reward=args.reward if limit is None else TimedReward(function=args.reward, seconds=limit),
        group_size=args.group_size,
        max_length=args.max_len,
        epsilon=args.epsilon,
        kl_coef=args.kl_coef,
        max_kl=args.max_kl,
    )
    # Without its adapters a model is its own reference.
    reference = load(args)[0] if args.kl_coef > 0 and args.lora_rank == 0 else None
    train(method, data, args, **sampling_of(args), reference=reference)


if __name__ == "__main__":
    with plain_errors():
        main()
