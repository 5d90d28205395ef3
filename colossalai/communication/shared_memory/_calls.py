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

_AGREED = struct.Struct("<QQQBBBBi")  # the same on all ranks
_OWN = struct.Struct("<IQ?Q")  # `OwnFields`
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


class OwnFields(NamedTuple):
    """The part of a header in which ranks may differ.

    Attributes:
        room: Bytes that the rank has reserved of each half of its slot.
        extent: Bytes of its largest message in an all-to-all.
        is_even: Whether its other messages are as large.
        place: Offset of the call's operand in the arena of the rank; 0: it is in the slot.
    """

    room: int
    extent: int = 0
    is_even: bool = False
    place: int = 0

    def packed(self) -> bytes:
        """Return them as the end of a header."""
        return _OWN.pack(*self)

    @classmethod
    def of(cls, header: bytes) -> "OwnFields":
        """Return those of a header."""
        return cls(*_OWN.unpack_from(header, AGREED_SIZE))


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
        return (
            _AGREED.pack(
                self.number,
                self.num_elements,
                self.stamp,
                _OPERATION_PLACES[self.operation],
                _REDUCTION_PLACES[self.reduction],
                dtype,
                self.is_growing,
                self.root,
            )
            + OwnFields(self.room).packed()
        )

    def described(self, where: str) -> str:
        """Name it: "all_reduce #118 of group 'tp'"."""
        return f"{self.operation} #{self.number} {where}"


def disagreement(
    where: str, headers: Mapping[int, bytes], words_of: Callable[[int], str] = lambda rank: ""
) -> str:
    """Return the properties in which the calls of ranks differ.

    Args:
        where: The name of the group.
        headers: By global rank, of those that are known to have come.
        words_of: Returns the meaning of a rank's stamp, or of its last one.
    """
    calls = {rank: _properties(header) for rank, header in headers.items()}
    numbers = {properties.pop("number") for properties in calls.values()}
    stamps = {rank: properties.pop("stamp") for rank, properties in calls.items()}
    line = difference(f"#{min(numbers)} {where}", calls).partition("\n")[0]
    if not line and len(numbers) > 1:
        line = f"ranks are not at the same collective {where}: #{min(numbers)} and #{max(numbers)}"
    if len(set(stamps.values())) == 1:
        return line
    line = line or f"ranks do not agree on {next(iter(calls.values()))['op']} #{min(numbers)} {where}"
    meanings = {rank: words_of(rank).partition("\n") for rank in stamps}
    advice = next(filter(None, (meaning[2] for meaning in meanings.values())), "")
    places = "; ".join(
        f"rank {rank} {'is' if stamps[rank] else 'was last'} in {meaning[0]}"
        for rank, meaning in meanings.items()
        if meaning[0]
    )
    return f"{line}: {places}{f'. {advice}' if advice else ''}"


def _properties(header: bytes) -> dict[str, Any]:
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
