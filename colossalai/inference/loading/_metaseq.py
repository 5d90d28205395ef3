"""Checkpoints of served models: our own formats, those of Hugging Face, and metaseq's for OPT.

They differ in names. The model has the names of transformers; a file or folder of Hugging Face may have those
of an older version, or of the model without its head. metaseq's file of OPT, `restored.pt`, is a dictionary
of torch whose entry "model" contains

    decoder.version                                    a version of fairseq; ignored
    decoder.embed_tokens.weight                        (vocabulary, width)
    decoder.output_projection.weight                   the same values again, or missing: it is tied
    decoder.embed_positions.weight                     (positions + 2, width): position 0 is row 2, as in
                                                       transformers
    decoder.layers.N.self_attn.{q,k,v,out}_proj.*      (width, width) and (width,)
    decoder.layers.N.self_attn.qkv_proj.*              or the first three concatenated: key, value, query
    decoder.layers.N.{self_attn_layer_norm, fc1, fc2, final_layer_norm}.*
    decoder.layer_norm.*                               the norm after the last block
    decoder.project_{in,out}_dim.weight                if the embedding has another width

The order in `qkv_proj` is that of metaseq's sequence-parallel block, in spite of the name (transformers, pull
request 21519).
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io import (
    LoadReport,
    ModelLoadPlan,
    OpenedModel,
    StoredTensor,
    fill_model,
    open_model,
    set_tied_names,
)
from colossalai.lazy import is_lazy, materialize
from colossalai.pipeline import ModelStage
from colossalai.tensor import Box

_OF_METASEQ = "decoder."
_VERSION = "decoder.version"
_RENAMED: Mapping[str, str] = {
    "decoder.layer_norm.weight": "decoder.final_layer_norm.weight",
    "decoder.layer_norm.bias": "decoder.final_layer_norm.bias",
    "decoder.project_in_dim.weight": "decoder.project_in.weight",
    "decoder.project_out_dim.weight": "decoder.project_out.weight",
    "decoder.output_projection.weight": "lm_head.weight",
}
_FUSED, _ORDER = ".self_attn.qkv_proj.", ("k_proj", "v_proj", "q_proj")
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.masked_bias$")
"""Buffers that older versions of transformers saved, and newer ones compute."""


def open_checkpoint(path: str | Path) -> OpenedModel:
    """Open the weights of a checkpoint; collective. Only plain values and tensors are unpickled.

    Args:
        path: A folder or file of ours (also a training state), a `save_pretrained` folder or one of its
            files, or metaseq's `restored.pt`.

    Raises:
        ValueError: `path` is damaged, contains no weights, or requires code to be unpickled.
        OSError: `path` cannot be read.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):  # metaseq's arguments, next to "model"
        return open_model(path, content=_weights_in)


def load_values(model: nn.Module, checkpoint: str | Path | OpenedModel) -> LoadReport:
    """Load the values of a checkpoint into a model, in the model's dtype; collective.

    Args:
        model: A model of transformers, or a stage of one. It may be sharded over ranks: each copies its own
            slices. A lazily built one is materialized here, without its initial values.
        checkpoint: As for `open_checkpoint`, or its result.

    Returns:
        A report without mismatches, which would have raised an error.

    Raises:
        ValueError: `checkpoint` cannot be opened, or differs from the model in names or shapes (the message
            lists all); no value was overwritten.
        OSError: `checkpoint` cannot be read.
    """
    opened = checkpoint if isinstance(checkpoint, OpenedModel) else open_checkpoint(checkpoint)
    if is_lazy(model):
        materialize(model)
    return fill_from(model, opened)


def fill_from(
    model: nn.Module,
    checkpoint: str | Path | OpenedModel,
    *,
    apply: Callable[[ModelLoadPlan], None] | None = None,
) -> LoadReport:
    """Load the values of a checkpoint into a model, by the names of transformers; see `load_values`.

    Args:
        model: The model.
        checkpoint: The checkpoint.
        apply: Function that copies the values, for models that may be lazy; None for a materialized one.
    """
    opened = checkpoint if isinstance(checkpoint, OpenedModel) else open_checkpoint(checkpoint)
    for stage in model.modules():
        if isinstance(stage, ModelStage):
            _mark_ties(stage)
    return fill_model(model, opened, rename=NamesOf(model), any_dtype=True, apply=apply)


@dataclass(frozen=True)
class NamesOf:
    """Maps the tensor names of a checkpoint to those of a model of transformers.

    Attributes:
        model: The model, or a stage of it.
    """

    model: nn.Module

    def __call__(self, stored: dict[str, Any], names: Set[str]) -> dict[str, Any]:
        """Return the tensors by the model's names; a tensor without a match keeps its own.

        Args:
            stored: The tensors by their names in the checkpoint.
            names: All names of the model, over all ranks.
        """
        whole: Any = self.model.model if isinstance(self.model, ModelStage) else self.model
        is_opt = getattr(getattr(whole, "config", None), "model_type", None) == "opt"
        if is_opt and all(name.startswith(_OF_METASEQ) for name in stored):
            stored = dict(_as_transformers(stored))
        stored = _rename_old(stored, names, whole)
        stored = _with_base_prefix(stored, names, getattr(whole, "base_model_prefix", ""))
        former = [*_FORMER_BUFFERS, *(getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ())]
        return {
            name: value
            for name, value in stored.items()
            if name in names or not any(re.search(pattern, name) for pattern in former)
        }


def _mark_ties(stage: ModelStage) -> None:
    """Mark parameters shared with other stages as tied, so that a checkpoint may have either name."""
    params = dict(stage.named_parameters(remove_duplicate=False))
    for tie in stage.ties:
        for name in tie.names:
            if name in params:
                set_tied_names(params[name], tie.names)


def _weights_in(content: object) -> object:
    """Return the weights in the content of a torch file, which may have other entries."""
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        return content["model"]
    return content


def _as_transformers(stored: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield tensors of metaseq's OPT by the names of transformers; query, key and value are split."""
    for name, value in stored.items():
        if name == _VERSION:
            continue
        before, fused, after = name.partition(_FUSED)
        if not fused or not isinstance(value, StoredTensor) or value.shape[0] % len(_ORDER):
            yield _RENAMED.get(name, name), value
            continue
        rows, *rest = value.shape
        size = rows // len(_ORDER)
        for number, part in enumerate(_ORDER):
            box = Box((number * size, *(0 for _ in rest)), (size, *rest))
            yield f"{before}.self_attn.{part}.{after}", value.part(box)


def _rename_old(stored: dict[str, Any], names: Set[str], model: Any) -> dict[str, Any]:
    """Map tensor names of older versions of transformers to the current ones."""
    if not any(name not in names for name in stored) or not hasattr(model, "is_custom_code"):
        return stored
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [
        each
        for each in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(each, WeightRenaming)
    ]
    found = {}
    for name, value in stored.items():
        present = name
        for each in renamings if name not in names else ():
            present, _ = each.rename_source_key(present)
        found[present] = value
    return found


def _with_base_prefix(stored: dict[str, Any], names: Set[str], prefix: str) -> dict[str, Any]:
    """Add the prefix of the base model to the names of a model saved without its head."""
    start = f"{prefix}."
    if not prefix or any(name.startswith(start) for name in stored):
        return stored
    return {name if name in names else start + name: value for name, value in stored.items()}
