"""Plugin that runs a plan of Colossal-Auto."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossalai.amp import FullPrecision, Precision
from colossalai.booster.plugin._plugin import Plugin
from colossalai.context import global_context, names_arguments
from colossalai.pipeline import BatchDim, PipelineOptions
from colossalai.runtime import Plan

if TYPE_CHECKING:
    from colossalai.auto_parallel import AutoPlan


class AutoPlugin(Plugin):
    """Trains a model by a plan of `colossalai.auto_parallel.make_plan` or `colossalai plan`.

    Args:
        plan: The plan, or the path of its file.
        batch_dim: Dimension of the samples for a pipeline, if the plan has one; see `HybridParallelPlugin`.
        loss_reduction: Reduction of criteria, "mean" or "sum"; see `HybridParallelPlugin`.

    Raises:
        ValueError: `plan` cannot be read, or is not a plan, or an option is out of range.
    """

    @names_arguments
    def __init__(
        self,
        plan: "AutoPlan | str | Path",
        *,
        batch_dim: BatchDim | None = None,
        loss_reduction: str | None = None,
    ) -> None:
        from colossalai.auto_parallel import given_plan  # imports the planner, which other jobs do not need

        self.auto_plan: AutoPlan = given_plan(plan)
        self._of_batches: dict[str, Any] = {"batch_dim": batch_dim, "loss_reduction": loss_reduction}
        PipelineOptions(num_microbatches=1, batch_dim=batch_dim, loss_reduction=loss_reduction)  # checks both

    def configure(self) -> None:
        """See the base class.

        Raises:
            ConfigException: The plan is for another number of ranks, or the job has another layout.
        """
        self.auto_plan.layout_over(global_context.mesh.world_size)
        super().configure()

    def plan(self, precision: Precision) -> Plan:
        """See the base class.

        Raises:
            ValueError: `precision` was given to Booster, and the plan has its own.
        """
        if not isinstance(precision, FullPrecision):
            raise ValueError(
                f"precision is given twice: to Booster, and by the plan ({self.auto_plan.precision!r}), "
                "whose predictions hold for it: leave mixed_precision out, or make a plan for another one"
            )
        plan = self.auto_plan.runtime_plan()
        if plan.pipeline is None:
            return plan
        return replace(plan, pipeline=replace(plan.pipeline, **self._of_batches))
