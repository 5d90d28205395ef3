r"""One answer of a trained model, at the command line.

Examples:
    python inference.py --model_path coati --input "Name the longest river." \
      --max_length 100
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from options import FAMILIES, check_family

from colossalai.inference import ALPACA_STOP, LLM, SamplingParams, dialogue_text


def main() -> None:
    """Print the answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model_path", required=True, help="a folder of the training scripts, also of adapters")
    add("--model", choices=(*FAMILIES, "auto"), default="auto", help="its family; default: %(default)s")
    add("--pretrain", help="the model that adapters belong to; default: the one they were trained on")
    add("--input", required=True, help="the prompt")
    add("--raw", action="store_true", help="continue the text as it is, without a template")
    add("--max_length", type=int, default=100, help="most tokens of the answer; default: %(default)s")
    add("--temperature", type=float, default=1.0, help="0 takes the most likely token; default: %(default)s")
    add("--top_k", type=int, default=50, help="default: %(default)s")
    add("--top_p", type=float, default=0.95, help="default: %(default)s")
    add("--seed", type=int, help="the same answer again")
    args = parser.parse_args()
    try:
        sys.stdout.write(answer(args) + "\n")
    except ValueError as error:
        parser.error(str(error))


def answer(args: argparse.Namespace) -> str:
    """Return the model's answer."""
    params = SamplingParams(
        max_tokens=args.max_length,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    adapters = Path(args.model_path, "adapter_config.json")
    folder, given = args.model_path, {}
    if adapters.is_file():
        folder = args.pretrain or json.loads(adapters.read_text())["base_model_name_or_path"]
        given = {"adapters": {"trained": args.model_path}}
    elif args.pretrain is not None:
        raise ValueError(f"--pretrain {args.pretrain}: {args.model_path} is a whole model; leave it out")
    check_family("--model", args.model, folder)
    llm = LLM(folder, **given)
    if llm.tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: save it with the model")
    prompt: str | list[int] = args.input
    if not args.raw:
        text, has_special_tokens = dialogue_text([(args.input, "")], llm.tokenizer)
        prompt = llm.tokenizer(text, add_special_tokens=not has_special_tokens)["input_ids"]
        if not llm.tokenizer.chat_template:
            params = replace(params, stop=(ALPACA_STOP,))
    return llm.generate([prompt], params, adapter="trained" if given else None)[0].text


if __name__ == "__main__":
    main()
