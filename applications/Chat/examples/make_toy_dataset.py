r"""Made-up data for each stage, to see the scripts run before there are real ones.

Examples:
    python make_toy_dataset.py --stage preference --kind sort \
      --save_path pairs.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from colossalai.chat.data import ChatStage, make_toy_data


def main() -> None:
    """Make and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stage", choices=get_args(ChatStage), required=True, help="stage of training that uses the rows")
    add("--save_path", required=True, help="the file")
    add("--kind", choices=("sums", "copy", "sort"), default="sums", help="default: %(default)s")
    add("--size", type=int, default=256, help="rows; default: %(default)s")
    add("--seed", type=int, default=42, help="default: %(default)s")
    args = parser.parse_args()
    try:
        rows = make_toy_data(args.kind, args.size, args.seed, stage=args.stage)
    except ValueError as error:
        parser.error(str(error))
    Path(args.save_path).parent.mkdir(parents=True, exist_ok=True)
    Path(args.save_path).write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{args.size} made-up rows are in {args.save_path}\n")


if __name__ == "__main__":
    main()
