"""The layout of the launched job, under the names that custom layers use.

`tensor_parallel_env` stores nothing here, and cannot be set: the layout comes from `parallel` in the
config, or from a plugin.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from colossalai._not_landed import refuse_name
from colossalai.context import MOE_CONTEXT, ParallelMode, global_context

_SIZES = {
    "summa_dim": ("2d", "row"),
    "tesseract_dim": ("2.5d", "row"),
    "tesseract_dep": ("2.5d", "dep"),
    "depth_3d": ("3d", "inp"),
}
_GROUPS = {
    "input_group_3d": ParallelMode.PARALLEL_3D_INPUT,
    "weight_group_3d": ParallelMode.PARALLEL_3D_WEIGHT,
    "output_group_3d": ParallelMode.PARALLEL_3D_OUTPUT,
    "input_x_weight_group_3d": ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT,
    "output_x_weight_group_3d": ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT,
}


class TensorParallelEnv:
    """Class of `tensor_parallel_env`: read-only, the same on all ranks.

    Attributes:
        mode: The tensor mode ("1d", "2d", "2.5d", "3d", "dap", "sequence"); None without one, and before
            launch.
        summa_dim: The edge of the square of ranks in mode "2d"; None in other modes, as are the next three.
        tesseract_dim: The edge of a square of ranks in mode "2.5d".
        tesseract_dep: The number of these squares.
        depth_3d: The edge of the cube of ranks in mode "3d".
        input_group_3d: The parallel mode of the ranks that share an input in mode "3d"; None in other modes,
            as are `weight_group_3d`, `output_group_3d`, `input_x_weight_group_3d` and
            `output_x_weight_group_3d`.
    """

    __slots__ = ()

    @property
    def mode(self) -> str | None:
        """The tensor mode of the job."""
        if global_context.tensor_mode is None and global_context.sequence_attention is not None:
            return "sequence"
        return global_context.tensor_mode

    def save(self) -> dict[str, Any]:
        """Return all of it by name."""
        return {name: getattr(self, name) for name in ("mode", *_SIZES, *_GROUPS)}

    def __getattr__(self, name: str) -> Any:
        if name in _SIZES:
            mode, axis = _SIZES[name]
            return global_context.mesh.axis_size(axis) if self.mode == mode else None
        if name in _GROUPS:
            return _GROUPS[name] if self.mode == "3d" else None
        raise AttributeError(f"tensor_parallel_env has no {name!r}; it has {['mode', *_SIZES, *_GROUPS]}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"tensor_parallel_env.{name} cannot be set: choose the layout by parallel=dict(tensor=dict("
            "size=..., mode=...)) in the config, or by HybridParallelPlugin(tp_size=..., tp_mode=...)"
        )

    def __repr__(self) -> str:
        return f"tensor_parallel_env({self.save()})"


tensor_parallel_env = TensorParallelEnv()
"""The layout of the job that this process has launched."""

moe_env = MOE_CONTEXT
"""Distribution of experts, and the auxiliary loss of the last forward."""

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, "colossalai.global_variables")  # PEP 562: missing names
__path__: list[str] = []  # as a package, so that the import of a missing name uses the finder
