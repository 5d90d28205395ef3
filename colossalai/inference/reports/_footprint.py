"""Memory of a served model on each rank, computed on the meta device: weights, and the cache per token.

The model is built, sharded and quantized by the loading code, without values. Its attention layers report
their cache shapes in a call in which products, embeddings and experts return empty tensors. So no memory is
allocated, nothing is communicated, and the result is exact.

[Note: equal memory of tensor ranks]
A spec shards a dimension into equal slices (an indivisible vocabulary is padded), so the ranks of a stage
have the same memory, and one of them is counted.
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
    """Memory of each rank of a stage.

    Attributes:
        ranks: The ranks.
        weight_bytes: Size of parameters, codes and buffers; shared ones count once.
        block_bytes: Size of a cache block.
        row_table_bytes: Size of row tables, if enabled, with one for each supported product.
    """

    ranks: tuple[int, ...]
    weight_bytes: int
    block_bytes: int
    row_table_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Memory of the ranks of a served model.

    Attributes:
        model: Its name.
        num_params: Number of parameters of the whole model; shared ones count once.
        dtype: Dtype of unquantized tensors.
        way: Format of quantized weights; None for none.
        max_length: Maximum number of tokens of a prompt and its answer.
        block_size: Number of tokens of a block.
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
        """Number of blocks of a request of full length."""
        return -(-self.max_length // self.block_size)

    def token_bytes(self, stage: StageMemory) -> float:
        """Return the cache size per token on a rank of a stage, in bytes."""
        return stage.block_bytes / self.block_size

    def cache_bytes(self, stage: StageMemory, num_requests: int) -> int:
        """Return the cache size for a number of requests of full length, in bytes."""
        return num_requests * self.blocks_per_request * stage.block_bytes

    def num_fitting(self, stage: StageMemory, memory: int) -> int:
        """Return the number of requests of full length that fit on a rank of a stage.

        Args:
            stage: The stage.
            memory: Memory of the device in bytes, including weights and row tables.

        Returns:
            The number; -1 if the weights do not fit.
        """
        left = memory - stage.weight_bytes - stage.row_table_bytes
        return -1 if left < 0 else left // stage.block_bytes // self.blocks_per_request


def serving_memory(model: ModelClass, options: EngineOptions, *, tp: int = 1, pp: int = 1) -> ServingMemory:
    """Compute the memory of each rank of a served model.

    Args:
        model: The model to serve.
        options: Options of the engine; those that affect the model and its cache are used.
        tp: Number of tensor parallel ranks.
        pp: Number of pipeline stages.

    Raises:
        ValueError: `model` cannot be served, cannot be counted without values, or `tp` or `pp` ranks cannot
            share it; or `options` do not fit it.
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
            Mesh({"pp": pp, "tp": tp}, rank=stage * tp),  # See [Note: equal memory of tensor ranks]
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
    """Return the size of a layer's row table in bytes; 0 without one."""
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
    """Make parts of a model return empty tensors without computation or communication within the block."""
    experts = set(experts_of(model))
    stand_ins = [
        (part, found) for part in model.modules() if (found := _stand_in(part, is_experts=part in experts))
    ]
    for part, forward in stand_ins:
        part.forward = forward
    try:
        with _ScalarsAreOne():
            yield
    finally:
        for part, _ in stand_ins:
            del part.forward


def _stand_in(part: Any, *, is_experts: bool) -> Callable[..., Tensor] | None:
    """Return a function that returns empty tensors of a part's output shape; None for a part that runs."""
    if is_experts:
        return lambda hidden, *args, **kwargs: torch.empty_like(hidden)
    parts = product_parts(part)
    if parts is not None:
        return partial(_empty_features, size=parts.num_outputs if parts.gathered_over else parts.out_features)
    if hasattr(part, "out_first"):  # sharded over ranks, with all features after the sum
        return partial(_empty_features, size=part.weight.shape[0 if part.out_first else 1])
    if hasattr(part, "embedding_dim"):
        return partial(_empty_embeddings, size=part.embedding_dim, dtype=part.weight.dtype)
    return None


def _empty_features(x: Tensor, *, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], size)


def _empty_embeddings(ids: Tensor, *args: Any, size: int, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    return torch.empty(*ids.shape, size, dtype=dtype, device=ids.device)


class _ScalarsAreOne(TorchDispatchMode):
    """Returns 1 for the value of any element, which some forwards read (to test positions, for example)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default):
            return 1
        return func(*args, **(kwargs or {}))
