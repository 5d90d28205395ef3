"""Input cuts of layers under construction: given by the caller, or taken from the order of construction.

A layer's scheme follows from the cut of its input, and its weight is cut when it is built, before any input
is
seen. So a layer is given the cut of its input: `input_cut=`, or `after=` another layer. Without either,
layers
are assumed to be applied in the order of their construction: each is built for the output cut of the one
before, and an embedding, or `restart`, begins anew. The cut is compared with the activation's, see
[Note: records of activations].
"""

from typing import Protocol, runtime_checkable

from torch import nn

from colossalai.nn.layer.tensor_parallel._launched import Point, launched_job
from colossalai.nn.layer.tensor_parallel._record import REMEDY, RecordEntry
from colossalai.nn.layer.tensor_parallel._scheme import LINEAR_SCHEMES, Cut, first_cut


@runtime_checkable
class LeavesCut(Protocol):
    """Type of `after=`: a module with an output cut."""

    @property
    def output_cut(self) -> Cut:
        """Cut of its output."""


def entry_of(
    mode: str | None,
    layer: str,
    in_features: int | None = None,
    *,
    input_cut: Cut | None = None,
    after: nn.Module | None = None,
) -> RecordEntry:
    """Return how the input of a layer that is being built will be cut.

    Args:
        mode: The tensor mode.
        layer: The layer, for messages.
        in_features: Global size of its input features, None for any.
        input_cut: As the user gave it, if at all.
        after: The layer whose output it takes, if the user gave it.

    Raises:
        ValueError: `input_cut` and `after` are both given, `after` does not know its cut, or the layer built
            before leaves other features.
    """
    if input_cut is not None and after is not None:
        raise ValueError(f"{layer} got input_cut= and after=: pass only one of them")
    if input_cut is not None:
        return RecordEntry(cut=input_cut)
    if after is not None:
        return RecordEntry(cut=output_cut_of(after, mode, by=layer))
    point = launched_job().order.point(mode)
    if point.layer is None:
        return RecordEntry(cut=point.cut, behind="no other layer")
    may_begin = point.cut == first_cut(mode)  # another model, or branch
    if not may_begin and in_features and point.features and point.features % in_features:
        raise ValueError(
            f"{layer} takes {in_features} features, but {point.layer}, which was built before it, leaves "
            f"{point.features}, cut as {point.cut}: {REMEDY}"
        )
    return RecordEntry(cut=point.cut, behind=point.layer)


def output_cut_of(module: nn.Module, mode: str | None, *, by: str) -> Cut:
    """Return how a module leaves the activation.

    Raises:
        ValueError: `module` does not know how its output is cut.
    """
    if LINEAR_SCHEMES.get(mode, LINEAR_SCHEMES[None]) == LINEAR_SCHEMES[None]:
        return Cut()  # nothing is cut, and the module may be one of torch
    if not isinstance(module, LeavesCut):
        raise ValueError(
            f"{by} got after={type(module).__name__}, which does not know how its output is cut: pass a "
            "layer of colossalai.nn, or input_cut="
        )
    return module.output_cut


def numbered(kind: str, *sizes: int) -> str:
    """Return the name of a new layer in messages: its class, sizes, and place in the order."""
    order = launched_job().order
    order.num_built += 1
    return f"{kind}({', '.join(map(str, sizes))}) [layer {order.num_built}]"


def advance(mode: str | None, cut: Cut, *, layer: str | None = None, features: int | None = None) -> None:
    """Set the output cut of the layer that was just built."""
    launched_job().order.points[mode] = Point(cut, layer, features)


def current_cut(mode: str | None) -> Cut:
    """Return the cut of the activation that the next layer of a mode is taken to see."""
    return launched_job().order.point(mode).cut


def restart(mode: str | None) -> Cut:
    """Begin a model; return the cut of its input."""
    launched_job().order.points.pop(mode, None)
    return first_cut(mode)


def end_with(mode: str | None, cut: Cut) -> None:
    """Set the output cut of the classifier that was just built; the next layer begins a model."""
    launched_job().order.heads[mode] = cut
    launched_job().order.points.pop(mode, None)


def head_cut(mode: str | None) -> Cut:
    """Return how the output of the classifier that was built last is cut: by the batch alone, if none was."""
    return launched_job().order.heads.get(mode, Cut(batch=first_cut(mode).batch))
