"""Fused loss: language models compute head and cross entropy together, in chunks of tokens."""

from dataclasses import dataclass

from colossalai.nn.loss import FusesLoss
from colossalai.pipeline import ModelStage
from colossalai.runtime.methods._assembly import Assembly, PlanMethod
from colossalai.shardformer import fuse_losses


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
                f"fused_loss: {type(model).__name__} is no language model that computes head and loss "
                "together: take GPT of colossalai.model_zoo, or a causal model of transformers; "
                "register_rule(..., Rule(loss_head='lm_head')) of colossalai.shardformer names the head of "
                "others"
            )
        job.wrapper_options["fused_loss"] = True
