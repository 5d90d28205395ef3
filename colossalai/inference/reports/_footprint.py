"""Memory of a served model on each rank, counted on the meta device: weights, and what a token keeps.

The model is built, cut and put in codes by the code that loads it, without values; its attention layers are
asked what they keep in a call in which products, embeddings and experts only say their shapes. So nothing
gets memory, nothing is communicated, and what is counted is what will be there.

[Note: tensor ranks hold equally much]
A spec cuts a dimension into equal slices (a vocabulary that ranks do not divide is padded), whichever rank
asks. So the ranks of a stage are counted once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.context import Mesh
from colossalai.inference._build import longest_of
from colossalai.inference._load import EngineOptions, cut_for_ranks, way_of
from colossalai.inference.loading import put_codes
from colossalai.inference.models import ModelClass, resolve_model
from colossalai.inference.paging import Runner, check_layer_types
from colossalai.inference.products import QuantizedWeight, product_parts, row_table_bytes
from colossalai.shardformer import experts_of

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What each rank of a stage holds.

    Attributes:
        ranks: The ranks.
        weight_bytes: Of parameters, codes and buffers; what layers share counts once.
        block_bytes: Of a block of the cache.
        row_table_bytes: Of row tables, where they are asked for and each product keeps one.
    """

    ranks: tuple[int, ...]
    weight_bytes: int
    block_bytes: int
    row_table_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """What the ranks of a served model hold.

    Attributes:
        model: Its name.
        num_params: Of the whole model; shared ones count once.
        dtype: Of what is not in codes.
        way: How weights are stored; None for as they are.
        max_length: Most tokens of a prompt and its answer.
        block_size: Tokens of a block.
        stages: The stages.
    """

    model: str
    num_params: int
    dtype: str
    way: str | None
    max_length: int
    block_size: int
    stages: tuple[StageMemory, ...]

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of full length."""
        return -(-self.max_length // self.block_size)

    def token_bytes(self, stage: StageMemory) -> float:
        """Return the bytes that a rank of a stage keeps of a token."""
        return stage.block_bytes / self.block_size

    def cache_bytes(self, stage: StageMemory, num_requests: int) -> int:
        """Return the bytes of a cache for some requests of full length."""
        return num_requests * self.blocks_per_request * stage.block_bytes

    def num_fitting(self, stage: StageMemory, memory: int) -> int:
        """Return how many requests of full length a rank of a stage has room for.

        Args:
            stage: The stage.
            memory: Bytes of its device; the weights and their row tables go off them.

        Returns:
            That number; -1 where not even the weights fit.
        """
        left = memory - stage.weight_bytes - stage.row_table_bytes
        return -1 if left < 0 else left // stage.block_bytes // self.blocks_per_request


def serving_memory(model: ModelClass, options: EngineOptions, *, tp: int = 1, pp: int = 1) -> ServingMemory:
    """Return what each rank of a served model will hold.

    Args:
        model: What is to be served.
        options: How; of these what shapes the model and its cache.
        tp: Ranks that share each layer.
        pp: Stages that share the layers.

    Raises:
        ValueError: `model` is nothing that can be served, cannot be counted without values, or `tp` or `pp`
            ranks cannot share it; `options` do not fit it.
    """
    resolved = resolve_model(model)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    max_length = longest_of(resolved.config, options.max_length)
    way = way_of(resolved, options)
    whole = resolved.build_shapes(dtype=dtype)
    num_params = sum(param.numel() for param in whole.parameters())
    found_dtype = next(whole.parameters()).dtype
    stages, received = [], None
    for stage in range(pp):
        part = cut_for_ranks(
            whole if pp == 1 else resolved.build_shapes(dtype=dtype),
            Mesh({"pp": pp, "tp": tp}, rank=stage * tp),  # See [Note: tensor ranks hold equally much]
        )
        if way is not None:
            with _META:
                put_codes(part, way)
        runner = Runner(part, block_size=options.block_size, device=_META)
        with _only_shapes(part):
            received = runner.find_shapes(received)
        check_layer_types(runner)
        in_bytes = options.kv_dtype == "int8"
        kept = [replace(shape, is_in_bytes=in_bytes) for shape in runner.shapes.values()]
        if not kept:
            raise ValueError(f"{resolved.name} has no layer with keys and values on stage {stage}")
        stages.append(
            StageMemory(
                ranks=tuple(range(stage * tp, (stage + 1) * tp)),
                weight_bytes=sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers())),
                block_bytes=sum(shape.bytes_of_block(options.block_size) for shape in kept),
                row_table_bytes=sum(map(_row_table_bytes, part.modules())) if options.has_row_tables else 0,
            )
        )
    if options.has_row_tables and not any(stage.row_table_bytes for stage in stages):
        raise ValueError(
            f"has_row_tables=True; no product of {resolved.name} can have one: they are for weights in "
            "float32, bfloat16 or int8"
        )
    return ServingMemory(
        model=resolved.name,
        num_params=num_params,
        dtype=str(found_dtype).removeprefix("torch."),
        way=None if way is None else way.name,
        max_length=max_length,
        block_size=options.block_size,
        stages=tuple(stages),
    )


def _row_table_bytes(layer: nn.Module) -> int:
    """Return the bytes of the row table of a layer; 0 where it has none."""
    parts = product_parts(layer)
    if parts is None:
        return 0
    weight = parts.weight
    if not isinstance(weight, QuantizedWeight):
        has_table = parts.dtype in (torch.float32, torch.bfloat16)
        return row_table_bytes(parts.out_features, weight.shape[1], parts.dtype) if has_table else 0
    has_table = weight.way.rounds_rows
    return row_table_bytes(weight.out_features, weight.in_features, torch.int8) if has_table else 0


@contextmanager
def _only_shapes(model: nn.Module) -> Iterator[None]:
    """Let parts of a model return shapes without computing or communicating within the block."""
    experts = set(experts_of(model))
    stand_ins = [
        (part, found) for part in model.modules() if (found := _stand_in(part, is_experts=part in experts))
    ]
    for part, forward in stand_ins:
        part.forward = forward
    try:
        with _EveryAnswerIsOne():
            yield
    finally:
        for part, _ in stand_ins:
            del part.forward


def _stand_in(part: Any, *, is_experts: bool) -> Callable[..., Tensor] | None:
    """Return what gives empty tensors of the shape that a part would return; None for a part that runs."""
    if is_experts:
        return lambda hidden, *args, **kwargs: torch.empty_like(hidden)
    parts = product_parts(part)
    if parts is not None:
        return partial(_with_features, size=parts.num_outputs if parts.gathered_over else parts.out_features)
    if hasattr(part, "out_first"):  # a layer that ranks share, and whose sum has all features
        return partial(_with_features, size=part.weight.shape[0 if part.out_first else 1])
    if hasattr(part, "embedding_dim"):
        return partial(_looked_up, size=part.embedding_dim, dtype=part.weight.dtype)
    return None


def _with_features(x: Tensor, *, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], size)


def _looked_up(ids: Tensor, *args: Any, size: int, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    return torch.empty(*ids.shape, size, dtype=dtype, device=ids.device)


class _EveryAnswerIsOne(TorchDispatchMode):
    """Answers forwards that ask for the value of an element, such as whether positions follow each other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default):
            return 1
        return func(*args, **(kwargs or {}))
