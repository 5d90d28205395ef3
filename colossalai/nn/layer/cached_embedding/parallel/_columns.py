"""Cached embeddings whose columns are on several ranks."""

import glob
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from colossalai.communication import all_gather, copy_forward_reduce_backward
from colossalai.context import Axis
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._host_rows import HostRows
from colossalai.nn.layer.cached_embedding._prefetch import IdsOf, PrefetchLoader, prefetch
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy
from colossalai.nn.layer.cached_embedding._table import check_not_lazy
from colossalai.nn.layer.cached_embedding.parallel._batches import (
    BatchExchange,
    Collected,
    IdsOfRanks,
    RankBags,
    joined,
)
from colossalai.nn.layer.cached_embedding.parallel._exchange import (
    BagExchange,
    axes_along,
    batch_axis,
    two_dims,
)
from colossalai.nn.layer.tensor_parallel import launched_job
from colossalai.tensor import ShardingSpec

Batch = TypeVar("Batch")

_BLOCK_BYTES = 1 << 24  # gathered or drawn at a time


class ParallelCachedEmbeddingBag(CachedEmbeddingBag):
    """`CachedEmbeddingBag` whose columns are divided among the data-parallel ranks.

    Each rank has all rows of its columns, in a table and a cache of its own. It is given the ids of the whole
    batch, or of its part of it (`local_batches`), and returns the bags of its part of the batch; see [Note:
    batches of several ranks]. Dense layers go under `torch.nn.parallel.DistributedDataParallel`, the bag
    itself does not.

    A forward of b bags sends (b - b / R) embedding_dim / R elements to other ranks, the backward as many.
    With `local_batches` it sends the lengths and ids of the rank's part, 8 bytes each, to R - 1 ranks.

    `weight` has the columns of this rank. `state_dict()` is that of `torch.nn.EmbeddingBag`, in host memory:
    all ranks call it. States of the optimizer are those of the columns of this rank.

    Args:
        num_embeddings: Number of rows of the table.
        embedding_dim: Width of a row, a multiple of the number of ranks.
        padding_idx: Id that does not contribute to a bag and has no gradient.
        max_norm: Refused; it would change rows in the forward.
        norm_type: The p of `max_norm`; without effect.
        scale_grad_by_freq: Whether a gradient is divided by how often its id is in the batch.
        sparse: Whether gradients are sparse.
        _weight: The whole table, the same on all ranks; each takes its columns. Default: normal values.
        mode: Reduction of the rows of a bag: "sum", "mean" or "max".
        include_last_offset: Whether `offsets` ends with the number of ids.
        dtype: Data type of the table.
        device: Device of the cache.
        cache_ratio: Share of the rows that the cache holds, above 0 and up to 1.
        ids_freq_mapping: (num_embeddings,): how often each id is used. Default: the smaller, the more often.
        warmup_ratio: Share of the cache that is filled with the most frequent rows at once.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pin_weight: Whether the table is in pinned memory. Default: where the cache is on an accelerator.
        evict_strategy: Order in which rows are evicted.
        weight_path: File of the table. Several ranks have a file each, with "-00000-of-00002" in its name.
        overflow: See `CachedEmbeddingBag`.
        local_batches: Whether each rank is given its own part of the batch, as from a `DistributedSampler`;
            else the whole batch, the same on all ranks.
        name: Name of the table in error messages.

    Attributes:
        embedding_dim: Width of a row over all ranks.
        embedding_dim_per_partition: Number of columns of this rank.

    Raises:
        ValueError: An argument is out of range, the ranks do not divide `embedding_dim`, or they share
            sequences.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cache_ratio: float = 0.01,
        ids_freq_mapping: Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        weight_path: str | Path | None = None,
        overflow: str = "error",
        local_batches: bool = False,
        name: str = "",
    ) -> None:
        check_not_lazy(type(self).__name__)
        axis = batch_axis()
        num_embeddings, embedding_dim = check_shape(num_embeddings, embedding_dim)
        name = name or f"{type(self).__name__}({num_embeddings}, {embedding_dim})"
        if embedding_dim % axis.size:
            raise ValueError(
                f"{name} has {embedding_dim} columns, which {axis.size} ranks do not divide: make it a "
                f"multiple of {axis.size}, or use ParallelCachedEmbeddingBagTablewise"
            )
        width = embedding_dim // axis.size
        if _weight is not None:
            _check_table(_weight, (num_embeddings, embedding_dim))
            _weight = _weight if axis.size == 1 else _weight[:, axis.rank * width :][:, :width].contiguous()
        # Before the base class: it draws the table.
        self._exchange = BagExchange(axis, name)
        self._batches = BatchExchange(axis, name)
        self.local_batches = local_batches
        super().__init__(
            num_embeddings,
            width,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            mode,
            include_last_offset,
            dtype,
            device,
            cache_ratio,
            ids_freq_mapping,
            warmup_ratio,
            buffer_size,
            pin_weight,
            evict_strategy,
            weight_path=None if weight_path is None else _path_of_rank(Path(weight_path), axis),
            overflow=overflow,
            name=name,
        )
        self.embedding_dim = embedding_dim
        self.embedding_dim_per_partition = width
        self.cache_weight_mgr.axis = axis
        if axis.size > 1:
            shape = (num_embeddings, embedding_dim)
            self.cache_weight_mgr.cut = ShardingSpec(shape, ((), axes_along(axis)), axis.mesh)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        shape_hook: Callable[[Tensor], Tensor] | None = None,
        scatter_dim: int = 0,
        gather_dim: int = -1,
    ) -> Tensor:
        """Reduce the rows of each bag of the whole batch; return those of this rank's part of the batch.

        Args:
            input: Ids of the whole batch, the same on all ranks, or of this rank's part with `local_batches`:
                (bags, ids), or (ids,) with `offsets`.
            offsets: (bags,): where each bag begins.
            per_sample_weights: A factor for each id, of the shape of `input`; for mode "sum".
            shape_hook: Function of the output of all bags, (bags, embedding_dim_per_partition); with
                `local_batches` of those of each part.
            scatter_dim: Dimension of its result that is divided among the ranks as by `Tensor.tensor_split`,
                or along which those of the parts are concatenated.
            gather_dim: Dimension of its result whose parts the ranks have.

        Returns:
            (bags of this rank, embedding_dim).

        Raises:
            ValueError: The ranks have different batches, or an id is out of range.
            RuntimeError: The batch has more distinct ids than the cache holds.
        """
        dtype = self.cache_weight_mgr.param.dtype
        factors = per_sample_weights = self._factors(per_sample_weights, dtype)
        is_whole = self._exchange.axis.size == 1 or not self.local_batches
        if factors is not None and is_whole:
            factors = copy_forward_reduce_backward(factors, self._exchange.axis)

        def collect() -> Collected | None:
            return None if is_whole else self._collect(input, offsets, factors)

        def look_up(collected: Collected | None) -> tuple[Tensor, Sequence[int] | None]:
            if collected is None:
                output = self._reduce(input, offsets, factors)
                return (output if shape_hook is None else shape_hook(output)), None
            bags = joined(collected.parts)
            ends = bags.offsets(has_last=self.include_last_offset)
            output = self._reduce(bags.ids, ends, bags.factors)
            if shape_hook is None:
                return output, collected.num_bags
            outputs = [shape_hook(part) for part in output.split(collected.num_bags)]
            dim, _ = two_dims(outputs[0], scatter_dim, gather_dim)
            return torch.cat(outputs, dim), [part.shape[dim] for part in outputs]

        # Slots of the same rows can differ.
        ids = input if self.cache_op else None
        batch = {"ids": ids, "offsets": offsets, "per_sample_weights": per_sample_weights}
        return self._exchange(
            look_up,
            batch if is_whole else {},
            collect,
            scatter_dim=scatter_dim,
            gather_dim=gather_dim,
            device=self.cache_weight_mgr.param.device,
        )

    def _collect(self, input: Tensor, offsets: Tensor | None, factors: Tensor | None) -> Collected | None:
        """Return the bags of the parts of all ranks; collective."""
        axis, has_last = self._exchange.axis, self.include_last_offset

        def cut() -> tuple[int, list[RankBags]]:
            check_ids(self.cache_op, self._exchange.name)
            bags = RankBags.of(input, offsets, factors, has_last=has_last)
            return len(bags.lengths), [bags] * axis.size

        return self._batches.collect(cut, param=self.cache_weight_mgr.param)

    def prefetch(
        self, loader: Iterable[Batch], depth: int = 4, ids: IdsOf | None = None
    ) -> PrefetchLoader[Batch]:
        """Return a loader of the same batches, whose rows come while the batch before them computes.

        With `local_batches` all ranks read it alike, each its own parts: reading a batch is a collective.

        Args:
            loader: See `CachedEmbeddingBag.prefetch`.
            depth: Number of batches that are known ahead; 0 for none.
            ids: Function that returns the ids of a batch. Default: a batch is its ids.

        Raises:
            ValueError: `depth` is not a number of batches.
            TypeError: `loader` cannot be iterated, or `ids` not be called.
        """
        axis, cache = self._exchange.axis, self.cache_weight_mgr
        shared = None
        if self.local_batches and axis.size > 1:
            shared = IdsOfRanks(
                self._batches, cache.param, lambda own: [own] * axis.size, lambda whole: [whole]
            )
        return prefetch(loader, [cache], depth, ids, shared)

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        return f"{super().extra_repr()}, local_batches={self.local_batches}"

    def _check_ranks(self, name: str) -> None:
        self._exchange.check_job(self.parameters())

    def _draw(self, rows: HostRows) -> None:
        """Draw the whole table, a block at a time, and keep the columns of this rank."""
        axis = self._exchange.axis
        if axis.size == 1:
            super()._draw(rows)
            return
        # A whole row has at least as many elements as ranks, so blocks of 16 rows are multiples of 16.
        width = rows.tensor.shape[1]
        for block in _blocks_of_rows(rows.tensor, num_ranks=axis.size):
            whole = rows.tensor.new_empty((len(block), width * axis.size)).normal_()
            block.copy_(whole[:, axis.rank * width :][:, :width])
            rows.release_memory()
        if self.padding_idx is not None:
            rows.tensor[self.padding_idx].zero_()

    def _saved_tables(self) -> Iterable[tuple[str, Tensor]]:
        axis, cache = self._exchange.axis, self.cache_weight_mgr
        own = self._exchange.succeeded(lambda: cache.weight, device=cache.param.device)
        if axis.size == 1:
            return [("weight", own)]
        whole = torch.empty(self.num_embeddings, self.embedding_dim, dtype=own.dtype, device="cpu")
        device, begin = self.cache_weight_mgr.param.device, 0
        for block in _blocks_of_rows(own.detach(), num_ranks=axis.size):
            # Joined by all ranks of the axis: the same rows of all columns.
            whole[begin : begin + len(block)] = all_gather(block.to(device), 1, axis).cpu()
            begin += len(block)
        return [("weight", whole)]

    def _load_table(self, key: str, loaded: Tensor, *, is_assigned: bool) -> None:
        axis, width = self._exchange.axis, self.embedding_dim_per_partition
        own = loaded if axis.size == 1 else loaded[:, axis.rank * width :][:, :width]
        super()._load_table(key, own, is_assigned=is_assigned and axis.size == 1)


def check_ids(are_ids: bool, name: str) -> None:
    """Check that a part of a batch has ids.

    Raises:
        ValueError: The part has slots.
    """
    if not are_ids:
        raise ValueError(
            f"{name} has local_batches=True and was given slots (cache_op=False), which other ranks do not "
            "know: pass ids"
        )


def check_shape(num_rows: int, dim: int) -> tuple[int, int]:
    """Return the shape of a table as integers.

    Raises:
        ValueError: A number is not positive.
    """
    shape = operator.index(num_rows), operator.index(dim)
    if min(shape) < 1:
        raise ValueError(f"a table cannot have the shape {shape}; it has at least one row and one column")
    return shape


def _blocks_of_rows(tensor: Tensor, *, num_ranks: int) -> Sequence[Tensor]:
    """Return a table of this rank's columns in blocks, whose whole rows fit into `_BLOCK_BYTES`.

    Torch draws 16 elements at a time, so the whole rows of a block have a multiple of 16; the last 16 are
    drawn again if they are not all, so the last block is not shorter.
    """
    row_bytes = tensor[:1].nbytes * num_ranks
    size = max(_BLOCK_BYTES // row_bytes // 16, 1) * 16
    num_columns = tensor.shape[1] * num_ranks
    ends = [end for end in range(size, len(tensor), size) if (len(tensor) - end) * num_columns >= 16]
    return tensor.tensor_split(ends)


def _path_of_rank(path: Path, axis: Axis) -> Path:
    """Return the file of a rank's columns; collective.

    Args:
        path: The path that all ranks are given.
        axis: The ranks.

    Raises:
        ValueError: Files of another number of ranks exist, or those of some ranks are missing, or several
            ranks have the same columns.
    """
    if axis.size < axis.mesh.world_size:
        raise ValueError(
            f"weight_path={str(path)!r} and tensor parallelism cannot be combined: "
            f"{axis.mesh.world_size // axis.size} ranks have the same columns, and a file has one user: keep "
            "the table in host memory, or leave tensor parallelism out"
        )
    pattern = f"{glob.escape(path.stem)}-?????-of-?????{glob.escape(path.suffix)}"
    own_end = f"-of-{axis.size:05}{path.suffix}"
    others = [each for each in path.parent.glob(pattern) if axis.size == 1 or not each.name.endswith(own_end)]
    own = path
    if axis.size > 1:
        own = path.with_name(f"{path.stem}-{axis.rank:05}{own_end}")
        others += [path] if path.exists() else []
    # Joined by all ranks of the axis: machines can have folders of their own.
    numbers = torch.tensor([[len(others), own.exists()]], device=launched_job().device)
    found = all_gather(numbers, 0, axis).tolist()
    if any(num_others for num_others, _ in found):
        raise ValueError(
            f"{others[0] if others else path} is a table of another number of ranks than {axis.size}: save a "
            "state_dict() with that number, load it with another weight_path, or delete it for a new table"
        )
    exists = [bool(each) for _, each in found]
    if any(exists) and not all(exists):
        raise ValueError(
            f"the file of {path} is there on rank {exists.index(True)} along {axis.name}, and missing on "
            f"rank {exists.index(False)}: restore it, or delete the files of all ranks for a new table"
        )
    return own


def _check_table(weight: Tensor, shape: tuple[int, int]) -> None:
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"_weight has the shape {tuple(weight.shape)}; it must be (num_embeddings, embedding_dim), "
            f"{shape}"
        )
