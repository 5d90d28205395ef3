"""Precision of forward and backward, and data parallelism around it."""

from dataclasses import dataclass

from colossalai.amp import Precision, apply_precision
from colossalai.context import Mesh, ParallelMode, get_seeds, set_mode
from colossalai.nn.parallel import DataMethod
from colossalai.runtime.methods._assembly import Assembly, PlanMethod


@dataclass(frozen=True)
class ComputePrecision(PlanMethod):
    """Casts around forward and backward of a whole model; a pipeline has them around each stage.

    Args:
        precision: The precision.
    """

    precision: Precision

    def apply(self, job: Assembly) -> None:
        """Put the casts around the model."""
        job.computing = apply_precision(job.model, self.precision, job.device.type)


@dataclass(frozen=True)
class DataParallelism(PlanMethod):
    """Replicas of a model that are kept equal.

    Args:
        method: The data method.
    """

    method: DataMethod

    def apply(self, job: Assembly) -> None:
        """Make the replicas equal, and average their gradients from here on; collective over them.

        Raises:
            ValueError: The data method cannot take the model, or one of the optimizers.
        """
        module, blocks, replicas = job.computing, job.blocks, job.replicas
        self.method.check(job.model, job.optimizers, blocks=blocks, replicas=replicas)
        job.data = self.method.apply(module, blocks=blocks, replicas=replicas, arriving=job.params)
        job.masters = job.params.masters()
        job.masters.start_equal(replicas)
        job.restore_specs()

    def after_apply(self, job: Assembly) -> None:
        """Draw random numbers from the state that differs between ranks with different parts of a batch."""
        mode = _random_mode(job.mesh)
        if mode is not None:
            set_mode(mode)


def _random_mode(mesh: Mesh) -> ParallelMode | None:
    modes = [ParallelMode.SEQUENCE, ParallelMode.TENSOR] if "sp" in mesh.batch_axes else [ParallelMode.DATA]
    seeded = get_seeds()
    return next((mode for mode in modes if mode in seeded), None)
