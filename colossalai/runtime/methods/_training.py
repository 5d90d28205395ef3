"""The methods of every plan: values and precision of parameters, data parallelism, optimizers."""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerGroup, OptimizerWrapper, Precision, apply_precision, refuse_misfit
from colossalai.context import Mesh, ParallelMode, get_seeds, set_mode
from colossalai.lazy import Materialization, is_lazy
from colossalai.nn.parallel import ArrivingParams, DataMethod, remove_owners
from colossalai.runtime._accumulation import AccumulatingOptimizer
from colossalai.runtime.methods._assembly import Assembly, PlanMethod
from colossalai.runtime.recomputation import find_blocks
from colossalai.shardformer import keep_float32
from colossalai.tensor import without_row_caches


@dataclass(frozen=True)
class ParamValues(PlanMethod):
    """Preparation of parameters for the device and the dtype of the precision; lazy ones get values.

    Args:
        precision: The precision, which casts them.
        data: The data method, which uses them.
    """

    precision: Precision
    data: DataMethod

    def validate(self, job: Assembly) -> None:
        """Check that precision and data method can be combined.

        Raises:
            ValueError: The precision keeps masters of whole parameters, and the data method shards them.
        """
        refuse_misfit(self.precision, shards_parameters=self.data.shards_parameters)

    def apply(self, job: Assembly) -> None:
        """Prepare the parameters; no value is moved yet."""
        model = job.model
        job.save_names_and_specs()
        remove_owners(model.parameters())  # attributes of an earlier boost
        keep_float32(model)
        casts = self.precision.casts(model, float32_grads=self.data.allows_float32_grads(job.replicas))
        # A lazy model is reduced to this rank's stages and shards by now.
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
class ComputePrecision(PlanMethod):
    """Casts around forward and backward of a whole model; a pipeline casts around each stage.

    Args:
        precision: The precision.
    """

    precision: Precision

    def apply(self, job: Assembly) -> None:
        """Wrap the model in the casts."""
        job.computing = apply_precision(job.model, self.precision, job.device.type)


@dataclass(frozen=True)
class DataParallelism(PlanMethod):
    """Replicas of a model that are kept equal.

    Args:
        method: The data method.
    """

    method: DataMethod

    def apply(self, job: Assembly) -> None:
        """Make the replicas equal, and average their gradients afterwards; collective over them.

        Raises:
            ValueError: The data method does not support the model, or one of the optimizers.
        """
        module, blocks, replicas = job.computing, job.blocks, job.replicas
        with without_row_caches(job.model):
            self.method.check(job.model, job.optimizers, blocks=blocks, replicas=replicas)
            job.data = self.method.apply(module, blocks=blocks, replicas=replicas, arriving=job.params)
        job.masters = job.params.masters()
        job.masters.start_equal(replicas)
        job.restore_specs()

    def after_apply(self, job: Assembly) -> None:
        """Use the random state that differs between ranks with different parts of a batch."""
        mode = _random_mode(job.mesh)
        if mode is not None:
            set_mode(mode)


def _random_mode(mesh: Mesh) -> ParallelMode | None:
    modes = [ParallelMode.SEQUENCE, ParallelMode.TENSOR] if "sp" in mesh.batch_axes else [ParallelMode.DATA]
    seeded = get_seeds()
    return next((mode for mode in modes if mode in seeded), None)


@dataclass(frozen=True)
class WrappedOptimizers(PlanMethod):
    """Optimizers of the parameters, masters or shards of the other methods.

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
                that were replaced, or the data method does not support it.
        """
        if not job.optimizers:
            return
        group = OptimizerGroup(
            self.precision.make_scaler(),
            ranks=job.mesh.group(tuple(job.mesh.axes)),
            replicas=job.replicas,
            after_step=job.after_step,
        )
        kind = AccumulatingOptimizer if job.accumulates else OptimizerWrapper
        for optimizer in job.optimizers:
            _follow_replaced_params(optimizer, job.model, job.names)
            own = {param for each in optimizer.param_groups for param in each["params"]}
            remaining = job.masters.without(own)
            with without_row_caches(job.model):
                optimizer_params = job.data.optimizer_params(optimizer, job.masters, late=job.late_params)
            job.masters = remaining
            job.wrapped.append(
                kind(
                    optimizer,
                    group=group,
                    param_names=job.names_of(job.model),
                    masters=optimizer_params,
                    before_step=self.precision.step_hooks(),
                    max_norm=self.max_norm,
                    norm_type=self.norm_type,
                    **job.optimizer_options,
                )
            )


def _follow_replaced_params(optimizer: Optimizer, model: nn.Module, names: dict[int, str]) -> None:
    """Give the optimizer the present parameters of the model, if a method has replaced them."""
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
