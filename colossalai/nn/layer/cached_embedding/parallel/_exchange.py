"""Exchange of bags between ranks that own columns, or tables, and ranks with different parts of the batch.

[Note: batches of several ranks]
Each rank is given the ids of the whole batch, or collects them from all ranks ([Note: local batches] in
`_batches.py`), and looks up its part of the table: its columns, or its tables.
One all-to-all of pooled rows gives each rank the outputs of its part of the batch. With R ranks the loss is
the mean of the losses of R parts, as under `DistributedDataParallel`: the backward sends gradients back, and
divides them by R. So a row has one owner, whose gradient is complete: no other call averages it.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.cluster import gather_values
from colossalai.communication import all_gather, exchange, outside_graphs
from colossalai.context import Axis, Mesh
from colossalai.nn.layer.cached_embedding._host_rows import BITS
from colossalai.nn.layer.tensor_parallel import launched_job

T = TypeVar("T")
C = TypeVar("C")

_LEAST_NUMBERS = 8  # in an agreement: those of a lookup; of a local batch 5, and 2 for each rank
_ODD = 0x1E3779B97F4A7C15  # of random bits


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
        agree("state_dict()", [], failure, axis=self.axis, name=self.name, device=device)
        return result

    def __call__(
        self,
        look_up: Callable[[C], tuple[Tensor, Sequence[int] | None]],
        batch: Mapping[str, Tensor | None],
        collect: Callable[[], C],
        *,
        device: torch.device,
        scatter_dim: int = 0,
        gather_dim: int = 1,
        widths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the columns of all ranks for this rank's part of the batch; collective.

        Args:
            look_up: Function of the result of `collect` that returns the columns of this rank for the whole
                batch, and the extents of the ranks' parts along `scatter_dim`, None for those of
                `Tensor.tensor_split`; it communicates with no other rank.
            batch: Arguments of the lookup, by name, which are the same on all ranks.
            collect: Function that returns the bags of all ranks; if it fails, it does so on all ranks.
            device: Device of tensors that are sent.
            scatter_dim: Dimension of the bags.
            gather_dim: Dimension of the columns.
            widths: Number of columns of each rank. Default: the same on all.

        Raises:
            RuntimeError: The lookup of another rank has failed.
            ValueError: The ranks have different batches, or the dimensions are not two of the output.
        """
        if self.axis.size == 1:
            return look_up(collect())[0]
        result: Tensor = outside_graphs(self._exchange)(
            look_up, batch, collect, device, scatter_dim, gather_dim, widths
        )
        return result

    def _exchange(
        self,
        look_up: Callable[[C], tuple[Tensor, Sequence[int] | None]],
        batch: Mapping[str, Tensor | None],
        collect: Callable[[], C],
        device: torch.device,
        scatter_dim: int,
        gather_dim: int,
        widths: Sequence[int] | None,
    ) -> Tensor:
        collected = collect()
        failure: Exception | None = None
        output, numbers = None, [0] * (3 + len(batch))
        try:
            output, sizes = look_up(collected)
            bags, columns = two_dims(output, scatter_dim, gather_dim)
            numbers = [
                output.requires_grad,
                torch.is_grad_enabled() and not output.is_inference(),
                output.shape[bags],
                # With a gradient on one rank only, its backward would wait for the others.
                *(0 if each is None else _checksum(each) ^ each.requires_grad for each in batch.values()),
            ]
        except Exception as error:
            failure = error
        found = agree("the lookup", numbers, failure, axis=self.axis, name=self.name, device=device)
        assert output is not None, "else there is a failure"
        self._check_agreement(found, batch)
        needs_grad = any(has_grad for has_grad, *_ in found)
        # Frozen tables take part in the backward, which the others need.
        anchor = torch.empty(0, device=device, requires_grad=True) if needs_grad else None
        cut = bags, sizes or part_sizes(output.shape[bags], self.axis.size)
        gathered = columns, widths or [output.shape[columns]] * self.axis.size
        result: Tensor = _ExchangeBags.apply(output, anchor, self.axis, cut, gathered)
        return result

    def _check_agreement(self, found: Sequence[Sequence[int]], names: Iterable[str]) -> None:
        """Check that all ranks have looked up the same batch.

        Args:
            found: The numbers of each rank.
            names: Names of the arguments.
        """
        _, is_enabled, num_bags, *checksums = zip(*found, strict=True)
        where = f"along {self.axis.name}"
        differing = [name for name, each in zip(names, checksums, strict=True) if len({*each}) > 1]
        if len({*num_bags}) > 1 or differing:
            text = ", ".join(f"{number} bags on rank {rank}" for rank, number in enumerate(num_bags))
            if not checksums:
                raise ValueError(
                    f"{self.name} was given different batches ({text}): give all ranks {where} bags of the "
                    "same samples, and the same shape_hook and scatter_dim"
                )
            if len({*num_bags}) == 1:
                text = f"the {differing[0]} differ in values, shape or requires_grad"
            raise ValueError(
                f"{self.name} was given different batches ({text}): pass the whole batch to each of the "
                f"{self.axis.size} ranks {where}, which returns its part, or make it with local_batches=True "
                "and pass each rank its own part"
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
        bags: "Cut",
        columns: "Cut",
    ) -> Tensor:
        ctx.axis, ctx.bags, ctx.columns = axis, bags, columns
        return _exchange_parts(output, axis, split=bags, gather=columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = _exchange_parts(grad, ctx.axis, split=ctx.columns, gather=ctx.bags)
        # Here, once: the loss is the mean of those of all parts of the batch.
        own.div_(ctx.axis.size)
        return own if ctx.needs_input_grad[0] else None, *[None] * 4


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


def agree(
    action: str,
    numbers: Sequence[int],
    failure: Exception | None,
    *,
    axis: Axis,
    name: str,
    device: torch.device,
) -> list[list[int]]:
    """Return numbers of all ranks, if each has made the same action without a failure; collective.

    Args:
        action: The action, such as "the lookup".
        numbers: Numbers of this rank; all ranks have as many.
        failure: The failure of this rank.
        axis: The ranks.
        name: Name of the table in error messages.
        device: Device of the numbers that are sent.

    Raises:
        RuntimeError: A rank has failed, or has made another action.
    """
    tag = zlib.crc32(f"{action} of {name}".encode())
    # As many for each action: a rank with another one is found.
    size = max(_LEAST_NUMBERS, 2 * axis.size + 5)
    own = [tag, failure is None, *numbers]
    own += [0] * (size - len(own))
    # Joined by all ranks of the axis, also those that have failed: no rank waits for an exchange.
    found: list[list[int]] = all_gather(torch.tensor([own], device=device), 0, axis).tolist()
    tags, has_succeeded, *_ = zip(*found, strict=True)
    if len({*tags}) == 1 and all(has_succeeded):
        return [each[2 : 2 + len(numbers)] for each in found]
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    # Joined by all ranks of the axis: all have the same numbers.
    of_ranks = gather_values((f"{action} of {name}", reason), axis.group)
    if failure is not None:
        raise failure
    if len({*tags}) > 1:
        text = ", ".join(f"{each} on rank {rank}" for rank, (each, _) in enumerate(of_ranks))
        raise RuntimeError(
            f"the ranks along {axis.name} do different things ({text}): call the tables, and read their "
            "loaders, in the same order on all ranks"
        )
    rank = has_succeeded.index(0)
    raise RuntimeError(
        f"{action} of {name} has failed on rank {rank} along {axis.name} ({of_ranks[rank][1]})"
    )


def batch_axis() -> Axis:
    """Return the ranks with different parts of the batch, for a module under construction.

    Those are `dp` of a launched job, and all ranks of a job that torch alone has launched.

    Raises:
        ValueError: The ranks of the job share sequences, or activations.
    """
    job = launched_job()
    if job.layout.dap > 1:
        raise ValueError(
            "cached embeddings and tensor mode 'dap' cannot be combined: the ranks that share activations "
            "have the same bags, and their gradients are averaged as those of replicas; leave one of them out"
        )
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


def axes_along(axis: Axis) -> tuple[str, ...]:
    """Return the axes of the mesh that an axis consists of, the outermost first."""
    # In a grid the first and the last rank of a group differ along every axis that it runs along.
    first, last = (axis.mesh.coordinate(rank) for rank in (axis.ranks[0], axis.ranks[-1]))
    return tuple(name for name in axis.mesh.axes if first[name] != last[name])


def part_sizes(size: int, num_parts: int) -> list[int]:
    """Return the extents of the parts of `Tensor.tensor_split`."""
    return [size // num_parts + (part < size % num_parts) for part in range(num_parts)]


def two_dims(output: Tensor, scatter_dim: int, gather_dim: int) -> tuple[int, int]:
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
