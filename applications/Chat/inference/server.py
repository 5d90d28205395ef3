"""The chat server: a trained model behind POST /generate and /generate/stream.

    python server.py coati --quant 8bit --http_host localhost --http_port 7070

It is the same as `colossalai serve coati --quantize int8 --host localhost
--port 7070`, which has many more options.
"""

import argparse
import sys

from colossalai.serving import ServeOptions, serve

QUANTIZE = {"8bit": "int8", "4bit": "int4"}


def main() -> int:
    """Serve until a signal ends the process; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("pretrained", help="a folder of save_pretrained, as the training scripts leave it")
    add("--quant", choices=tuple(QUANTIZE), help="weights in 8 or 4 bits; default: as they were saved")
    add("--http_host", default="127.0.0.1", help="address to listen on; default: this machine only")
    add("--http_port", type=int, default=7070, help="0: a free one, which is printed; default: %(default)s")
    add("--profanity_file", help="words and phrases, one on a line; an answer with one of them is replaced")
    add("--api_key_file", help="the key that clients have to send, which other addresses need")
    args = parser.parse_args()
    options = ServeOptions(
        model=args.pretrained,
        profanity_file=args.profanity_file,
        api_key_file=args.api_key_file,
        engine={"quantize": QUANTIZE[args.quant]} if args.quant else {},
        server={"host": args.http_host, "port": args.http_port},
    )
    try:
        return serve(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
