"""The options of the older interface: their values, and the layouts that they allow."""

import math
from collections.abc import Sequence

from colossalai.auto_parallel._make import PlanProblem
from colossalai.auto_parallel._setting import Setting

SOLVER_PREFERENCES = ("standard", "tp", "dp")
DATALOADER_OPTIONS = ("replicated", "distributed")
SHARD_OPTIONS = ("standard", "shard", "shard_last_axis", "full_shard")


def check_options(solver_preference: str, dataloader_option: str, shard_option: str) -> None:
    """Refuse unknown or contradictory options.

    Raises:
        ValueError: `solver_preference`, `dataloader_option` or `shard_option` is unknown, or `shard_option`
            requires cut parameters with data parallelism alone.
    """
    for name, value, known in (
        ("solver_preference", solver_preference, SOLVER_PREFERENCES),
        ("dataloader_option", dataloader_option, DATALOADER_OPTIONS),
        ("shard_option", shard_option, SHARD_OPTIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(known)}")
    if solver_preference == "dp" and shard_option != "standard":
        raise ValueError(
            f"solver_preference='dp' cuts no parameters, and shard_option={shard_option!r} requires it: "
            "leave one of them out"
        )


def allowed_settings(
    problem: PlanProblem, shape: Sequence[int], preference: str, shard: str
) -> list[Setting]:
    """Return the layouts of a grid of ranks that satisfy the options; at least one.

    Raises:
        ValueError: `shape` has none.
    """
    found = [each for each in problem.settings if _is_allowed(each, shape, preference, shard)]
    if not found:
        raise ValueError(
            f"no layout of {math.prod(shape)} ranks as {tuple(shape)} for a batch of {problem.batch} has "
            f"solver_preference={preference!r} and shard_option={shard!r}: choose others, or a batch that "
            "the ranks divide"
        )
    return found


def _is_allowed(setting: Setting, shape: Sequence[int], preference: str, shard: str) -> bool:
    """Whether a layout fits a grid of ranks and satisfies the options."""
    if setting.zero or setting.pipeline > 1 or setting.expert > 1:
        return False
    extents = [1]
    for extent in reversed(shape):
        extents.append(extents[-1] * extent)
    is_of_grid = len(shape) == 1 or setting.tensor in extents
    is_preferred = {
        "standard": True,
        "tp": setting.data == 1,
        "dp": setting.tensor == 1,
    }[preference]
    num_ranks = setting.world_size
    is_cut = {
        "standard": True,
        "shard": setting.tensor > 1 or num_ranks == 1,
        "shard_last_axis": setting.tensor == shape[-1],
        "full_shard": setting.data == 1,
    }[shard]
    return is_of_grid and is_preferred and is_cut
