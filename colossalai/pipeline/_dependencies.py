"""What an action waits for, and what it makes possible.

Both are said in halves: a whole backward completes the input gradient and the weight gradients of its stage,
so that nobody needs to know whether the stage behind splits its backward.
"""

from colossalai.pipeline._schedule import Action, Op


def completed_by(action: Action) -> tuple[Action, ...]:
    """Return what is there after an action: itself, or the two halves of a whole backward."""
    if action.op is Op.BACKWARD:
        return (
            Action(Op.INPUT_GRAD, action.stage, action.microbatch),
            Action(Op.WEIGHT_GRAD, action.stage, action.microbatch),
        )
    return (action,)


def needed_by(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return what must be there before an action, as `completed_by` names it.

    A forward needs the stage before; an input gradient, alone or in a whole backward, the own forward and the
    gradient from the stage behind; a weight gradient the own input gradient, which leaves its inputs behind.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return (Action(Op.FORWARD, stage - 1, microbatch),) if stage > 0 else ()
    if action.op is Op.WEIGHT_GRAD:
        return (Action(Op.INPUT_GRAD, stage, microbatch),)
    own = Action(Op.FORWARD, stage, microbatch)
    if stage + 1 == num_stages:
        return (own,)
    return own, Action(Op.INPUT_GRAD, stage + 1, microbatch)
