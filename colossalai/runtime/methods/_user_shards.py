"""Parameters that a user has sharded as ColoTensors: local shards to all other methods."""

from dataclasses import dataclass

from colossalai.runtime.methods._assembly import Assembly, PlanMethod
from colossalai.tensor import as_plain_parameter, process_group_of


@dataclass(frozen=True)
class UserShards(PlanMethod):
    """Parameters sharded by `set_tensor_spec`, if the model has any; its other ones become ordinary ones.

    Args:
        refused: The methods of the plan that replace parameters, which such a model calls as they are.
    """

    refused: tuple[str, ...] = ()

    def validate(self, job: Assembly) -> None:
        """Check that the model is sharded over the ranks of the job, and that parameters can stay.

        Raises:
            ValueError: The parameters are sharded over another mesh, or the plan has a method that replaces
                parameters.
        """
        group = process_group_of(job.model)
        job.has_user_shards = group is not None
        if group is None:
            return
        name = type(job.model).__name__
        if group.mesh.axes != job.mesh.axes:
            raise ValueError(
                f"{name} is cut over {group}, and the ranks are laid out as {job.mesh}: lay the job "
                f"out by parallel=dict(tensor=dict(size={group.tp_world_size()}, mode='1d')) in its config"
            )
        for method in self.refused:
            raise ValueError(
                f"{name} has parameters that were cut by set_tensor_spec, and {method} puts "
                "others in their place, which functions use as they are: leave it out; layers of "
                "colossalai.nn and HybridParallelPlugin(tp_size=...) cut models that it takes"
            )

    def apply(self, job: Assembly) -> None:
        """Turn ColoTensors that are not sharded into ordinary parameters."""
        for param in job.model.parameters():
            as_plain_parameter(param)
