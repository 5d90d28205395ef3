"""Costs: seconds and bytes of a model's operations on one rank, for its share of the batch and the features.

A rank has a part of the batch (data parallelism and microbatches) and of some layers (tensor parallelism).
The costs follow from the profile of an operation on the whole batch: floating point operations and bytes of
activations scale with the part of the batch, bytes of parameters with the part of the features. Parameters
are read in the forward; in the backward they are read, and their gradient is written.

[Note: memory under autocast]
A product casts its wider inputs to 16 bits and saves the casts: one cast of a parameter per forward, so that
each microbatch has its own, and one cast of an activation per product. Outputs of products have 16 bits, and
so have outputs of other operations whose inputs all have 16 bits. Norms, softmax and losses are computed in
float32, and so are sums with float32 operands, such as the residual stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from colossalai.auto_parallel.machine._machine import MachineProfile, kind_of, time_of
from colossalai.auto_parallel.machine._rates import FLOP_KINDS, Kind
from colossalai.auto_parallel.trace._profile_ops import OpProfile
from colossalai.auto_parallel.trace._trace import ModelTrace, Operation

PRECISIONS: Mapping[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_master": torch.bfloat16,
    "fp16_naive": torch.float16,
}
"""Compute dtype of products, by the name of the precision; None: the dtype of the model."""

MASTERS = frozenset({"bf16_master", "fp16_naive"})
"""Precisions with a 16-bit model and a float32 copy of it in the optimizer."""

_IN_FLOAT32: frozenset[Kind] = frozenset({"norm", "batch_norm", "softmax", "loss"})  # under autocast

OPTIMIZER_STATES: Mapping[str, int] = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}
"""Number of optimizer states per parameter, each of the size of the parameter or of its master."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of the forward and of the backward."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.forward + self.backward

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class ParamSizes:
    """Sizes of some parameters on a rank. Frozen ones have no gradients, no masters and no states.

    Attributes:
        bytes: Bytes of all of them, in the dtype of the model, before ZeRO shards them.
        trained_bytes: Bytes of those with gradients.
        trained_numel: Number of elements of those with gradients.
        num_trained: Number of those with gradients.
    """

    bytes: float
    trained_bytes: float
    trained_numel: float
    num_trained: int = 0

    def __sub__(self, other: "ParamSizes") -> "ParamSizes":
        return ParamSizes(
            bytes=self.bytes - other.bytes,
            trained_bytes=self.trained_bytes - other.trained_bytes,
            trained_numel=self.trained_numel - other.trained_numel,
            num_trained=self.num_trained - other.num_trained,
        )

    def __truediv__(self, divisor: float) -> "ParamSizes":
        return ParamSizes(
            bytes=self.bytes / divisor,
            trained_bytes=self.trained_bytes / divisor,
            trained_numel=self.trained_numel / divisor,
            num_trained=self.num_trained,
        )


class OperationCosts:
    """Costs of the operations of a trace on a machine.

    Args:
        trace: The trace, of the whole batch.
        profiles: Profiles of its operations, by name.
        machine: The machine.
        precision: A key of `PRECISIONS`.

    Raises:
        ValueError: `precision` is unknown.
    """

    def __init__(
        self,
        trace: ModelTrace,
        profiles: Mapping[str, OpProfile],
        machine: MachineProfile,
        *,
        precision: str,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
        self.trace, self.profiles, self.machine = trace, profiles, machine
        self.precision = precision
        self._kinds: dict[str, Kind] = {each.name: kind_of(each.target) for each in trace.operations}
        self._known: dict[tuple[object, ...], Seconds] = {}
        self._known_sizes: dict[str, tuple[int, int, bool]] = {}
        self._signatures = {each.name: self._signature(each) for each in trace.operations}

    def in_own_types(self) -> "OperationCosts":
        """Return the costs of the model in its own dtypes."""
        if PRECISIONS[self.precision] is None:
            return self
        return OperationCosts(self.trace, self.profiles, self.machine, precision="fp32")

    @property
    def activation_ratio(self) -> float:
        """Bytes of an activation under the precision over those of float32, where all of them are cast."""
        to = PRECISIONS[self.precision]
        return to.itemsize / 4 if to is not None and self.precision in MASTERS else 1.0

    @cached_property
    def batch_norms(self) -> tuple[Operation, ...]:
        """The operations that are batch norms."""
        return tuple(each for each in self.trace.operations if self._kinds[each.name] == "batch_norm")

    @cached_property
    def saved_by(self) -> tuple[dict[str, float], dict[str, float]]:
        """Saved for backward: bytes by tensor, each storage once; and bytes by operation, of no tensor."""
        tensors: dict[str, float] = {}
        extra: dict[str, float] = {}
        for operation in self.trace.operations:
            profile = self.profiles[operation.name]
            more = float(profile.extra_saved_bytes)
            for name in profile.saved:
                if name in self.trace.outside:
                    continue
                if self._casts(operation, name):  # see [Note: memory under autocast]
                    more += self._bytes_of_cast(name)
                else:
                    tensors[name] = self.activation_bytes(name)
            if more:
                extra[operation.name] = more
        return tensors, extra

    # See [Note: memory under autocast].
    @cached_property
    def casts_of_weights(self) -> Mapping[str, float]:
        """Bytes of parameter casts saved for backward, by the first operation that needs each."""
        found: dict[str, float] = {}
        seen: set[str] = set()
        for operation in self.trace.operations:
            for name in self.profiles[operation.name].saved:
                storage = self.trace.storage_of(name)
                if name in self.trace.params and storage not in seen and self._casts(operation, name):
                    seen.add(storage)
                    found[operation.name] = found.get(operation.name, 0.0) + self._bytes_of_cast(name)
        return found

    def _casts(self, operation: Operation, tensor: str) -> bool:
        """Whether an operation casts a tensor to 16 bits."""
        is_product = self._kinds[operation.name] in FLOP_KINDS
        return is_product and self._is_autocast and self._is_wide(tensor) and tensor not in self._narrow

    def _bytes_of_cast(self, tensor: str) -> float:
        to = PRECISIONS[self.precision]
        assert to is not None, "there are casts"
        return float(self.trace.tensors[tensor].numel * to.itemsize)

    @property
    def _is_autocast(self) -> bool:
        return PRECISIONS[self.precision] is not None and self.precision not in MASTERS

    def _is_wide(self, tensor: str) -> bool:
        """Whether a tensor has a floating type of more bytes than the precision."""
        dtype, to = self.trace.tensors[tensor].dtype, PRECISIONS[self.precision]
        return to is not None and dtype.is_floating_point and dtype.itemsize > to.itemsize

    @cached_property
    def _narrow(self) -> frozenset[str]:
        """The tensors that have 16 bits under autocast."""
        found: set[str] = set()
        for operation in self.trace.operations if self._is_autocast else ():
            kind = self._kinds[operation.name]
            given = [name for name in operation.inputs if self._is_wide(name)]
            if kind in FLOP_KINDS or (kind not in _IN_FLOAT32 and given and found.issuperset(given)):
                found.update(filter(self._is_wide, operation.outputs))
        return frozenset(found)

    def seconds(self, operation: Operation, *, share: float, divisor: int = 1, cut: str = "") -> Seconds:
        """Return the seconds of an operation on one rank.

        Args:
            operation: The operation.
            share: Fraction of the batch that the rank computes at a time.
            divisor: Number of ranks that share its features.
            cut: For a product, the features that they share: "output" or "input".
        """
        key = (self._signatures[operation.name], share, divisor, cut)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compute(operation, share, divisor, cut)
        return found

    def activation_bytes(self, tensor: str) -> float:
        """Return the bytes of a tensor of the whole batch, in its dtype under the precision."""
        is_narrow = self._is_wide(tensor) and (self.precision in MASTERS or tensor in self._narrow)
        return self._bytes_of_cast(tensor) if is_narrow else self.trace.tensors[tensor].num_bytes

    def param_bytes(self, tensor: str) -> int:
        """Return the bytes of a parameter in the dtype of the model."""
        return self._param_size(tensor)[0]

    def param_sizes(self, divisors: Mapping[str, int]) -> "ParamSizes":
        """Return the sizes of some parameters on a rank.

        Args:
            divisors: Number of ranks that share each parameter, by the name of its tensor.
        """
        num_bytes = trained_bytes = trained_numel = 0.0
        num_trained = 0
        for name, divisor in divisors.items():  # hot: a search computes this for a block thousands of times
            size, numel, is_trained = self._param_size(name)
            num_bytes += size / divisor
            if is_trained:
                trained_bytes += size / divisor
                trained_numel += numel / divisor
                num_trained += 1
        return ParamSizes(
            bytes=num_bytes,
            trained_bytes=trained_bytes,
            trained_numel=trained_numel,
            num_trained=num_trained,
        )

    def _param_size(self, tensor: str) -> tuple[int, int, bool]:
        """Return the bytes and the number of elements of a parameter, and whether it has a gradient."""
        found = self._known_sizes.get(tensor)
        if found is None:
            is_trained = self.trace.storage_of(tensor) in self._trainable
            found = self._find_bytes(tensor), self.trace.tensors[tensor].numel, is_trained
            self._known_sizes[tensor] = found
        return found

    @cached_property
    def _trainable(self) -> frozenset[str]:
        """The storages of parameters with gradients."""
        return frozenset(map(self.trace.storage_of, self.trace.trainable))

    def _find_bytes(self, tensor: str) -> int:
        meta = self.trace.tensors[tensor]
        to = PRECISIONS[self.precision] if self.precision in MASTERS else None
        if to is None or not meta.dtype.is_floating_point:
            return meta.num_bytes
        return meta.numel * min(to.itemsize, meta.dtype.itemsize)

    @cached_property
    def all_params(self) -> "ParamSizes":
        """The sizes of all parameters, tied ones counted once."""
        own = (name for name in self.trace.params if self.trace.storage_of(name) == name)
        return self.param_sizes(dict.fromkeys(own, 1))

    def _signature(self, operation: Operation) -> tuple[object, ...]:
        metas = tuple(
            (self.trace.tensors[name], name in self.trace.params)
            for name in (*operation.inputs, *operation.outputs)
        )
        profile = self.profiles[operation.name]
        flops = profile.forward_flops, profile.backward_flops
        return operation.target, metas, flops, profile.forward_bytes, profile.backward_bytes

    def _compute(self, operation: Operation, share: float, divisor: int, cut: str) -> Seconds:
        profile, kind = self.profiles[operation.name], self._kinds[operation.name]
        if kind == "view" and profile.forward_bytes == 0:
            return Seconds()
        tensors, params_of = self.trace.tensors, self.trace.params
        own = sum(tensors[name].num_bytes for name in operation.inputs if name in params_of)
        dtype, scale = self._dtype(operation, kind)
        shape = self._shape(operation, kind, share, divisor, cut)
        part = share / divisor
        found = []
        for is_backward in (False, True):
            flops = profile.backward_flops if is_backward else profile.forward_flops
            moved = profile.backward_bytes if is_backward else profile.forward_bytes
            if is_backward and not (flops or moved):
                found.append(0.0)
                continue
            params = min(own * (2 if is_backward else 1), moved)
            found.append(
                time_of(
                    self.machine,
                    flops=flops * part,
                    bytes=((moved - params) * part + params / divisor) * scale,
                    kind=kind,
                    dtype=dtype,
                    shape=shape,
                    is_backward=is_backward,
                )
            )
        return Seconds(*found)

    def _dtype(self, operation: Operation, kind: Kind) -> tuple[torch.dtype, float]:
        """Return the dtype that an operation computes in, and the factor of its bytes relative to its own."""
        floats = [
            self.trace.tensors[name].dtype
            for name in (*operation.inputs, *operation.outputs)
            if self.trace.tensors[name].dtype.is_floating_point
        ]
        own = max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
        to = PRECISIONS[self.precision]
        if to is None or own.itemsize <= to.itemsize:
            return own, 1.0
        if kind in FLOP_KINDS or self.precision in MASTERS:
            return to, to.itemsize / own.itemsize
        return own, 1.0

    def _shape(
        self, operation: Operation, kind: Kind, share: float, divisor: int, cut: str
    ) -> tuple[int, int, int] | None:
        """Return the extents that determine the rate of a product; see `time_of`."""
        if kind not in FLOP_KINDS or not operation.outputs:
            return None
        shapes = [self.trace.tensors[name].shape for name in operation.inputs]
        made = self.trace.tensors[operation.outputs[0]].shape
        if kind == "attention" and len(shapes) >= 2 and len(shapes[0]) >= 2:
            return shapes[0][-2], shapes[1][-2], shapes[0][-1]
        if kind == "convolution" and len(shapes) >= 2 and len(made) >= 3:
            positions, terms, channels = math.prod(made[:1] + made[2:]), math.prod(shapes[1][1:]), made[1]
        elif len(shapes) >= 2 and len(made) >= 2 and len(shapes[0]) >= 1:
            positions, terms, channels = math.prod(made[:-1]), shapes[0][-1], made[-1]
        else:
            return None
        terms //= divisor if cut == "input" else 1
        channels //= divisor if cut == "output" else 1
        return max(round(positions * share), 1), max(terms, 1), max(channels, 1)
