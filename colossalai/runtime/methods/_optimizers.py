"""Optimizers of a model with methods applied: what they update, loss scale, clipping, joint decisions."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerGroup, OptimizerWrapper, Precision
from colossalai.runtime._accumulation import AccumulatingOptimizer
from colossalai.runtime.methods._assembly import Assembly, PlanMethod


@dataclass(frozen=True)
class WrappedOptimizers(PlanMethod):
    """Optimizers of the parameters, masters or shards that the methods have made.

    Args:
        precision: The precision, which has a loss scale and hooks of a step.
        max_norm: Bound of the gradient norm; 0 for none.
        norm_type: The p of that norm.
    """

    precision: Precision
    max_norm: float
    norm_type: float

    def apply(self, job: Assembly) -> None:
        """Wrap the optimizers; they share one loss scale.

        Raises:
            ValueError: An optimizer has a parameter that the model lacks, or has made steps with parameters
                that were replaced, or the data method cannot take it.
        """
        if not job.optimizers:
            return
        group = OptimizerGroup(
            self.precision.make_scaler(),
            ranks=job.mesh.group(tuple(job.mesh.axes)),
            replicas=job.replicas,
        )
        kind = AccumulatingOptimizer if job.accumulates else OptimizerWrapper
        for optimizer in job.optimizers:
            _follow_replaced_params(optimizer, job.model, job.names)
            own = {param for each in optimizer.param_groups for param in each["params"]}
            remaining = job.masters.without(own)
            stand_ins = job.data.stand_ins(optimizer, job.masters, late=job.late_params)
            job.masters = remaining
            job.wrapped.append(
                kind(
                    optimizer,
                    group=group,
                    param_names=job.names_of(job.model),
                    masters=stand_ins,
                    before_step=self.precision.step_hooks(),
                    # Once in a step, with the first of several optimizers.
                    after_step=() if job.wrapped else job.after_step,
                    max_norm=self.max_norm,
                    norm_type=self.norm_type,
                    **job.optimizer_options,
                )
            )


def _follow_replaced_params(optimizer: Optimizer, model: nn.Module, names: dict[int, str]) -> None:
    """Let the optimizer hold the parameters that the model has now, where a method has replaced them."""
    now = dict(model.named_parameters())
    for number, group in enumerate(optimizer.param_groups):
        replaced = [_successor(param, names, now, number) for param in group["params"]]
        changed = any(new is not old for new, old in zip(replaced, group["params"], strict=True))
        if changed and optimizer.state:
            raise ValueError(
                "the optimizer has made steps already, but this plan replaces parameters: assemble first, "
                "then load the state of the optimizer"
            )
        group["params"] = replaced


def _successor(
    param: nn.Parameter, names: dict[int, str], now: dict[str, nn.Parameter], group: int
) -> nn.Parameter:
    if id(param) not in names:
        raise ValueError(
            f"group {group} of the optimizer holds a parameter of shape {tuple(param.shape)} that the model "
            "does not have: build the optimizer from the parameters of the model that you pass with it"
        )
    return now[names[id(param)]]
