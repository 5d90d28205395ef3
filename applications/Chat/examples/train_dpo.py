r"""Preferences without a reward model: direct preference optimization.

Examples:
    colossalai run --nproc_per_node 2 train_dpo.py --pretrain coati \
      --model llama --dataset pairs.jsonl
"""

from options import make_parser, plain_errors
from training import train

import colossalai
from colossalai.chat import DPO, chat_data


def main() -> None:
    """Train and save."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--beta", type=float, default=0.1, help="strength of the pull towards the initial model"
    )
    parser.add_argument(
        "--kind", choices=("sigmoid", "ipo"), default="sigmoid", help="the loss; default: %(default)s"
    )
    parser.add_argument("--label_smoothing", type=float, default=0.0, help="share of wrong comparisons")
    args = parser.parse_args()
    colossalai.launch_from_torch({}, seed=args.seed, verbose=False)
    data = chat_data(args.dataset, "preference", max_size=args.max_datasets_size, subset=args.subset)
    method = DPO(
        max_length=args.max_len, beta=args.beta, kind=args.kind, label_smoothing=args.label_smoothing
    )
    train(method, data, args)


if __name__ == "__main__":
    with plain_errors():
        main()
