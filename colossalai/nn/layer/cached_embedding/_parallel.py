"""Cached embeddings whose columns are on several ranks, and the exchange of their outputs.

[Note: batches of several ranks]
Each rank is given the ids of the whole batch, and looks up its part of the table: its columns, or its tables.
One all-to-all of pooled rows gives each rank the outputs of its part of the batch. With R ranks the loss is
the mean of the losses of R parts, as under `DistributedDataParallel`: the backward sends gradients back, and
divides them by R. So a row has one owner, whose gradient is complete: no other call averages it.
"""

import glob
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.communication import all_gather, copy_forward_reduce_backward, exchange, outside_graphs
from colossalai.context import Axis, Mesh
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._host_rows import BITS, HostRows
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy
from colossalai.nn.layer.tensor_parallel import launched_job

T = TypeVar("T")

_ODD = 0x1E3779B97F4A7C15  # of random bits
_BLOCK_BYTES = 1 << 24  # gathered or drawn at a time


class ParallelCachedEmbeddingBag(CachedEmbeddingBag):
    """`CachedEmbeddingBag` whose columns are divided among the data-parallel ranks.

    Each rank has all rows of its columns, in a table and a cache of its own. It is given the ids of the whole
    batch, and returns the bags of its part of the batch; see [Note: batches of several ranks]. Dense layers
    go under `torch.nn.parallel.DistributedDataParallel`, the bag itself does not.

    A forward of b bags sends (b - b / R) embedding_dim / R elements to other ranks, the backward as many.

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
        name: str = "",
    ) -> None:
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
        self.cache_weight_mgr.has_whole_rows = axis.size == 1

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
            input: Ids of the whole batch, the same on all ranks: (bags, ids), or (ids,) with `offsets`.
            offsets: (bags,): where each bag begins.
            per_sample_weights: A factor for each id, of the shape of `input`; for mode "sum".
            shape_hook: Function of the output of all bags, (bags, embedding_dim_per_partition).
            scatter_dim: Dimension of its result that is divided among the ranks as by `Tensor.tensor_split`.
            gather_dim: Dimension of its result whose parts the ranks have.

        Returns:
            (bags of this rank, embedding_dim).

        Raises:
            ValueError: The ranks have different batches, or an id is out of range.
            RuntimeError: The batch has more distinct ids than the cache holds.
        """
        factors = per_sample_weights
        if factors is not None:
            factors = copy_forward_reduce_backward(factors, self._exchange.axis)

        def look_up() -> Tensor:
            output = self._reduce(input, offsets, factors)
            return output if shape_hook is None else shape_hook(output)

        return self._exchange(
            look_up,
            # Slots of the same rows can differ.
            {
                "ids": input if self.cache_op else None,
                "offsets": offsets,
                "per_sample_weights": per_sample_weights,
            },
            scatter_dim=scatter_dim,
            gather_dim=gather_dim,
            device=self.cache_weight_mgr.param.device,
        )

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


@dataclass(frozen=True)
class BagExchange:
    """The all-to-all from the columns of a rank for all bags to all columns for the rank's part of the batch.

    Args:
        axis: The ranks with different parts of the batch.
        name: Name of the table in error messages.
    """

    axis: Axis
    name: str

    def check_job(self, params: Iterable[nn.Parameter] = ()) -> None:
        """Check that the job has the ranks that the table was made for, and each owns its parameters.

        Args:
            params: Caches of rows that this rank owns.

        Raises:
            RuntimeError: The job has other ranks, or `DistributedDataParallel` averages gradients of
                `params`.
        """
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if num_ranks != self.axis.mesh.world_size:
            raise RuntimeError(
                f"{self.name} was made in a job of {self.axis.mesh.world_size} ranks, and this one has "
                f"{num_ranks}: launch the job first, then make the model"
            )
        # The wrapper whose forward runs, None outside of one; a private attribute of torch.
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None) if self.axis.size > 1 else None
        if wrapper is not None:
            averaged = {id(param) for param in getattr(wrapper, "_module_parameters", ())}
            if any(id(param) in averaged for param in params):
                raise RuntimeError(
                    f"{self.name} is in a DistributedDataParallel, which averages gradients of different "
                    "columns or tables and has copied those of rank 0 to all ranks: make the model again, "
                    "and wrap the dense layers only"
                )

    def succeeded(self, read: Callable[[], T], *, device: torch.device) -> T:
        """Return the result of a function that succeeds on all ranks; collective.

        Args:
            read: The function, without communication.
            device: Device of tensors that are sent.

        Raises:
            RuntimeError: The function has failed on another rank.
        """
        failure: Exception | None = None
        try:
            result = read()
        except Exception as error:
            failure = error
        # Joined by all ranks of the axis, also those that have failed, so that none waits for a table.
        found = all_gather(torch.tensor([failure is None], dtype=torch.int64, device=device), 0, self.axis)
        if failure is not None:
            raise failure
        self._check_success(found.tolist(), "state_dict()")
        return result

    def _check_success(self, has_succeeded: Sequence[int], action: str) -> None:
        if not all(has_succeeded):
            raise RuntimeError(
                f"{action} of {self.name} has failed on rank {has_succeeded.index(0)} along "
                f"{self.axis.name}: see the error of that rank"
            )

    def __call__(
        self,
        look_up: Callable[[], Tensor],
        batch: Mapping[str, Tensor | None],
        *,
        device: torch.device,
        scatter_dim: int = 0,
        gather_dim: int = 1,
        widths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the columns of all ranks for this rank's part of the batch; collective.

        Args:
            look_up: Function that returns the columns of this rank for the whole batch; it communicates with
                no other rank.
            batch: Arguments of the lookup, by name, which are the same on all ranks.
            device: Device of tensors that are sent.
            scatter_dim: Dimension of the bags.
            gather_dim: Dimension of the columns.
            widths: Number of columns of each rank. Default: the same on all.

        Raises:
            RuntimeError: The lookup of another rank has failed.
            ValueError: The ranks have different batches, or the dimensions are not two of the output.
        """
        if self.axis.size == 1:
            return look_up()
        result: Tensor = outside_graphs(self._exchange)(
            look_up, batch, device, scatter_dim, gather_dim, widths
        )
        return result

    def _exchange(
        self,
        look_up: Callable[[], Tensor],
        batch: Mapping[str, Tensor | None],
        device: torch.device,
        scatter_dim: int,
        gather_dim: int,
        widths: Sequence[int] | None,
    ) -> Tensor:
        failure: Exception | None = None
        output, numbers = None, [0] * (4 + len(batch))
        try:
            output = look_up()
            bags, columns = _two_dims(output, scatter_dim, gather_dim)
            numbers = [
                1,
                output.requires_grad,
                torch.is_grad_enabled() and not output.is_inference(),
                output.shape[bags],
                # With a gradient on one rank only, its backward would wait for the others.
                *(0 if each is None else _checksum(each) ^ each.requires_grad for each in batch.values()),
            ]
        except Exception as error:
            failure = error
        # Joined by all ranks of the axis, also those that have failed: no rank waits for an exchange.
        found = all_gather(torch.tensor([numbers], device=device), 0, self.axis).tolist()
        if failure is not None:
            raise failure
        assert output is not None, "else there is a failure"
        self._check_agreement(found, batch)
        needs_grad = any(has_grad for _, has_grad, *_ in found)
        # Frozen tables take part in the backward, which the others need.
        anchor = torch.empty(0, device=device, requires_grad=True) if needs_grad else None
        widths = widths or [output.shape[columns]] * self.axis.size
        result: Tensor = _ExchangeBags.apply(output, anchor, self.axis, bags, columns, tuple(widths))
        return result

    def _check_agreement(self, found: Sequence[Sequence[int]], names: Iterable[str]) -> None:
        """Check that all ranks have looked up the same batch.

        Args:
            found: The numbers of each rank.
            names: Names of the arguments.
        """
        has_succeeded, _, is_enabled, num_bags, *checksums = zip(*found, strict=True)
        where = f"along {self.axis.name}"
        self._check_success(has_succeeded, "the lookup")
        differing = [name for name, each in zip(names, checksums, strict=True) if len({*each}) > 1]
        if len({*num_bags}) > 1 or differing:
            text = ", ".join(f"{number} bags on rank {rank}" for rank, number in enumerate(num_bags))
            if len({*num_bags}) == 1:
                text = f"the {differing[0]} differ in values, shape or requires_grad"
            raise ValueError(
                f"{self.name} was given different batches ({text}): pass the whole batch to each of the "
                f"{self.axis.size} ranks {where}, which returns its part"
            )
        if len({*is_enabled}) > 1:
            raise RuntimeError(
                f"{self.name} was called under torch.no_grad() on rank {is_enabled.index(0)} {where} and not "
                f"on rank {is_enabled.index(1)}, whose backward would wait for it: call it alike on all ranks"
            )


class _ExchangeBags(torch.autograd.Function):
    """See `BagExchange`; the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor | None,
        axis: Axis,
        scattered: int,
        gathered: int,
        widths: tuple[int, ...],
    ) -> Tensor:
        sizes = part_sizes(output.shape[scattered], axis.size)
        ctx.axis, ctx.bags, ctx.columns = axis, (scattered, sizes), (gathered, widths)
        return _exchange_parts(output, axis, split=ctx.bags, gather=ctx.columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = _exchange_parts(grad, ctx.axis, split=ctx.columns, gather=ctx.bags)
        # Here, once: the loss is the mean of those of all parts of the batch.
        own.div_(ctx.axis.size)
        return own if ctx.needs_input_grad[0] else None, *[None] * 5


Cut = tuple[int, Sequence[int]]
"""A dimension, and the extent of each rank's part along it."""


def _exchange_parts(tensor: Tensor, axis: Axis, *, split: Cut, gather: Cut) -> Tensor:
    """Send each rank its part along one dimension, and concatenate the received ones along another."""
    (split_dim, split_sizes), (gather_dim, gather_sizes) = split, gather
    parts = [part.contiguous() for part in tensor.split(list(split_sizes), split_dim)]
    shape = list(parts[axis.rank].shape)
    received = []
    for size in gather_sizes:
        shape[gather_dim] = size
        received.append(tensor.new_empty(shape))
    # Joined by all ranks of the axis; complete on return.
    exchange(parts, received, axis)
    return torch.cat(received, gather_dim)


def batch_axis() -> Axis:
    """Return the ranks with different parts of the batch, for a module under construction.

    Those are `dp` of a launched job, and all ranks of a job that torch alone has launched.

    Raises:
        ValueError: The ranks of the job share sequences.
    """
    job = launched_job()
    if job.layout.sequence > 1:
        raise ValueError(
            "cached embeddings and sequence parallelism cannot be combined: ranks that share sequences have "
            "parts of the same bags; leave it out (sp_size of HybridParallelPlugin, parallel.sequence in a "
            "config)"
        )
    mesh = job.mesh
    is_initialized = dist.is_available() and dist.is_initialized()
    if mesh.world_size == 1 and is_initialized and dist.get_world_size() > 1:
        mesh = Mesh({"dp": dist.get_world_size()}, rank=dist.get_rank(), device_type=job.device.type)
    return mesh.axis("dp")


def check_shape(num_rows: int, dim: int) -> tuple[int, int]:
    """Return the shape of a table as integers.

    Raises:
        ValueError: A number is not positive.
    """
    shape = operator.index(num_rows), operator.index(dim)
    if min(shape) < 1:
        raise ValueError(f"a table cannot have the shape {shape}; it has at least one row and one column")
    return shape


def part_sizes(size: int, num_parts: int) -> list[int]:
    """Return the extents of the parts of `Tensor.tensor_split`."""
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


def _two_dims(output: Tensor, scatter_dim: int, gather_dim: int) -> tuple[int, int]:
    """Return two dimensions of an output, counted from the first."""
    num_dims = output.dim()
    dims = tuple(dim + num_dims if dim < 0 else dim for dim in (scatter_dim, gather_dim))
    if dims[0] == dims[1] or not all(0 <= dim < num_dims for dim in dims):
        raise ValueError(
            f"scatter_dim={scatter_dim} and gather_dim={gather_dim} must be two dimensions of the output, of "
            f"shape {tuple(output.shape)}"
        )
    return dims[0], dims[1]


def _checksum(tensor: Tensor) -> int:
    """Return a number that depends on the values of a tensor, on their order and on the shape."""
    values = tensor.detach().contiguous()
    if values.is_floating_point():
        values = values.view(BITS[values.element_size()])
    flat = torch.cat([values.flatten().long(), torch.tensor(values.shape, device=values.device)])
    mixed = (flat + torch.arange(flat.numel(), device=flat.device) * _ODD) * _ODD  # modulo 2**64
    return int(((mixed ^ (mixed >> 29)) * _ODD).sum())


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
        ValueError: Files of another number of ranks exist, or those of some ranks are missing.
    """
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
