r"""Stage 1: supervised fine-tuning on instructions and answers.

Examples:
    colossalai run --nproc_per_node 2 train_sft.py --pretrain path \
      --model llama --dataset data.json
"""

from options import make_parser, plain_errors
from training import train

import colossalai
from colossalai.chat import SFT, chat_data


def main() -> None:
    """Train and save."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--pack",
        action="store_true",
        help="put texts together into sequences of --max_len tokens, in which none sees another",
    )
    args = parser.parse_args()
    colossalai.launch_from_torch({}, seed=args.seed, verbose=False)
    data = chat_data(args.dataset, "sft", max_size=args.max_datasets_size, subset=args.subset)
    train(SFT(max_length=args.max_len, pack=args.pack), data, args)


if __name__ == "__main__":
    with plain_errors():
        main()
