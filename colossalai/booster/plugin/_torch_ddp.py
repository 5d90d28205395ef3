"""Plugin of torch's `DistributedDataParallel`: a whole model on every rank."""

from collections.abc import Sequence

from colossalai.booster.plugin._plugin import DataMethodPlugin
from colossalai.context import names_arguments
from colossalai.nn.parallel import Replicated


class TorchDDPPlugin(DataMethodPlugin):
    """Averages gradients with torch's `DistributedDataParallel`.

    Args:
        broadcast_buffers: Broadcast the buffers of the first rank before every forward.
        bucket_cap_mb: Size of a bucket of gradients in MB; None: torch's default.
        find_unused_parameters: Search for parameters that the loss does not depend on.
        check_reduction: Check that every gradient was reduced.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves a copy of them.
        static_graph: Promise that every iteration uses the same parameters. On three or more ranks the
            first two steps after the start, or after a load, then add gradients in another order than the
            later ones: a run that resumes from a checkpoint differs in its last bits.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.
    """

    @names_arguments
    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        recompute: bool | str | Sequence[str] = False,
    ) -> None:
        method = Replicated(
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        super().__init__(method, recompute=recompute)
