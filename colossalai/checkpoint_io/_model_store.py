"""The state dict of a model as a store, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io._entries import Entry
from colossalai.checkpoint_io._index import Stems
from colossalai.checkpoint_io._parts import merge_by_name, prefix_of, with_other_ranks
from colossalai.checkpoint_io._store import Kind, Store
from colossalai.checkpoint_io._tree import pack, unpack

_OTHERS = "extra state"  # under it are the values that are not tensors


def model_store(module: nn.Module, *, prefix: str = "") -> Store:
    """Return what is to be saved of a model: its own tensors, and whatever else its state dict holds.

    Collective: under a pipeline it is what all stages hold.
    """
    # keep_vars: the parameters themselves, by whose identity tied ones are known.
    state = {prefix_of(module) + name: value for name, value in module.state_dict(keep_vars=True).items()}
    values = {prefix + name: value for name, value in state.items()}
    return with_other_ranks(values, merge=merge_by_name, as_store=_as_store)


def stored_values(store: Store) -> dict[str, Any]:
    """Return the values of the state dict that a store was made of.

    Raises:
        ValueError: The store is none that a model was made of.
    """
    others = unpack(store.tree, store.tensors) if store.tree is not None else {}
    if not isinstance(others, dict) or not all(isinstance(name, str) for name in others):
        raise ValueError("damaged checkpoint: the values that are no tensors have no names")
    inner = pack(others, at=_OTHERS)[1].keys()
    return {name: tensor for name, tensor in store.tensors.items() if name not in inner} | others


def _as_store(values: Mapping[str, Any]) -> Store:
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor | Entry)}
    others = {name: value for name, value in values.items() if name not in tensors}
    tree, inner = pack(others, at=_OTHERS)
    return Store(tensors | inner, tree if others else None)


def _split(content: Any) -> Store:
    if isinstance(content, nn.Module):  # a pickled one, which the caller has allowed
        content = content.state_dict()
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"there are no weights by name in it, but a {type(content).__name__}")
    if {"epoch", "model"} <= content.keys():
        raise ValueError("it was written by save_checkpoint: read it with load_checkpoint")
    return _as_store(content)


MODEL = Kind("model", Stems(torch="pytorch_model", safetensors="model"), join=stored_values, split=_split)
