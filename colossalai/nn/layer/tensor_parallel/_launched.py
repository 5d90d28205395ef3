"""The launched job for layers under construction: mesh, tensor mode, device, and the layers before.

Layers, losses, metrics and models read it once, in their constructors, if they are not given a mesh. They
keep the values that a forward needs.
"""

from dataclasses import dataclass, replace

import torch

from colossalai.context import Layout, Mesh, global_context
from colossalai.nn.layer.tensor_parallel._scheme import Cut, first_cut


@dataclass(frozen=True, slots=True)
class Point:
    """Position in a model under construction.

    Attributes:
        cut: Output cut of the layer that was built last.
        layer: That layer, for messages; None at the beginning of a model.
        features: Its number of output features, if known.
    """

    cut: Cut
    layer: str | None = None
    features: int | None = None


class BuildOrder:
    """The layer that was built last, for each mode; it lives as long as the layout of the job."""

    def __init__(self) -> None:
        self.points: dict[str | None, Point] = {}
        self.heads: dict[str | None, Cut] = {}
        self.num_built = 0

    def point(self, mode: str | None) -> Point:
        """Return where the model has got to."""
        return self.points.get(mode) or Point(first_cut(mode))


@dataclass(frozen=True)
class LaunchedJob:
    """Settings in force during the construction of a layer.

    Attributes:
        mesh: The ranks; this process alone where nothing has been launched.
        layout: The extents of the mesh, and the tensor mode; none where a plan cuts layers by name later.
        device: The device of this rank.
        order: The layers that were built before.
    """

    mesh: Mesh
    layout: Layout
    device: torch.device
    order: BuildOrder

    @property
    def mode(self) -> str | None:
        """The tensor mode."""
        return self.layout.mode

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The names of the tensor axes of the mesh, outermost first."""
        return tuple(self.layout.tensor_axes())


def launched_job() -> LaunchedJob:
    """Return the settings in force here; for constructors of layers that are not given a mesh."""
    layout = global_context.layout
    if layout.plain_layers:
        layout = replace(layout, tensor=1, mode=None)
    alone = Mesh(layout.axes(), rank=0, views={"dp": ("edp", "ep")})
    return LaunchedJob(
        mesh=global_context.mesh if global_context.is_launched else alone,
        layout=layout,
        device=global_context.device,
        order=global_context.of_layout(BuildOrder),
    )


def require_mode(mode: str | None, *, by: str) -> None:
    """Require that a tensor mode is in force; None goes with every one.

    Args:
        mode: The mode.
        by: The caller, for the message.

    Raises:
        ValueError: The tensor mode in force is another one.
    """
    found = launched_job().mode
    if mode is not None and mode != found:
        raise ValueError(
            f"{by} needs a job launched with parallel=dict(tensor=dict(size=..., mode={mode!r})), or a "
            "plugin that has laid the mesh out so, by Booster(plugin=...) or plugin.configure(), before it "
            f"is built; the mode of this one is {found!r}"
        )
