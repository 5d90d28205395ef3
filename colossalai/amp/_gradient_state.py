"""States of the gradients of an optimizer between its backwards and its step, and the moves between them.

[Note: states of gradients]
A backward adds gradients that contain the loss scale (`SCALED`). Once for all optimizers of the model with
scaled gradients, it is decided whether they are finite: `ACCEPTED`, or `OVERFLOWED`. Accepted gradients are
divided by the scale when their optimizer needs them (`TRUE`). After a step, until they are cleared, gradients
are `STALE`: decisions of other optimizers leave them out, also when a backward of another optimizer adds to
them (`MIXED`). A backward of their own optimizer adds to them, as in torch: to their present values, clipped
or not, multiplied by the scale again.
"""

from enum import Enum, auto


class GradState(Enum):
    """State of the gradients of an optimizer; see [Note: states of gradients]."""

    EMPTY = auto()
    SCALED = auto()
    ACCEPTED = auto()
    TRUE = auto()
    OVERFLOWED = auto()
    STALE = auto()
    MIXED = auto()


class GradEvent(Enum):
    """Event that changes the state of an optimizer's gradients."""

    BACKWARD = auto()  # of their optimizer
    OTHER_BACKWARD = auto()  # of another optimizer of the model
    ACCEPT = auto()
    REJECT = auto()
    DIVIDE = auto()
    STEP = auto()
    FORGET = auto()


_DECIDE = {GradEvent.ACCEPT: GradState.ACCEPTED, GradEvent.REJECT: GradState.OVERFLOWED}
_ALWAYS = {GradEvent.BACKWARD: GradState.SCALED, GradEvent.FORGET: GradState.EMPTY}

MOVES: dict[GradState, dict[GradEvent, GradState]] = {
    GradState.EMPTY: {
        **_ALWAYS,
        **_DECIDE,
        GradEvent.OTHER_BACKWARD: GradState.SCALED,
        GradEvent.STEP: GradState.STALE,  # with a closure that ran a backward of torch's own
    },
    GradState.SCALED: {
        **_ALWAYS,
        **_DECIDE,
        GradEvent.OTHER_BACKWARD: GradState.SCALED,
        GradEvent.STEP: GradState.STALE,  # with a closure, which has no scale
    },
    GradState.ACCEPTED: {
        **_ALWAYS,
        GradEvent.OTHER_BACKWARD: GradState.SCALED,
        GradEvent.DIVIDE: GradState.TRUE,
    },
    GradState.TRUE: {
        **_ALWAYS,
        GradEvent.OTHER_BACKWARD: GradState.SCALED,
        GradEvent.STEP: GradState.STALE,
    },
    GradState.OVERFLOWED: {
        **_ALWAYS,
        GradEvent.OTHER_BACKWARD: GradState.MIXED,
        GradEvent.STEP: GradState.STALE,
    },
    GradState.STALE: {**_ALWAYS, **_DECIDE, GradEvent.OTHER_BACKWARD: GradState.MIXED},
    GradState.MIXED: {**_ALWAYS, **_DECIDE, GradEvent.OTHER_BACKWARD: GradState.MIXED},
}
"""For each state, the next state after each legal event."""
