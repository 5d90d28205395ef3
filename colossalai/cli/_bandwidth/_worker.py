"""Worker of `colossalai check --bandwidth`: every rank profiles one mesh of all ranks.

    python -m colossalai.cli._bandwidth._worker SHAPE FILE

Rank 0 shows the progress and writes the file for the parent process.
"""

import json
import math
import sys

import torch

from colossalai.context import global_context, launch_from_torch
from colossalai.device import DeviceMesh


def main(shape_text: str, file: str) -> None:
    """Measure, and write the result on rank 0."""
    launch_from_torch({}, verbose=False)
    shape = json.loads(shape_text)
    mesh = DeviceMesh(torch.arange(math.prod(shape)), shape)
    mesh.profile()
    mesh.save(file)
    global_context.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
