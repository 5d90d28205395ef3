"""Tensors of users on their way to shared memory: contiguous, and of the sizes that a call needs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Bytes = tuple[int, int]  # their address, and how many


class Places:
    """Where a call reads and writes: in the user's tensors, or in copies of those that have gaps."""

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[torch.Tensor] = []  # until the call has ended

    @property
    def has_copies(self) -> bool:
        """Whether something has to be copied back."""
        return bool(self._back)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to read."""
        _check_place(tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to write, which is copied to the user's in the end if it is not that."""
        _check_place(tensor)
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            self._kept.append(tensor)
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._back.append((tensor, copy))
        return copy

    def both(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to read and to write."""
        found = self.target(tensor)
        if found is not tensor:
            found.copy_(tensor)
        return found

    def apart(self, target: torch.Tensor, source: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a target that does not lie within a source, unless it is this rank's own section of it."""
        begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
        address = target.data_ptr()
        if address == begin + rank * target.nbytes or address >= end or address + target.nbytes <= begin:
            return target
        copy = torch.empty_like(target)
        self._back.insert(0, (target, copy))  # before what the target is itself copied to
        return copy

    def copy_back(self) -> None:
        """Copy what was written elsewhere to where it belongs."""
        for tensor, copy in self._back:
            tensor.copy_(copy)


def apart_from_callers(call: Callable[..., Result], *args: Any) -> Result:
    """Call a function whose operations are nobody's: not autograd's, and not of a mode of the caller."""
    with torch.inference_mode(), torch._C.DisableTorchFunction():
        if torch._C._len_torch_dispatch_stack():
            with torch.utils._python_dispatch._disable_current_modes():
                return call(*args)
        return call(*args)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in one dimension."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return where the bytes of a contiguous tensor are."""
    return tensor.data_ptr(), tensor.nbytes


def check_share(operation: str, whole: torch.Tensor, share: torch.Tensor, num_ranks: int) -> None:
    """Require of a tensor that it has room for what all ranks share of it.

    Raises:
        ValueError: `whole` has more or less, or another type.
    """
    if whole.numel() != num_ranks * share.numel():
        raise ValueError(
            f"{operation}: the larger tensor has {whole.numel()} elements, and must have {num_ranks} times "
            f"the {share.numel()} of the smaller one, one part for each rank"
        )
    if whole.dtype != share.dtype:
        raise ValueError(f"{operation}: one tensor is {whole.dtype} and the other {share.dtype}")


def check_list(operation: str, listed: Sequence[torch.Tensor], one: torch.Tensor, num_ranks: int) -> None:
    """Require of a list that it has a tensor for each rank, alike to a single one.

    Raises:
        ValueError: `listed` is longer or shorter, or one of its tensors differs.
    """
    if len(listed) != num_ranks:
        raise ValueError(f"{operation}: {len(listed)} tensors for {num_ranks} ranks")
    for tensor in listed:
        if tensor.numel() != one.numel() or tensor.dtype != one.dtype:
            raise ValueError(
                f"{operation}: a tensor of the list has {tensor.numel()} elements of {tensor.dtype}, and the "
                f"single one {one.numel()} of {one.dtype}"
            )


def split_rows(name: str, tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> list[Bytes]:
    """Return where the rows for each rank are, or those from each rank.

    Args:
        name: Of the tensor, for messages.
        tensor: Contiguous, rows along its first dimension.
        sizes: Rows for each rank; empty: the same number for each.
        num_ranks: How many there are.

    Raises:
        ValueError: `sizes` are not one for each rank, or have another sum than there are rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % num_ranks:
            raise ValueError(
                f"all_to_all_single: {rows} rows of {name} cannot be divided among {num_ranks} ranks"
            )
        sizes = [rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single: {name} split sizes {list(sizes)} must be {num_ranks} numbers "
            f"with the sum {rows}"
        )
    width = tensor.nbytes // rows if rows else 0
    found, address = [], tensor.data_ptr()
    for size in sizes:
        found.append((address, size * width))
        address += size * width
    return found


def check_sparse(reduction: str, tensor: torch.Tensor) -> None:
    """Require of a tensor that its entries can be added to those of others.

    Raises:
        ValueError: `tensor` is complex, not sparse by coordinates, or not on the CPU; `reduction` is no sum.
    """
    if tensor._base is not None and tensor._base.is_complex():  # torch's real view: new entries are only its
        raise ValueError("all_reduce of sparse tensors takes real numbers, not complex ones: use to_dense()")
    if reduction not in ("SUM", "AVG"):
        raise ValueError(f"all_reduce of sparse tensors is a SUM or AVG, not {reduction}: use to_dense()")
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise ValueError(
            f"all_reduce of sparse tensors takes {torch.sparse_coo} on the CPU, not {tensor.layout} on "
            f"{tensor.device}: reduce others in a call of their own"
        )


def _check_place(tensor: torch.Tensor) -> None:
    """Require what can be copied byte by byte.

    Raises:
        ValueError: The tensor is on a device, or sparse.
    """
    if not tensor.is_cpu:
        raise ValueError(
            f"a tensor on {tensor.device} cannot go through shared memory: this group carries CPU tensors"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} cannot go through shared memory but in all_reduce: use "
            "to_dense()"
        )
