"""Parallel modes, and the table from a mode to the mesh axes of its groups.

A mode is only a name for a set of mesh axes. The modes of a job depend on the tensor mode of the layout, each
a row of `TENSOR_LAYOUTS`, and, with any of them, on whether sequences are cut along `sp`.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum


class ParallelMode(Enum):
    """Names of the groups of ranks in which parallel methods communicate.

    A user-defined mode needs no entry here: any hashable name (an own `Enum` member, a string) that an own
    `ProcessGroupInitializer` returns works like a `ParallelMode`.
    """

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_3D_INPUT_X_WEIGHT = "3d_input_x_weight"
    PARALLEL_3D_OUTPUT_X_WEIGHT = "3d_output_x_weight"
    MOE_DATA = "moe_data"
    MOE_MODEL = "moe_model"


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Arrangement of the ranks of one tensor-parallel group.

    Attributes:
        extents: From (edge length q, depth) to the tensor axes with their extents, outermost first.
        requirement: Requirement of a size, in words, for the error message.
        modes: The modes that this layout adds, with the axes of each.
    """

    extents: Callable[[int, int], Mapping[str, int]]
    requirement: str
    modes: Mapping[Hashable, tuple[str, ...]]

    def size(self, edge: int, depth: int) -> int:
        """Return the number of ranks of the arrangement with this edge length."""
        return math.prod(self.extents(edge, depth).values())

    def largest_edge(self, size: int, depth: int) -> int:
        """Return the edge length of the largest arrangement of at most `size` ranks; 0 if there is none."""
        low, high = 0, size + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size(middle, depth) <= size else (low, middle)
        return low


def _line(q: int, depth: int) -> Mapping[str, int]:
    return {"tp": q}


def _activations(q: int, depth: int) -> Mapping[str, int]:
    return {"dap": q}


def _square(q: int, depth: int) -> Mapping[str, int]:
    return {"col": q, "row": q}


def _block(q: int, depth: int) -> Mapping[str, int]:
    return {"dep": depth, "col": q, "row": q}


def _cube(q: int, depth: int) -> Mapping[str, int]:
    return {"out": q, "inp": q, "wgt": q}


TENSOR_LAYOUTS: Mapping[str | None, TensorLayout] = {
    None: TensorLayout(extents=_line, requirement="any number", modes={}),
    "1d": TensorLayout(extents=_line, requirement="any number", modes={ParallelMode.PARALLEL_1D: ("tp",)}),
    "2d": TensorLayout(
        extents=_square,
        requirement="a square (1, 4, 9, 16, ...)",
        modes={ParallelMode.PARALLEL_2D_ROW: ("row",), ParallelMode.PARALLEL_2D_COL: ("col",)},
    ),
    "2.5d": TensorLayout(
        extents=_block,
        requirement="depth times a square",
        modes={
            ParallelMode.PARALLEL_2P5D_ROW: ("row",),
            ParallelMode.PARALLEL_2P5D_COL: ("col",),
            ParallelMode.PARALLEL_2P5D_DEP: ("dep",),
            ParallelMode.PARALLEL_2P5D_XZ: ("dep", "col"),
        },
    ),
    "3d": TensorLayout(
        extents=_cube,
        requirement="a cube (1, 8, 27, 64, ...)",
        modes={
            ParallelMode.PARALLEL_3D_INPUT: ("inp",),
            ParallelMode.PARALLEL_3D_WEIGHT: ("wgt",),
            ParallelMode.PARALLEL_3D_OUTPUT: ("out",),
            ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT: ("inp", "wgt"),
            ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT: ("out", "wgt"),
        },
    ),
    "dap": TensorLayout(extents=_activations, requirement="any number", modes={}),
}


SEQUENCE_MODES: Mapping[Hashable, tuple[str, ...]] = {
    ParallelMode.SEQUENCE: ("sp",),
    ParallelMode.SEQUENCE_DP: ("dp", "sp"),
}
"""The modes that cut sequences add."""


def mode_axes(
    tensor_mode: str | None, tensor_axes: tuple[str, ...], *, cuts_sequences: bool = False
) -> dict[Hashable, tuple[str, ...]]:
    """Return the table from every mode of a layout to its mesh axes, outermost first.

    Args:
        tensor_mode: A key of `TENSOR_LAYOUTS`.
        tensor_axes: Axes of the mode TENSOR.
        cuts_sequences: Whether ranks along `sp` share sequences.
    """
    return {
        ParallelMode.GLOBAL: ("dp", "pp", "sp", *tensor_axes),
        ParallelMode.DATA: ("dp",),
        ParallelMode.PIPELINE: ("pp",),
        ParallelMode.TENSOR: tensor_axes,
        ParallelMode.MODEL: ("pp", *tensor_axes),
        ParallelMode.MOE_DATA: ("edp",),
        ParallelMode.MOE_MODEL: ("ep",),
        **TENSOR_LAYOUTS[tensor_mode].modes,
        **(SEQUENCE_MODES if cuts_sequences else {}),
    }
