"""Call headers of collectives, by which ranks detect mismatched calls.

Every rank writes the header of its call next to the data, before it publishes both. A reader of a rank's data
compares its header first. So mismatched collectives, dtypes, numbers of elements, reductions and roots under
the same number of a group are an error at once and on all ranks, and never wrong numbers.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from colossalai.monitor import difference

_AGREED = struct.Struct("<QQQBBBBi")  # the same on all ranks
_OWN = struct.Struct("<IQ?Q")  # `OwnFields`
AGREED_SIZE = _AGREED.size

# Headers contain indices into these lists, so new entries are appended.
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
        is_even: Whether all its messages have this size.
        place: Offset of the call's operand in the arena of the rank; 0: it is in the slot.
    """

    room: int
    extent: int = 0
    is_even: bool = False
    place: int = 0

    def packed(self) -> bytes:
        """Return the fields as the last bytes of a header."""
        return _OWN.pack(*self)

    @classmethod
    def of(cls, header: bytes) -> "OwnFields":
        """Return the fields of a header."""
        return cls(*_OWN.unpack_from(header, AGREED_SIZE))


class Call(NamedTuple):
    """One collective of a group, as issued by one rank.

    Attributes:
        number: Sequence number in the group.
        operation: One of `OPERATIONS`.
        num_elements: Number of elements of a rank's share, input or output; 0 if ranks differ.
        dtype: Dtype of the elements; None without elements.
        reduction: One of `REDUCTIONS`, empty without a reduction.
        root: Group rank of the root, -1 without one.
        island_root: Root among the ranks that share memory, if the group has several machines; else -1.
        is_growing: Whether the ranks first agree on larger slots.
        room: Bytes that this rank has reserved of each half of its slot.
        stamp: Number of the caller that has to be the same on all ranks; 0: none.
        stamp_text: Description of the stamp for error messages, on this rank.
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
    stamp_text: bytes = b""

    @property
    def slot_root(self) -> int:
        """Index of the root in the slots."""
        return self.root if self.island_root < 0 else self.island_root

    @property
    def slot_reduction(self) -> str:
        """Reduction in the slots: a sum for AVG, if the terms of other machines are still missing."""
        return "SUM" if self.reduction == "AVG" and self.island_root >= 0 else self.reduction

    def packed(self) -> bytes:
        """Return the call as the bytes of a header."""
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
        """Return the name of the call: "all_reduce #118 of group 'tp'"."""
        return f"{self.operation} #{self.number} {where}"


def disagreement(
    where: str, headers: Mapping[int, bytes], text_of: Callable[[int], str] = lambda rank: ""
) -> str:
    """Return the properties in which the calls of ranks differ.

    Args:
        where: Name of the group.
        headers: Headers of the ranks that have started the call, by global rank.
        text_of: Returns the description of a rank's stamp, or of its last one.
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
    texts = {rank: text_of(rank).partition("\n") for rank in stamps}
    advice = next(filter(None, (text[2] for text in texts.values())), "")
    places = "; ".join(
        f"rank {rank} {'is' if stamps[rank] else 'was last'} in {text[0]}"
        for rank, text in texts.items()
        if text[0]
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
