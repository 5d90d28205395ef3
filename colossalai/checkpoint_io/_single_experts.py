"""Weights that a folder has for each expert by itself, as the one tensor of all experts that a model has.

`save_pretrained` of transformers writes the experts of most models one by one, as these models were
published, and `from_pretrained` puts them together:

    mlp.experts.3.gate_proj.weight  (I, H)   or   block_sparse_moe.experts.3.w1.weight
    mlp.experts.3.up_proj.weight    (I, H)                                  .w3
    mlp.experts.3.down_proj.weight  (H, I)                                  .w2

become `mlp.experts.gate_up_proj` (E, 2 I, H) and `mlp.experts.down_proj` (E, H, I). Here nothing is put
together: each matrix is a box of the tensor of all, so that a rank reads those of its own experts, and no
others.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colossalai.checkpoint_io.resharding import StoredShard, StoredTensor
from colossalai.tensor import Box

_SINGLE = re.compile(r"(?P<owner>.*\bexperts)\.(?P<number>\d+)\.(?P<layer>\w+)\.weight")
_PLACES = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}
"""For a layer of one expert, the tensor of all, and which part of its rows it is."""

_NUM_PARTS = {"gate_up_proj": 2, "down_proj": 1}
_FORMER, _PRESENT = ".block_sparse_moe.", ".mlp."


@dataclass(frozen=True, eq=False)
class ExpertShard(StoredShard):
    """The matrix of one expert as a box of the tensor of all.

    Attributes:
        box: Which box.
        matrix: It itself, with a dimension less.
    """

    box: Box
    matrix: StoredTensor

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        self.matrix.read(Box(box.offsets[1:], box.sizes[1:]), out[0])


def with_fused_experts(stored: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return stored tensors by the names of a model, single experts joined if the model has them in one.

    Incomplete sets (an expert is missing, shapes differ) stay under their own names, and do not match.

    Args:
        stored: The tensors of the checkpoint by their names.
        names: Those of the model, on all ranks.
    """
    if not any(name.endswith(f"experts.{fused}") for name in names for fused in _NUM_PARTS):
        return dict(stored)
    has_former = any(_FORMER in name for name in names)
    present = {name: name if has_former else name.replace(_FORMER, _PRESENT) for name in stored}
    parts: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in stored:
        match = _SINGLE.fullmatch(present[name])
        if match and match["layer"] in _PLACES and isinstance(stored[name], StoredTensor):
            fused, part = _PLACES[match["layer"]]
            parts[f"{match['owner']}.{fused}"][int(match["number"]), part] = name
    found = {present[name]: value for name, value in stored.items()}
    for fused, places in parts.items():
        matrices = {place: stored[name] for place, name in places.items()}
        whole = _fused(matrices, _NUM_PARTS[fused.rpartition(".")[2]])
        if whole is not None and fused not in stored:
            for name in places.values():
                del found[present[name]]
            found[fused] = whole
    return found


def _fused(matrices: Mapping[tuple[int, int], StoredTensor], num_parts: int) -> StoredTensor | None:
    """Return the tensor of all experts; None where they are not all there or differ."""
    first = next(iter(matrices.values()))
    num_experts = 1 + max(number for number, _ in matrices)
    kinds = {(matrix.shape, matrix.dtype) for matrix in matrices.values()}
    if len(matrices) != num_experts * num_parts or len(kinds) != 1 or len(first.shape) != 2:
        return None
    rows, columns = first.shape

    def shards() -> Iterator[ExpertShard]:
        for (number, part), matrix in matrices.items():
            yield ExpertShard(Box((number, part * rows, 0), (1, rows, columns)), matrix)

    return StoredTensor((num_experts, num_parts * rows, columns), first.dtype, tuple(shards()))
