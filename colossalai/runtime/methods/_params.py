"""Device, dtype and values of parameters, batch norms and recomputation: changes inside of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from colossalai.amp import Precision, refuse_misfit
from colossalai.lazy import Materialization, is_lazy
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import ArrivingParams, DataMethod, remove_owners
from colossalai.runtime.methods._assembly import Assembly, PlanMethod
from colossalai.runtime.recomputation import Segments, apply_recompute, find_blocks
from colossalai.shardformer import follow_batches_once, keep_float32, sync_batch_norms


@dataclass(frozen=True)
class BatchNorms(PlanMethod):
    """Batch norms whose statistics are those of the whole batch, and of each batch once.

    Args:
        is_synced: Whether mean and variance are taken over the replicas.
        is_recomputed: Whether forwards run again in the backward.
        is_in_stages: Whether the model is stages of a pipeline, of which some can lack batch norms.
    """

    is_synced: bool
    is_recomputed: bool
    is_in_stages: bool

    def apply(self, job: Assembly) -> None:
        """Change the batch norms in place."""
        if self.is_synced and not sync_batch_norms(job.model, job.replicas) and not self.is_in_stages:
            get_dist_logger().log_once(
                f"sync_batch_norm has no effect: {type(job.model).__name__} has no batch norms", ranks=[0]
            )
        if self.is_recomputed:
            follow_batches_once(job.model)


@dataclass(frozen=True)
class ParamValues(PlanMethod):
    """The way of parameters to the device and to the dtype of the precision; lazy ones get values.

    Args:
        precision: The precision, which casts them.
        data: The data method, which takes them.
    """

    precision: Precision
    data: DataMethod

    def validate(self, job: Assembly) -> None:
        """Check that precision and data method go together.

        Raises:
            ValueError: The precision keeps masters of whole parameters, and the data method shards them.
        """
        refuse_misfit(self.precision, shards_parameters=self.data.shards_parameters)

    def apply(self, job: Assembly) -> None:
        """Prepare the parameters; no value is moved yet."""
        model = job.model
        job.save_names_and_specs()
        remove_owners(model.parameters())  # those of an earlier boost
        keep_float32(model)
        casts = self.precision.casts(model, float32_grads=self.data.allows_float32_grads(job.replicas))
        # A lazy model has what is left of it: this rank's stages, and its shards.
        lazy = Materialization(model) if is_lazy(model) else None
        job.params = ArrivingParams(model, casts, job.device, lazy=lazy)


@dataclass(frozen=True)
class MovedParams(PlanMethod):
    """Parameters on the device, in their dtype, unless the data method moves them in runs.

    Args:
        data: The data method.
    """

    data: DataMethod

    def apply(self, job: Assembly) -> None:
        """Move and cast the parameters."""
        if not self.data.takes_runs:
            job.params.all()
        job.blocks = find_blocks(job.model)


@dataclass(frozen=True)
class Recomputation(PlanMethod):
    """Activation checkpointing of parts of the model.

    Args:
        parts: The parts; see `Plan.recompute`.
        is_in_stages: Whether the model is stages of a pipeline.
    """

    parts: bool | str | Sequence[str] | Segments
    is_in_stages: bool

    def apply(self, job: Assembly) -> None:
        """Put the checkpoints around forwards, in place; collective over the stages of a pipeline.

        Raises:
            ValueError: A name is not a part of the model, or the model has no blocks.
        """
        apply_recompute(job.model, self.parts, stages=job.mesh.axis("pp") if self.is_in_stages else None)
