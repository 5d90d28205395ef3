"""Checks and staging copies of the tensors that users pass to collectives in shared memory."""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Bytes = tuple[int, int]  # address and number of bytes


class StagedTensors:
    """Tensors that a call reads and writes: the user's, or contiguous copies of them."""

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[torch.Tensor] = []  # keeps them alive during the call

    @property
    def has_copies(self) -> bool:
        """Whether a copy has to be copied back."""
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
        """Return a contiguous tensor to write: the user's tensor, or a copy for `copy_back`.

        Raises:
            ValueError: Elements of the tensor share memory.
        """
        _check_place(tensor)
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            self._kept.append(tensor)
            return tensor
        if not tensor.is_contiguous() and _shares_memory(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that "
                "share memory, and each is to get a value of its own: give a clone() of it"
            )
        return self._copy_for(tensor)

    def targets(
        self, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return contiguous tensors to write; copies of all if one overlaps another, or a source.

        They are copied back in order, so a tensor that is passed twice gets the last result.
        """
        found = [self.target(tensor) for tensor in tensors]
        if _overlap((*found, *sources)):
            found = [
                self._copy_for(given) if given is target else target
                for given, target in zip(tensors, found, strict=True)
            ]
        return found

    def in_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor to read and to write."""
        found = self.target(tensor)
        if found is not tensor:
            found.copy_(tensor)
        return found

    def all_in_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous tensors to read and to write; copies of all if one overlaps another."""
        if len(tensors) == 1:
            return [self.in_out(tensors[0])]
        found = self.targets(tensors)
        for tensor, given in zip(found, tensors, strict=True):
            if tensor is not given:
                tensor.copy_(given)
        return found

    def separate_source(self, source: torch.Tensor, target: torch.Tensor, own: int = 0) -> torch.Tensor:
        """Return a contiguous source that begins at the address `own` or does not overlap the target."""
        found = self.source(source)
        begin, first = found.data_ptr(), target.data_ptr()
        if begin == own or begin >= first + target.nbytes or begin + found.nbytes <= first:
            return found
        return self.source(found.clone())

    def separate_target(self, target: torch.Tensor, source: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a target that is this rank's own section of a source or does not overlap the source."""
        begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
        address = target.data_ptr()
        if address == begin + rank * target.nbytes or address >= end or address + target.nbytes <= begin:
            return target
        copy = torch.empty_like(target)
        self._back.insert(0, (target, copy))  # before the copy of the target itself
        return copy

    def copy_back(self) -> None:
        """Copy the results in copies to the user's tensors."""
        for tensor, copy in self._back:
            tensor.copy_(copy)

    def _copy_for(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._back.append((tensor, copy))
        return copy


def without_dispatch_modes(call: Callable[..., Result], *args: Any) -> Result:
    """Call a function outside of autograd and of the dispatch modes of the caller."""
    with torch.inference_mode(), torch._C.DisableTorchFunction():
        if torch._C._len_torch_dispatch_stack():
            with torch.utils._python_dispatch._disable_current_modes():
                return call(*args)
        return call(*args)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in one dimension."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the address and the number of bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def check_share(operation: str, whole: torch.Tensor, share: torch.Tensor, num_ranks: int) -> None:
    """Check that a tensor has the size of one share per rank.

    Raises:
        ValueError: `whole` has more or fewer elements, or another dtype.
    """
    if whole.numel() != num_ranks * share.numel():
        raise ValueError(
            f"{operation}: the larger tensor has {whole.numel()} elements, and must have {num_ranks} times "
            f"the {share.numel()} of the smaller one, one part for each rank"
        )
    if dtype_in_memory(whole) != dtype_in_memory(share):
        raise ValueError(
            f"{operation}: one tensor is {dtype_in_memory(whole)} and the other {dtype_in_memory(share)}"
        )


def check_list(operation: str, listed: Sequence[torch.Tensor], one: torch.Tensor, num_ranks: int) -> None:
    """Check that a list has one tensor per rank, with the shape and dtype of a single one.

    Raises:
        ValueError: `listed` is longer or shorter, or one of its tensors differs.
    """
    if len(listed) != num_ranks:
        raise ValueError(f"{operation}: {len(listed)} tensors for {num_ranks} ranks")
    shape, dtype = one.shape, dtype_in_memory(one)
    for tensor in listed:
        if tensor.shape != shape or dtype_in_memory(tensor) != dtype:
            raise ValueError(
                f"{operation}: a tensor of the list has shape {tuple(tensor.shape)} of "
                f"{dtype_in_memory(tensor)}, and the single one {tuple(shape)} of {dtype}"
            )


def check_one(operation: str, tensors: Sequence[torch.Tensor], instead: str = "") -> None:
    """Check that a call has exactly one tensor.

    Raises:
        ValueError: `tensors` are more or fewer; `instead` names the call that takes several.
    """
    if len(tensors) != 1:
        takes = f": {instead} takes several" if instead else ""
        raise ValueError(f"{operation}: {len(tensors)} tensors, and it takes one{takes}")


def check_pairs(operation: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Check that there are as many outputs, or lists of them, as inputs.

    Raises:
        ValueError: `outputs` are more or fewer.
    """
    if len(outputs) != len(inputs):
        raise ValueError(f"{operation}: {len(outputs)} outputs for {len(inputs)} inputs")


def check_lists_of_root(operation: str, lists: Sequence[Sequence[torch.Tensor]], is_root: bool) -> None:
    """Check that the root of a call has one list of tensors, and the other ranks have none.

    Raises:
        ValueError: `lists` are more or fewer.
    """
    if is_root and len(lists) != 1:
        raise ValueError(f"{operation}: {len(lists)} lists, and the root has one, of a tensor for each rank")
    if not is_root and any(lists):
        raise ValueError(f"{operation}: {len(lists)} lists, and only the root has one")


def check_dtypes(operation: str, *tensors: torch.Tensor) -> None:
    """Check that tensors have the same dtype.

    Raises:
        ValueError: `tensors` have several dtypes.
    """
    dtype = dtype_in_memory(tensors[0])
    for tensor in tensors:
        if (other := dtype_in_memory(tensor)) != dtype:
            raise ValueError(f"{operation}: tensors of {dtype} and {other}: all have one type, on all ranks")


def dtype_in_memory(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor's memory, which a tensor subclass can hide."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype


def split_rows(name: str, tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> list[Bytes]:
    """Return the bytes of the rows for, or from, each rank.

    Args:
        name: Name of the tensor for messages.
        tensor: Contiguous tensor with rows along its first dimension.
        sizes: Number of rows per rank; empty: the same number for each.
        num_ranks: Number of ranks.

    Raises:
        ValueError: `sizes` is not a list of one number per rank, has a number that is negative or not an
            integer, or has another sum than the number of rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % num_ranks:
            raise ValueError(
                f"all_to_all_single: {rows} rows of {name} cannot be divided among {num_ranks} ranks"
            )
        sizes = [rows // num_ranks] * num_ranks
    elif len(sizes) != num_ranks or sum(sizes) != rows or not all(map(_is_count, sizes)):
        raise ValueError(
            f"all_to_all_single: {name} split sizes {list(sizes)} must be {num_ranks} numbers, 0 or more, "
            f"with the sum {rows}"
        )
    sizes = list(map(index, sizes))
    width = tensor.nbytes // rows if rows else 0
    found, address = [], tensor.data_ptr()
    for size in sizes:
        found.append((address, size * width))
        address += size * width
    return found


def check_sparse(reduction: str, tensor: torch.Tensor) -> None:
    """Check that a sparse tensor can be reduced.

    Raises:
        ValueError: `tensor` is complex, not in COO layout, or not on the CPU; or `reduction` is not a sum.
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


def _is_count(value: Any) -> bool:
    try:
        return index(value) >= 0
    except TypeError:
        return False


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether contiguous tensors overlap one another."""
    end = 0
    for begin, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if begin < end and size:
            return True
        end = begin + size
    return False


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory."""
    span, is_nested = 1, True  # elements from the first to the last one, over the dimensions so far
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    for step, size in steps:
        is_nested = is_nested and step >= span
        span += step * (size - 1)
    if is_nested or not tensor.numel():
        return False
    if steps[0][0] == 0:
        return True
    # Dimensions can interleave without an overlap: shape (2, 3), strides (3, 2). So count the offsets.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for step, size in steps:
        places = (places[:, None] + step * torch.arange(size, device="cpu")).flatten()
    return len(places.unique()) != tensor.numel()


def _check_place(tensor: torch.Tensor) -> None:
    """Check that a tensor can be copied byte by byte.

    Raises:
        ValueError: The tensor is on a device, sparse, or a fake tensor.
    """
    if type(tensor) is not torch.Tensor and tensor.untyped_storage().device.type == "meta":
        raise ValueError(
            f"a {type(tensor).__name__} has no memory to send: a forward on fake tensors cannot communicate"
        )
    if not tensor.is_cpu:
        raise ValueError(
            f"a tensor on {tensor.device} cannot go through shared memory: this group carries CPU tensors"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} cannot go through shared memory but in all_reduce: use "
            "to_dense()"
        )
