"""Entry point of a rank that `colossalai serve` starts through the launcher."""

import sys

from colossalai.launcher import refuse
from colossalai.serving.command._serve import ServeOptions, serve_rank

if __name__ == "__main__":
    try:
        serve_rank(ServeOptions.from_json(sys.argv[1]))
    except ValueError as error:
        refuse(error)
