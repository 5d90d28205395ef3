"""The memory of a rank in tiers: the compute device, host memory below an accelerator, and disk.

[Note: memory of files]
Tensors on disk are in files that are mapped into memory: reading such a tensor reads the file, and writing it
writes the file. The system reads pages when they are touched (`expect` prefetches them), and writes them back
at any time. Mapped pages count as memory of the process until `give_back`; their content is then in the
system's page cache or on the disk. So optimizers and checkpoints use these tensors like those in memory, and
their caller gives the pages back after each chunk.

A file has no name: it is unlinked right after its creation, and its space is free when its last tensor is
freed, or when the process ends in any way. Its space is allocated at once, so that a full disk raises an
error at the allocation, instead of a signal at a write.

[Note: freed memory]
glibc keeps freed memory, and a new block does not always fit into it: with a budget of 349 MiB a process was
measured to take 1,180. So a process with a budget maps large blocks one by one, which return to the system
when they are freed, and returns the free pages of the heap whenever a chunk is gathered. These are left by
the user's model: its parameters were small blocks of the heap before there was a budget.
"""

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch

from colossalai.zero.gemini.planning import Home

_FILE_BYTES = 2**26, 2**32  # of the first file, and at most: each is twice as large as the one before
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_MAPPED_BYTES = 2**20  # blocks of this size and more are mapped one by one; smaller ones cost more to map
_ALIGNMENT = 64  # of a tensor in a file: a line of the processor's cache


class TierMemory:
    """The tiers of this rank; see [Note: memory of files].

    Args:
        device: The compute device.
        offload_dir: The folder of the disk tier, created if missing. None: no disk tier.
        has_host: Whether there is host memory below `device`; default: if that is an accelerator.
        pin_memory: Whether tensors in host memory are pinned, for faster copies to an accelerator.

    Attributes:
        bounds: The tiers and their free bytes. None: the bound is unknown.

    Raises:
        ValueError: `offload_dir` cannot be made or written.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        offload_dir: str | os.PathLike[str] | None = None,
        has_host: bool | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._device = device
        self._folder = None if offload_dir is None else _writable(offload_dir)
        self._pin_memory = pin_memory and device.type != "cpu"
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address
        self._rest: tuple[int, int, mmap.mmap] | None = None  # of the last file: address, bytes used, itself
        self._file_bytes = _FILE_BYTES[0]
        libc = ctypes.CDLL(None)
        self._mallopt = getattr(libc, "mallopt", None) if device.type == "cpu" else None
        self._malloc_trim = getattr(libc, "malloc_trim", None) if device.type == "cpu" else None
        bounds: dict[Home, int | None] = {Home.COMPUTE: _free_bytes(device)}
        if has_host if has_host is not None else device.type != "cpu":
            bounds[Home.HOST] = None
        if self._folder is not None:
            bounds[Home.DISK] = shutil.disk_usage(self._folder).free
        self.bounds: Mapping[Home, int | None] = MappingProxyType(bounds)

    def device_of(self, home: Home) -> torch.device:
        """Return the device of tensors that have their home in a tier."""
        return self._device if home is Home.COMPUTE else torch.device("cpu")

    def keep(self, tensor: torch.Tensor, home: Home) -> torch.Tensor:
        """Return a tensor of the same values in a tier: the tensor itself, if it is there.

        Raises:
            OSError: The disk has no room for it.
        """
        if self._is_at(tensor, home):
            return tensor
        kept = self._empty(tensor.shape, tensor.dtype, home)
        kept.copy_(tensor)
        self.give_back([kept])
        return kept

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free the pages of tensors on disk; their values remain in the file."""
        for file, begin, end in self._pages(tensors):
            file.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to read tensors on disk ahead of their use."""
        for file, begin, end in self._pages(tensors):
            file.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def map_large_blocks(self) -> None:
        """Return large blocks to the system when they are freed; see [Note: freed memory].

        Without effect if the user has set MALLOC_MMAP_THRESHOLD_, and without glibc.
        """
        if self._mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            self._mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
            self._mallopt(_M_TRIM_THRESHOLD, _MAPPED_BYTES)

    def give_back_freed(self) -> None:
        """Return the free pages of the heap to the system; see [Note: freed memory]."""
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    def _is_at(self, tensor: torch.Tensor, home: Home) -> bool:
        is_on_disk = self._file_of(tensor) is not None
        return is_on_disk if home is Home.DISK else not is_on_disk and tensor.device == self.device_of(home)

    def _empty(self, shape: torch.Size, dtype: torch.dtype, home: Home) -> torch.Tensor:
        if home is not Home.DISK:
            pin = self._pin_memory and home is Home.HOST
            return torch.empty(shape, dtype=dtype, device=self.device_of(home), pin_memory=pin)
        numel = shape.numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        num_bytes = numel * dtype.itemsize
        address, begin, file = self._rest or (0, 0, None)
        if file is None or begin + num_bytes > len(file):
            address, begin, file = self._new_file(max(num_bytes, self._file_bytes))
            self._file_bytes = min(2 * self._file_bytes, _FILE_BYTES[1])
        self._rest = (address, begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT, file)
        return torch.frombuffer(file, dtype=dtype, count=numel, offset=begin).view(shape)

    def _new_file(self, num_bytes: int) -> tuple[int, int, mmap.mmap]:
        assert self._folder is not None, "a home on disk needs a folder"
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix="colossalai-chunks-") as opened:
                os.posix_fallocate(opened.fileno(), 0, size)
                file = mmap.mmap(opened.fileno(), size)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise OSError(
                error.errno,
                f"{error.strerror} (chunks on disk: {size} bytes needed, {free} free in {self._folder})",
            ) from error
        address = torch.frombuffer(file, dtype=torch.uint8, count=1).data_ptr()
        self._maps[address] = file
        return address, 0, file

    def _file_of(self, tensor: torch.Tensor) -> tuple[int, mmap.mmap] | None:
        if self._folder is None or tensor.device.type != "cpu":
            return None
        place = tensor.data_ptr()
        found = ((address, file) for address, file in self._maps.items() if 0 <= place - address < len(file))
        return next(found, None)

    def _pages(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[mmap.mmap, int, int]]:
        """Yield the pages that tensors touch, runs of them as one: a file, begin and end."""
        touched: dict[int, list[tuple[int, int]]] = {}
        files: dict[int, mmap.mmap] = {}
        for tensor in tensors:
            if tensor.numel() == 0 or (found := self._file_of(tensor)) is None:
                continue
            address, files[found[0]] = found
            begin = tensor.data_ptr() - address
            end = begin + tensor.numel() * tensor.element_size()
            pages = (begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
            touched.setdefault(address, []).append(pages)
        for address, ranges in touched.items():
            ranges.sort()
            begin, end = ranges[0]
            for following, its_end in ranges[1:]:
                if following > end:
                    yield files[address], begin, end
                    begin = following
                end = max(end, its_end)
            yield files[address], begin, end


def _writable(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder, made if need be, in which files can be made.

    Raises:
        ValueError: No file can be made in `folder`.
    """
    path = os.path.abspath(folder)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        reason = error.strerror or errno.errorcode.get(error.errno or 0, str(error))
        raise ValueError(
            f"offload_dir is {os.fspath(folder)!r}, and no file can be made there ({reason}): give a folder "
            "on a disk that you may write"
        ) from error


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of an accelerator. None: a CPU, or unknown."""
    if device.type == "cpu" or not hasattr(torch.accelerator, "get_memory_info"):
        return None
    return int(torch.accelerator.get_memory_info(device)[0])
