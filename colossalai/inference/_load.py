"""Engine options, and loading of a model (sharded over ranks) and its tokenizer."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.context import Mesh, get_current_device
from colossalai.inference.adapters import check_adapters
from colossalai.inference.loading import load_quantized, load_saved, load_values, quantize_model, saved_way
from colossalai.inference.models import ModelClass, ResolvedModel, resolve_model
from colossalai.inference.paging import as_served
from colossalai.inference.products import QuantizationWay, QuantizedLinear
from colossalai.inference.speculation import SpeculationWay
from colossalai.lazy import materialize
from colossalai.pipeline import cut_model
from colossalai.shardformer import check_shards, shard_experts, shard_model

ModelSource = ModelClass | nn.Module
"""A model to serve: a folder, a name or function of `colossalai.inference.models`, or a model in memory."""


_LEAST_BYTES = 1024  # a number between 1 and this is neither a fraction nor a size in bytes
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        dtype: Dtype of the model and its cache: a name of torch, or "auto" for the dtype of the files.
        checkpoint: File or folder of the values, if not in the model's own folder: a checkpoint of ours, of
            Hugging Face, or metaseq's `restored.pt`.
        block_size: Number of tokens of a cache block.
        kv_memory: Memory of the cache on each rank: a fraction of the memory that is free after the model
            is loaded, or bytes if it is more than 1.
        max_length: Maximum number of tokens of a prompt and its answer. Default: the model's window.
        max_running: Maximum number of concurrent answers.
        max_tokens_per_step: Maximum number of tokens of a step.
        max_queue: Maximum number of queued requests; None for no limit.
        has_prefix_cache: Whether prompts share the blocks of a common prefix.
        is_batch_invariant: Whether a token's logits are bit for bit independent of the batch, at the cost
            of speed.
        has_row_tables: Whether to keep a second copy of weights in a layout that is faster for steps of one
            token: on CPU, for weights in float32, bfloat16 or int8, for each shape that was measured to be
            faster. None: if the copies take at most a tenth of the free memory.
        quantize: Storage of linear weights: "int8" (activations are quantized, too), "int8-weights",
            "int4" or "int4:group"; None for no quantization.
        kv_dtype: "int8" for a cache of keys and values in 8 bits, on CPU; "auto" for the model's dtype.
        speculate: Speculative decoding, without effect on the texts: "ngram:K" or "ngram:K:N" (the K tokens
            that followed an earlier match of up to N last tokens), or "FOLDER:K" (a draft model with the
            same tokens); None to disable.
        is_owned: Whether the model is used by the engine only, so that its parts can be replaced by faster
            ones.
        adapters: Folders of peft adapters, by the names in requests.

    Raises:
        ValueError: A field is out of range.

    Raises:
        ValueError: A field is out of its range.
    """

    dtype: str = "auto"
    checkpoint: str | None = None
    block_size: int = 16
    kv_memory: float = 0.5
    max_length: int | None = None
    max_running: int = 64
    max_tokens_per_step: int = 512
    max_queue: int | None = None
    has_prefix_cache: bool = True
    is_batch_invariant: bool = False
    has_row_tables: bool | None = None
    quantize: str | None = None
    kv_dtype: str = "auto"
    speculate: str | None = None
    is_owned: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; it must be one of {', '.join(map(repr, _DTYPES))}")
        if self.kv_dtype not in ("auto", "int8"):
            raise ValueError(f"kv_dtype={self.kv_dtype!r}; it must be 'auto' or 'int8'")
        if self.quantize is not None:
            QuantizationWay.of(self.quantize)
        if self.speculate is not None:
            SpeculationWay.of(self.speculate)
        if self.has_row_tables and self.is_batch_invariant:
            raise ValueError(
                "has_row_tables=True contradicts is_batch_invariant=True, which computes no product with one "
                "row: leave one of them out"
            )
        folders = {name: os.path.abspath(folder) for name, folder in self.adapters.items()}
        object.__setattr__(self, "adapters", folders)

    def _check_kinds(self) -> None:
        """Reject fields of another type and numbers out of range."""
        for name in ("block_size", "max_running", "max_tokens_per_step", "max_length", "max_queue"):
            value = getattr(self, name)
            if value is not None or name not in ("max_length", "max_queue"):
                check_count(name, value)
        memory = self.kv_memory
        is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
        if not is_number or not (0 < memory <= 1 or _LEAST_BYTES <= memory < math.inf):
            raise ValueError(
                f"kv_memory={memory!r}; it must be a fraction of the free memory up to 1, or bytes, at least "
                f"{_LEAST_BYTES}"
            )
        if self.max_length == 1:
            raise ValueError(
                "max_length=1; it must be at least 2: a token of the prompt and one of the answer"
            )
        for name in ("has_prefix_cache", "is_batch_invariant", "is_owned"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be True or False")
        if self.has_row_tables not in (None, True, False):
            raise ValueError(f"has_row_tables={self.has_row_tables!r}; it must be True, False or None")
        if not isinstance(self.adapters, Mapping):
            raise ValueError(f"adapters={self.adapters!r}; it must be folders by name, {{'name': 'folder'}}")


def check_count(name: str, value: object) -> None:
    """Check that a value is a positive integer.

    Raises:
        ValueError: `value` is not such a number; the message has `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}; it must be a whole number, at least 1")


def load_model(model: ModelSource, options: EngineOptions, mesh: Mesh | None = None) -> nn.Module:
    """Return a model in evaluation mode, or this rank's part of one; collective over the ranks.

    It is on the device of the rank; in a process without ranks, on the current accelerator if there is one.

    Args:
        model: The model to serve. A model in memory is returned as it is.
        options: `dtype`, `checkpoint` and `quantize` are used. `adapters` are only checked here, against the
            whole model, and loaded when an engine is built.
        mesh: The ranks, as (pp, tp); None for this process alone.

    Raises:
        ValueError: `model` is not a causal language model, has no values, or has values or adapters that do
            not fit; or it is in memory and needs another dtype or sharding.
    """
    if isinstance(model, nn.Module):
        found = next(model.parameters()).dtype
        if options.dtype not in ("auto", str(found).removeprefix("torch.")):
            raise ValueError(f"dtype={options.dtype!r}; the model in memory has {found}: cast it first")
        if options.checkpoint is not None:
            raise ValueError("checkpoint is for models that are not in memory: this one has its values")
        if mesh is None:
            check_adapters(model, options.adapters)
        return _quantized_in_memory(as_served(model), options)
    resolved = resolve_model(model)
    checkpoint = checkpoint_of(resolved, options)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    part = resolved.build(dtype=dtype)
    check_adapters(part, options.adapters)
    if mesh is not None:
        part = cut_for_ranks(part, mesh)
    way = way_of(resolved, options)
    if way is None:
        load_values(part, checkpoint)
    elif saved_way(resolved.config) is not None:
        load_saved(part, checkpoint, way)
    else:
        load_quantized(part, checkpoint, way)
    return part.to(get_current_device()).eval()


def checkpoint_of(resolved: ResolvedModel, options: EngineOptions) -> str | Path:
    """Return the path of the values of a model.

    Raises:
        ValueError: `options` name a checkpoint that does not exist, or none for a model without values.
    """
    if options.checkpoint is not None and not os.path.exists(options.checkpoint):
        raise ValueError(f"checkpoint={options.checkpoint!r} does not exist (looked in {os.getcwd()})")
    checkpoint = options.checkpoint or resolved.folder
    if checkpoint is None:
        raise ValueError(f"{resolved.name} has no values of its own: name the file or folder as checkpoint")
    return checkpoint


def way_of(resolved: ResolvedModel, options: EngineOptions) -> QuantizationWay | None:
    """Return the quantization of a model's weights; None for none.

    Raises:
        ValueError: `resolved` was saved with another quantization than that of `options`.
    """
    saved, wanted = saved_way(resolved.config), options.quantize
    way = saved if wanted is None else QuantizationWay.of(wanted)
    if saved is not None and way != saved:
        raise ValueError(f"quantize={wanted!r}; {resolved.name} was saved as {saved.name}: leave it out")
    return way


def _quantized_in_memory(model: nn.Module, options: EngineOptions) -> nn.Module:
    if options.quantize is None or any(isinstance(part, QuantizedLinear) for part in model.modules()):
        return model
    if not options.is_owned:
        raise ValueError(
            f"quantize={options.quantize!r} would change the model in memory, which goes on belonging to its "
            "owner: give it away with is_owned=True, or serve a folder of it"
        )
    return quantize_model(model, QuantizationWay.of(options.quantize))


def load_tokenizer(model: ModelSource, tokenizer: str | os.PathLike[str] | None) -> Any:
    """Return the tokenizer of a model; None without one.

    Args:
        model: The model to serve.
        tokenizer: Folder of the tokenizer. Default: the model's own.

    Raises:
        ValueError: `tokenizer` is not a folder, or has no tokenizer.
    """
    is_given = tokenizer is not None
    folder = tokenizer if is_given else None if isinstance(model, nn.Module) else resolve_model(model).folder
    if folder is None:
        return None
    from transformers import AutoTokenizer

    if not os.path.isdir(folder):
        raise ValueError(f"{os.fspath(folder)!r} is not a folder, so it has no tokenizer")
    has_one = any(name.startswith(("tokenizer", "vocab", "merges")) for name in os.listdir(folder))
    if not has_one and not is_given:
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(folder)!r} has no tokenizer that can be read: {error}") from error


def cut_for_ranks(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the layers of a model over the axis `tp` and its blocks over `pp`, and return this rank's part.

    Args:
        model: The model, the same on all ranks; modified in place. A lazily built one stays lazy.
        mesh: The ranks, as (pp, tp).

    Raises:
        ValueError: `model` has layers that cannot be sharded over the ranks, or fewer blocks than stages.
    """
    stages = mesh.axis("pp")
    if stages.size > 1:
        model = cut_model(model, stages.size, [stages.rank], balance="parameters")
    if mesh.axis_size("tp") > 1:
        check_tensor_ranks(model, mesh.axis_size("tp"))
        shard_model(model, mesh)
        shard_experts(model, mesh)
    return model


def empty_part(config: Any, dtype: torch.dtype, mesh: Mesh | None, *, is_lazy: bool = False) -> nn.Module:
    """Return this rank's part of a model in evaluation mode, with uninitialized values.

    No random number is drawn. Buffers outside checkpoints, such as rotary frequencies, have their values.

    Args:
        config: Config of transformers.
        dtype: Dtype of the parameters.
        mesh: The ranks, with axes `pp` and `tp`; None for the whole model.
        is_lazy: Whether the part stays without memory, to inspect shapes and shards only.

    Raises:
        ValueError: `config` has layers that cannot be sharded over the ranks, or fewer blocks than stages.
    """
    part = resolve_model(lambda: config).build(dtype=dtype)
    if mesh is not None:
        part = cut_for_ranks(part, mesh)
    if is_lazy:
        return part
    return materialize(part).requires_grad_(False).to(get_current_device()).eval()


def check_tensor_ranks(model: nn.Module, num_ranks: int) -> None:
    """Check that a model has layers that can be sharded.

    Args:
        model: The model.
        num_ranks: Number of tensor parallel ranks.

    Raises:
        ValueError: `model` has only layers of classes without rules.
    """
    if not check_shards(model, num_ranks):
        raise ValueError(
            f"{type(model).__name__} has no layers that {num_ranks} tensor ranks could share: there are no "
            "rules for its classes (register_rule of colossalai.shardformer), and it has no tp_plan"
        )
