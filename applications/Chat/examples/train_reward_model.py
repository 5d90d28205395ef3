r"""Stage 2: a reward model from comparisons of answers.

Examples:
    colossalai run --nproc_per_node 2 train_reward_model.py --pretrain coati \
      --model llama --dataset pairs.jsonl
"""

from options import make_parser, plain_errors, truth
from training import train

import colossalai
from colossalai.chat import RewardModeling, chat_data, with_value_head

TEST_ROWS = 32


def main() -> None:
    """Train and save."""
    parser = make_parser(__doc__)
    # Two names of one function, -log sigmoid(c - r) = log(1 + exp(r - c)); see colossalai.chat.losses.
    names = ("log_sig", "log_exp")
    parser.add_argument(
        "--loss_fn", "--loss_func", choices=names, default="log_sig", help="one loss by two names"
    )
    parser.add_argument("--test", type=truth, default=False, help=f"try it with the first {TEST_ROWS} rows")
    args = parser.parse_args()
    if args.test and args.max_datasets_size is not None:
        raise SystemExit(f"--test True takes the first {TEST_ROWS} rows: leave --max_datasets_size out")
    colossalai.launch_from_torch({}, seed=args.seed, verbose=False)
    size = TEST_ROWS if args.test else args.max_datasets_size
    data = chat_data(args.dataset, "preference", max_size=size, subset=args.subset)
    train(RewardModeling(max_length=args.max_len), data, args, change=with_value_head)


if __name__ == "__main__":
    with plain_errors():
        main()
