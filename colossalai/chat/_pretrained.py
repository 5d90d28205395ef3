"""Pretrained folders: weights, config and tokenizer, which transformers opens, and `colossalai serve`.

Of a model with adapters, the folder is one of peft's.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.booster import (
    Booster,
    TensorsByName,
    has_adapters,
    merged_tensors,
    raw_of,
    refuse_unmergeable,
    save_adapters,
    with_config,
    write_config,
)
from colossalai.chat._heads import CLASSIFIER, ValueModel, with_value_head
from colossalai.checkpoint_io import load_model, on_writer


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    booster: Booster,
    tokenizer: Any = None,
    shard_mb: int = 1024,
    merges: bool = False,
) -> None:
    """Write a model as transformers does; every rank calls it, rank 0 writes.

    A reward model is written as the `*ForSequenceClassification` of its family with one label. Of a model
    with adapters these are written, as peft does; or with `merges` the model that they are added into.

    Args:
        model: A model of `fit`, or one that was boosted, or not.
        folder: Where to; it is made, and what has the same names in it is replaced.
        booster: The parallel methods of the model.
        tokenizer: Written beside it.
        shard_mb: Largest size of a file of weights, in MB.
        merges: Whether adapters are added into the weights, of which a copy is made.

    Raises:
        ValueError: `model` has no config of transformers, or `merges` is set and it has no adapters, or ones
            that cannot be merged.
        OSError: `folder` cannot be written.
    """
    if merges and not has_adapters(model):
        raise ValueError("merges=True, and the model has no adapters: leave it out")
    if has_adapters(model) and not merges:
        save_adapters(model, folder)
        if tokenizer is not None:
            on_writer(partial(tokenizer.save_pretrained, folder))
        return
    raw: Any = raw_of(model)
    if merges:
        refuse_unmergeable(raw)
        raw = raw.get_base_model()
    configured = with_config(raw)
    if configured is None:
        raise ValueError(
            f"{type(raw).__name__} has no config, so is no model of transformers: write its weights with "
            "booster.save_model"
        )
    written = raw_of(model) if not merges else TensorsByName(dict(merged_tensors(model)))
    booster.save_model(written, folder, shard=True, use_safetensors=True, size_per_shard=shard_mb)
    # The config of a model with a head has the name of its class.
    is_named = isinstance(configured, ValueModel)
    on_writer(partial(write_config, configured, folder, is_named=is_named))
    if tokenizer is not None:
        on_writer(partial(tokenizer.save_pretrained, folder))


def load_reward_model(folder: str | Path, *, dtype: torch.dtype | None = None) -> ValueModel:
    """Return a reward model from a folder of `save_pretrained`, or of a classifier with one label.

    Args:
        folder: The folder.
        dtype: Of its parameters; None: as they were saved.

    Raises:
        ValueError: `folder` has a model of another kind.
        OSError: `folder` cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    named = (config.architectures or [""])[0]
    if not named.endswith(CLASSIFIER) or config.num_labels != 1:
        raise ValueError(
            f"{str(folder)!r} has a {named or 'model of no known class'} with {config.num_labels} labels; a "
            f"reward model is a ...{CLASSIFIER} with one: train one with RewardModeling, or put a head on a "
            "causal model with with_value_head"
        )
    model = with_value_head(AutoModelForCausalLM.from_config(config, dtype=config.dtype))
    load_model(model, folder)
    return model if dtype is None else model.to(dtype)
