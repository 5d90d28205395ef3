"""Quantized weights in 8 or 4 bits: formats, quantization and dequantization.

`int8`, `int8-weights`: a code c in -127..127 for each weight, a scale s for each output channel: w = s c.
`int4:group`: a code c in 0..15, and for each channel and each `group` inputs a scale and a zero point:
w = s (c - 8) + z; a byte has two codes, the first one in its lower half.
Scales come from the whole weight before it is sharded, so that sharded and whole weights are the same.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT4_GROUPS = (32, 64, 128, 256)
_LARGEST = 127
_MIDDLE = 8  # the middle of the 16 codes of 4 bits


@dataclass(frozen=True)
class QuantizationWay:
    """Format of quantized weights and activations.

    Attributes:
        bits: Number of bits of a weight.
        group: Number of inputs that share a scale; 0 for a whole output channel.
        rounds_rows: Whether activations are rounded to 8 bits, row by row.
    """

    bits: int
    group: int = 0
    rounds_rows: bool = False

    @classmethod
    def of(cls, text: str) -> "QuantizationWay":
        """Parse the name of a format.

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
        """Name of the format, as parsed by `of`."""
        if self.bits == 4:
            return f"int4:{self.group}"
        return "int8" if self.rounds_rows else "int8-weights"

    @property
    def per_byte(self) -> int:
        """Number of codes in a byte."""
        return 8 // self.bits

    def fits(self, in_features: int) -> bool:
        """Return whether a weight with `in_features` inputs can have this format."""
        return not self.group or in_features % self.group == 0


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight.

    Attributes:
        way: Its format.
        codes: (out, in) int8, or (out, in / 2) uint8 for 4 bits.
        scales: (out,) float32, or (out, in / group) bfloat16.
        zeros: (out, in / group) bfloat16 for 4 bits; None for 8.
    """

    way: QuantizationWay
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def out_features(self) -> int:
        """Number of output channels."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.codes.shape[1] * self.way.per_byte

    @property
    def num_bytes(self) -> int:
        """Size of codes, scales and zero points in bytes."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def unpacked(self) -> Tensor:
        """Return the codes with one per element, (out, in); uint8 for 4 bits."""
        if self.way.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight, (out, in)."""
        precise = torch.promote_types(dtype, torch.float32)
        codes = self.unpacked().to(precise)
        if self.zeros is None:
            return codes.mul_(self.scales.to(precise)[:, None]).to(dtype)
        grouped: Tensor = codes.sub_(_MIDDLE).unflatten(1, (-1, self.way.group))
        grouped = grouped.mul_(self.scales.to(precise)[:, :, None]).add_(self.zeros.to(precise)[:, :, None])
        values: Tensor = grouped.flatten(1).to(dtype)
        return values


def quantize(weight: Tensor, way: QuantizationWay) -> QuantizedWeight:
    """Quantize a weight to the nearest codes.

    Args:
        weight: (out, in), of any floating dtype.
        way: The format, which must fit.
    """
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if way.bits == 8:
        scales = (values.abs().amax(1) / _LARGEST).float()
        # A channel of zeros has codes 0 with any divisor.
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = (values / divisors[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return QuantizedWeight(way, codes, scales, None)
    grouped = values.unflatten(1, (-1, way.group))  # (out, groups, group)
    least, most = grouped.amin(-1), grouped.amax(-1)
    # Scales and zero points are rounded before the codes, which are then nearest to the values used.
    scales = ((most - least) / 15).bfloat16()
    zeros = (least + scales.to(values.dtype) * _MIDDLE).bfloat16()
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales).to(values.dtype)
    offsets = (grouped - zeros.to(values.dtype)[:, :, None]).div_(divisors[:, :, None])
    halves = offsets.add_(_MIDDLE).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return QuantizedWeight(way, halves[:, 0::2] | (halves[:, 1::2] << 4), scales, zeros)


def merged(weights: "list[QuantizedWeight]") -> QuantizedWeight:
    """Concatenate weights with the same inputs along their outputs."""
    first = weights[0]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )
