r"""Prompts for train_prompts.py: questions of a data set, without answers.

Examples:
    python generate_prompt_dataset.py --dataset_path data.json \
      --save_path prompt.json --sample_size 512
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from colossalai.chat import chat_data

ANSWERS = ("output", "completion", "chosen", "rejected", "messages")


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset_path", required=True, help="rows with an instruction, a prompt, or messages")
    add("--subset", help="subset of a data set in the cache of the library datasets")
    add("--save_path", default="prompt.json", help="default: %(default)s")
    add("--sample_size", type=int, default=16384, help="rows; all if there are fewer; default: %(default)s")
    add("--seed", type=int, default=42, help="default: %(default)s")
    args = parser.parse_args()
    try:
        if args.sample_size < 1:
            raise ValueError(f"--sample_size {args.sample_size}: give at least 1")
        data = chat_data(args.dataset_path, "prompts", subset=args.subset)
    except ValueError as error:
        parser.error(str(error))
    size = min(args.sample_size, len(data))
    places = random.Random(args.seed).sample(range(len(data)), size)
    rows = [{"id": number, **prompt_of(data[place])} for number, place in enumerate(places)]
    Path(args.save_path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows, ensure_ascii=False, indent=1, default=str)  # times of a parquet file, too
    Path(args.save_path).write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{size} of {len(data)} prompts are in {args.save_path}\n")


def prompt_of(row: Any) -> dict[str, Any]:
    """Return a row without its answers; reward functions can use its other keys."""
    kept = {key: value for key, value in row.items() if key not in (*ANSWERS, "id")}
    if kept.get("prompt") is None and kept.get("instruction") is None:  # a table has all columns
        kept["messages"] = [dict(message) for message in row.dialogue.prompt]
    return kept


if __name__ == "__main__":
    main()
