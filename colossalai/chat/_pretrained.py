"""Pretrained folders: weights, config and tokenizer, for transformers and `colossalai serve`.

A model with adapters is saved as a folder of peft.
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
    """Save a model in the format of transformers; collective, rank 0 writes.

    A reward model is saved as the `*ForSequenceClassification` of its family with one label. A model with
    adapters is saved as peft does, adapters only; or, with `merges`, as the model with merged adapters.

    Args:
        model: A model, boosted or not.
        folder: Destination, which is created; existing files of the same names are replaced.
        booster: The parallel methods of the model.
        tokenizer: Tokenizer to save with the model.
        shard_mb: Maximum size of a file of weights, in MB.
        merges: Whether to merge adapters into a copy of the weights.

    Raises:
        ValueError: `model` has no config of transformers, or `merges` is set and it has no adapters, or its
            adapters cannot be merged.
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
            f"{type(raw).__name__} has no config, so is not a model of transformers: write its weights with "
            "booster.save_model"
        )
    written = raw_of(model) if not merges else TensorsByName(dict(merged_tensors(model)))
    booster.save_model(written, folder, shard=True, use_safetensors=True, size_per_shard=shard_mb)
    # The config of a model with a head records its class name.
    is_named = isinstance(configured, ValueModel)
    on_writer(partial(write_config, configured, folder, is_named=is_named))
    if tokenizer is not None:
        on_writer(partial(tokenizer.save_pretrained, folder))


def load_reward_model(folder: str | Path, *, dtype: torch.dtype | None = None) -> ValueModel:
    """Load a reward model from a folder of `save_pretrained`, or from a classifier with one label.

    Args:
        folder: The folder.
        dtype: Dtype of its parameters. Default: as saved.

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
