"""Calls of collectives as ranks see them of one another: the header that each writes, and what does not fit.

Every rank writes the header of its call beside the data, before it says that they are there. Whoever reads a
rank's data compares its header first, so that different collectives, types, numbers of elements, operations
and roots at the same place of a group are an error at once and on all ranks, and never wrong numbers.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from colossalai.monitor import difference

_AGREED = struct.Struct("<QQQBBBBi")  # what all ranks must say alike
_OWN = struct.Struct("<IQ?Q")  # what each says of itself
AGREED_SIZE = _AGREED.size

# The places in these lists are what is written: they only grow at the end.
OPERATIONS = (
    "barrier",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "all_reduce_sparse",
)
REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_DTYPE_PLACES = {getattr(torch, name): place for place, name in enumerate(_DTYPES) if hasattr(torch, name)}
_OTHER_DTYPE = 255
_OPERATION_PLACES = {name: place for place, name in enumerate(OPERATIONS)}
_REDUCTION_PLACES = {name: place for place, name in enumerate(REDUCTIONS)}


class Call(NamedTuple):
    """One collective of a group as one rank makes it.

    Attributes:
        number: How many the group has had before.
        operation: One of `OPERATIONS`.
        num_elements: Of what each rank gives or gets, whichever is a rank's share; 0 where ranks differ.
        dtype: Of the elements; None where there are none.
        reduction: One of `REDUCTIONS`, empty where nothing is reduced.
        root: The rank of the group that gives or gets, -1 without one.
        island_root: Who does so of the ranks that share memory, where the group has others as well; -1 where
            it has not.
        is_growing: Whether ranks first agree on larger slots.
        room: Bytes that this rank has reserved of each half of its slot.
        stamp: What the caller wants to be alike on all ranks, beside the call itself.
        words: What the stamp means, for people; as they are on this rank.
    """

    number: int
    operation: str
    num_elements: int = 0
    dtype: torch.dtype | None = None
    reduction: str = ""
    root: int = -1
    island_root: int = -1
    is_growing: bool = False
    room: int = 0
    stamp: int = 0
    words: bytes = b""

    @property
    def slot_root(self) -> int:
        """The index in the slots of the rank that gives or gets."""
        return self.root if self.island_root < 0 else self.island_root

    @property
    def slot_reduction(self) -> str:
        """What is done in the slots; a mean is a sum there, if ranks of other machines are still missing."""
        return "SUM" if self.reduction == "AVG" and self.island_root >= 0 else self.reduction

    def packed(self) -> bytes:
        """Return it as the bytes of a header."""
        dtype = _OTHER_DTYPE if self.dtype is None else _DTYPE_PLACES.get(self.dtype, _OTHER_DTYPE)
        return _AGREED.pack(
            self.number,
            self.num_elements,
            self.stamp,
            _OPERATION_PLACES[self.operation],
            _REDUCTION_PLACES[self.reduction],
            dtype,
            self.is_growing,
            self.root,
        ) + own_words(self.room)

    def described(self, where: str) -> str:
        """Name it: "all_reduce #118 of group 'tp'"."""
        return f"{self.operation} #{self.number} {where}"


def own_words(room: int, *, extent: int = 0, is_even: bool = False, place: int = 0) -> bytes:
    """Return what a rank says of itself in its header, behind what all must say alike.

    Args:
        room: Bytes that it has reserved of each half of its slot.
        extent: Of an all-to-all, the bytes of its largest message.
        is_even: Whether its others are as large.
        place: Where in its arena the call's operand lies; 0: it is in the slot.
    """
    return _OWN.pack(room, extent, is_even, place)


class OwnWords(NamedTuple):
    """What a rank says of itself in its header; see `own_words`."""

    room: int
    extent: int
    is_even: bool
    place: int


def read_own_words(header: bytes) -> OwnWords:
    """Return what a rank says of itself in its header."""
    return OwnWords(*_OWN.unpack_from(header, AGREED_SIZE))


def disagreement(
    where: str, headers: Mapping[int, bytes], words_of: Callable[[int], str] = lambda rank: ""
) -> str:
    """Say in what ranks do not agree.

    Args:
        where: Names the group.
        headers: Of the ranks that are known to have come, by global rank.
        words_of: What does the stamp of a rank mean, or that of its last call with one?
    """
    told = {rank: _read(header) for rank, header in headers.items()}
    numbers = {said.pop("number") for said in told.values()}
    stamps = {rank: said.pop("stamp") for rank, said in told.items()}
    line = difference(f"#{min(numbers)} {where}", told).partition("\n")[0]
    if not line and len(numbers) > 1:
        line = f"ranks are not at the same collective {where}: #{min(numbers)} and #{max(numbers)}"
    if len(set(stamps.values())) == 1:
        return line
    line = line or f"ranks do not agree on {next(iter(told.values()))['op']} #{min(numbers)} {where}"
    meanings = {rank: words_of(rank).partition("\n") for rank in stamps}
    advice = next(filter(None, (meaning[2] for meaning in meanings.values())), "")
    places = "; ".join(
        f"rank {rank} {'is' if stamps[rank] else 'was last'} in {meaning[0]}"
        for rank, meaning in meanings.items()
        if meaning[0]
    )
    return f"{line}: {places}{f'. {advice}' if advice else ''}"


def _read(header: bytes) -> dict[str, Any]:
    number, num_elements, stamp, operation, reduction, dtype, _, root = _AGREED.unpack_from(header)
    return {
        "number": number,
        "stamp": stamp,
        "op": OPERATIONS[operation] if operation < len(OPERATIONS) else f"operation {operation}",
        "dtype": _DTYPES[dtype] if dtype < len(_DTYPES) else "another one",
        "reduction": REDUCTIONS[reduction] if reduction < len(REDUCTIONS) else f"reduction {reduction}",
        "root": f"rank {root} of the group",
        "number of elements": num_elements,
        "place": "",
    }
