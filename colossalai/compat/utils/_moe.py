"""Parameters of a model with experts, by the number of ranks that share the experts."""

from torch import nn

from colossalai.compat.utils._parallel import sync_model_param
from colossalai.context import ParallelMode
from colossalai.tensor import spec_of


def get_moe_epsize_param_dict(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Return the parameters of a model by the number of expert-parallel ranks that cut them; 1 for none.

    Args:
        model: The model, built after the launch.
    """
    found: dict[int, list[nn.Parameter]] = {}
    for param in model.parameters():
        spec = spec_of(param)
        size = spec.mesh.axis_size("ep") if spec is not None and "ep" in spec.axes else 1
        found.setdefault(size, []).append(param)
    return found


def sync_moe_model_param(model: nn.Module) -> None:
    """Give all replicas of each parameter and buffer the values of the first one; experts included.

    Collective over the data-parallel ranks. An expert is sent among the ranks that hold it.
    """
    sync_model_param(model, ParallelMode.DATA)
