"""Tensor-parallel configurations for a number of processes, from the table of layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.context import TENSOR_LAYOUTS, TensorLayout
from colossalai.nn.layer import LINEAR_SCHEMES


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to shard a layer over the processes.

    Attributes:
        mode: Tensor mode; None: a plain layer on one process.
        size: Number of processes.
        depth: Depth of the 2.5D layout.
    """

    mode: str | None
    size: int
    depth: int | None = None

    @property
    def label(self) -> str:
        """Name of the configuration in tables."""
        depth = "" if self.depth is None else f", depth {self.depth}"
        return f"{self.mode or 'plain'}{depth}"

    @property
    def config(self) -> dict[str, Any]:
        """Config of the launch."""
        if self.mode is None:
            return {}
        depth = {} if self.depth is None else {"depth": self.depth}
        return {"parallel": {"tensor": {"size": self.size, "mode": self.mode, **depth}}}


def tensor_modes() -> tuple[str, ...]:
    """Return the modes that shard the weights of a layer."""
    return tuple(
        mode for mode, schemes in LINEAR_SCHEMES.items() if mode and any(s.w_in or s.w_out for s in schemes)
    )


def find_configurations(num_procs: int, modes: Sequence[str] | None = None) -> list[Configuration]:
    """Return every configuration for a number of processes, of all modes or of some.

    One process has one configuration in all modes, the plain layer.
    """
    if num_procs == 1:
        return [Configuration(mode=None, size=1)]
    return [
        Configuration(mode=mode, size=num_procs, depth=depth)
        for mode in (tensor_modes() if modes is None else modes)
        for depth in _depths(TENSOR_LAYOUTS[mode], num_procs)
    ]


def why_none(mode: str, num_procs: int) -> str:
    """Return the reason why a mode has no configuration for this number of processes."""
    return f"mode {mode!r} needs {TENSOR_LAYOUTS[mode].requirement} processes, not {num_procs}"


def _depths(layout: TensorLayout, num_procs: int) -> list[int | None]:
    """Return the depths at which a layout has this many ranks; [None] if it fits and has no depth."""
    has_depth = layout.size(1, 1) != layout.size(1, 2)
    depths = [depth for depth in range(1, num_procs + 1) if num_procs % depth == 0] if has_depth else [1]
    fitting = [depth for depth in depths if _fits(layout, num_procs, depth)]
    return [depth if has_depth else None for depth in fitting]


def _fits(layout: TensorLayout, num_procs: int, depth: int) -> bool:
    edge = layout.largest_edge(num_procs, depth)
    return edge > 1 and layout.size(edge, depth) == num_procs
