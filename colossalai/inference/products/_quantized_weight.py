"""Weights in 8 or 4 bits: which ways there are, how values become codes, and codes values again.

`int8`, `int8-weights`: a code c in -127..127 for each weight, a scale s for each output channel: w = s c.
`int4:group`: a code c in 0..15, and for each channel and each `group` inputs a scale and a zero point:
w = s (c - 8) + z; two codes lie in one byte, the first of them in its lower half.
Scales come from the whole weight, before it is cut over ranks, so that cut and whole are the same weights.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT4_GROUPS = (32, 64, 128, 256)
_LARGEST = 127
_MIDDLE = 8  # of the 16 codes of 4 bits


@dataclass(frozen=True)
class QuantizationWay:
    """How the weights of products are stored, and what is multiplied with them.

    Attributes:
        bits: Of a weight.
        group: Inputs that share a scale; 0: all of an output channel.
        rounds_rows: Whether activations are rounded to 8 bits, row by row.
    """

    bits: int
    group: int = 0
    rounds_rows: bool = False

    @classmethod
    def of(cls, text: str) -> "QuantizationWay":
        """Return the way of a name.

        Raises:
            ValueError: `text` is none of int8, int8-weights, int4, int4:32, int4:64, int4:128, int4:256.
        """
        if text in ("int8", "int8-weights"):
            return cls(8, rounds_rows=text == "int8")
        name, _, group = text.partition(":")
        if name == "int4" and (text == "int4" or group in map(str, INT4_GROUPS)):
            return cls(4, group=int(group or 64))
        groups = ", ".join(f"int4:{size}" for size in INT4_GROUPS)
        raise ValueError(f"quantize={text!r}; it must be int8, int8-weights, int4, or one of {groups}")

    @property
    def name(self) -> str:
        """Its name, of which `of` makes it."""
        if self.bits == 4:
            return f"int4:{self.group}"
        return "int8" if self.rounds_rows else "int8-weights"

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    def fits(self, in_features: int) -> bool:
        """Return whether a weight with so many inputs can be stored in this way."""
        return not self.group or in_features % self.group == 0


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in codes.

    Attributes:
        way: How it is stored.
        codes: (out, in) int8, or (out, in / 2) uint8 of 4 bits.
        scales: (out,) float32, or (out, in / group) bfloat16.
        zeros: (out, in / group) bfloat16 of 4 bits; None for 8.
    """

    way: QuantizationWay
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def out_features(self) -> int:
        """Output channels."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.codes.shape[1] * self.way.per_byte

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def unpacked(self) -> Tensor:
        """Return one code an element, (out, in): of 4 bits uint8."""
        if self.way.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that this stands for, (out, in)."""
        precise = torch.promote_types(dtype, torch.float32)
        codes = self.unpacked().to(precise)
        if self.zeros is None:
            return codes.mul_(self.scales.to(precise)[:, None]).to(dtype)
        grouped: Tensor = codes.sub_(_MIDDLE).unflatten(1, (-1, self.way.group))
        grouped = grouped.mul_(self.scales.to(precise)[:, :, None]).add_(self.zeros.to(precise)[:, :, None])
        values: Tensor = grouped.flatten(1).to(dtype)
        return values


def quantize(weight: Tensor, way: QuantizationWay) -> QuantizedWeight:
    """Return a weight in codes, each the nearest there is.

    Args:
        weight: (out, in), of any floating type.
        way: How; it fits.
    """
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if way.bits == 8:
        scales = (values.abs().amax(1) / _LARGEST).float()
        # A channel of zeros has the codes 0, whatever it is divided by.
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = (values / divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return QuantizedWeight(way, codes, scales, None)
    grouped = values.unflatten(1, (-1, way.group))  # (out, groups, group)
    least, most = grouped.amin(-1), grouped.amax(-1)
    # Rounded before the codes are, which then are the nearest to what will be multiplied.
    scales = ((most - least) / 15).bfloat16()
    zeros = (least + scales.to(values.dtype) * _MIDDLE).bfloat16()
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales).to(values.dtype)
    offsets = (grouped - zeros.to(values.dtype)[:, :, None]).div_(divisors[:, :, None])
    halves = offsets.add_(_MIDDLE).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return QuantizedWeight(way, halves[:, 0::2] | (halves[:, 1::2] << 4), scales, zeros)


def merged(weights: "list[QuantizedWeight]") -> QuantizedWeight:
    """Return one weight with the outputs of several, one behind the other; they have the same inputs."""
    first = weights[0]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )
