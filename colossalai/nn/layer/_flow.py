"""How the activation is cut at the point that a model has reached while it is built.

A layer's scheme follows from the cut of its input, and its weight is cut when it is built, before any input
is seen. So layers that are built one after the other are taken to be applied one after the other: each is
built for the cut that the one before leaves. An embedding, or `restart`, begins anew.
"""

from colossalai.nn.layer._scheme import LINEAR_SCHEMES, Cut

_cuts: dict[str | None, Cut] = {}
_heads: dict[str | None, Cut] = {}


def current_cut(mode: str | None) -> Cut:
    """Return the cut of the activation that the next layer of a mode will see."""
    return _cuts.get(mode, first_cut(mode))


def advance(mode: str | None, cut: Cut) -> None:
    """Say how the layer that was just built leaves the activation."""
    _cuts[mode] = cut


def restart(mode: str | None) -> Cut:
    """Begin a model; return the cut of its input."""
    _cuts.pop(mode, None)
    return first_cut(mode)


def end_with(mode: str | None, cut: Cut) -> None:
    """Say how the classifier that was just built leaves its output; the next layer begins a model."""
    _heads[mode] = cut
    _cuts.pop(mode, None)


def head_cut(mode: str | None) -> Cut:
    """Return how the output of the classifier that was built last is cut: by the batch alone, if none was."""
    return _heads.get(mode, Cut(batch=first_cut(mode).batch))


def first_cut(mode: str | None) -> Cut:
    """Return the cut of the input of a model."""
    return LINEAR_SCHEMES[mode][0].x
