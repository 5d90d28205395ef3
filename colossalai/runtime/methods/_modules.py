"""Methods that change modules of a model in place: batch norms, recomputation, fused losses."""

from collections.abc import Sequence
from dataclasses import dataclass

from colossalai.logging import get_dist_logger
from colossalai.nn.loss import FusesLoss
from colossalai.pipeline import ModelStage
from colossalai.runtime.methods._assembly import Assembly, PlanMethod
from colossalai.runtime.recomputation import Segments, apply_recompute
from colossalai.shardformer import follow_batches_once, fuse_losses, sync_batch_norms


@dataclass(frozen=True)
class BatchNorms(PlanMethod):
    """Batch norms with statistics of the whole batch, updated once for each batch.

    Args:
        is_synced: Whether mean and variance are computed over the replicas.
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
class Recomputation(PlanMethod):
    """Activation checkpointing of parts of the model.

    Args:
        parts: The parts; see `Plan.recompute`.
        is_in_stages: Whether the model is stages of a pipeline.
    """

    parts: bool | str | Sequence[str] | Segments
    is_in_stages: bool

    def apply(self, job: Assembly) -> None:
        """Wrap forwards in checkpoints, in place; collective over the stages of a pipeline.

        Raises:
            ValueError: A name is not a part of the model, or the model has no blocks.
        """
        apply_recompute(job.model, self.parts, stages=job.mesh.axis("pp") if self.is_in_stages else None)


@dataclass(frozen=True)
class FusedLoss(PlanMethod):
    """Language models in a model that compute their loss in training without logits."""

    def apply(self, job: Assembly) -> None:
        """Change the language models in place; their layers have been sharded before.

        Raises:
            ValueError: The model has no language model, or one with a head or loss of another kind.
        """
        model = job.model
        parts = [part.model if isinstance(part, ModelStage) else part for part in model.modules()]
        own = [part for part in parts if isinstance(part, FusesLoss)]
        for part in own:
            part.fused_loss = True
        if fuse_losses(model) + len(own) == 0:
            raise ValueError(
                f"fused_loss: {type(model).__name__} is not a language model that computes head and loss "
                "together: take GPT of colossalai.model_zoo, or a causal model of transformers; "
                "register_rule(..., Rule(loss_head='lm_head')) of colossalai.shardformer names the head of "
                "others"
            )
        job.wrapper_options["fused_loss"] = True
