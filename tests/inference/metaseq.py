"""A writer of files as metaseq makes them, from an OPT of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def metaseq_tensors(model: nn.Module, *, is_fused: bool, has_projection: bool) -> dict[str, Tensor]:
    """Return the parameters of an OPT by metaseq's names, as its consolidated checkpoints have them."""
    theirs = dict(model.model.state_dict())
    found = dict(_renamed(theirs))
    for name in [name for name in found if is_fused and ".k_proj." in name]:
        parts = [found.pop(name.replace("k_proj", part)) for part in ("k_proj", "v_proj", "q_proj")]
        found[name.replace("k_proj", "qkv_proj")] = torch.cat(parts)
    found["decoder.version"] = torch.tensor([3.0])
    if has_projection:
        found["decoder.output_projection.weight"] = found["decoder.embed_tokens.weight"].clone()
    return found


def _renamed(theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, value in theirs.items():
        if name.startswith("decoder.final_layer_norm"):
            yield name.replace("final_layer_norm", "layer_norm"), value
        elif name.startswith("decoder.project_"):
            yield name.replace(".weight", "_dim.weight"), value
        else:
            yield name, value


def write_metaseq(
    model: nn.Module, path: Path, *, is_fused: bool = False, has_projection: bool = False, **others: Any
) -> None:
    """Write a `restored.pt`; without `others`, entries beside the weights, these are the whole file."""
    tensors = metaseq_tensors(model, is_fused=is_fused, has_projection=has_projection)
    torch.save({"model": tensors, **others} if others else tensors, path)
