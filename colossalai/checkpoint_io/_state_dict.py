"""Whole state dicts of a model that ranks hold in parts: `nn.Module.state_dict` over all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io._collective import called_by_all_ranks
from colossalai.checkpoint_io._model import OpenedModel, fill_model, flat_state, model_state, stored_values
from colossalai.checkpoint_io._state import LoadReport
from colossalai.checkpoint_io.resharding import FlatStateDict, gathered, stored_views
from colossalai.context import Mesh
from colossalai.tensor import as_memory


@called_by_all_ranks("gather", "a state dict")
@as_memory()
def whole_state_dict(
    module: nn.Module, mesh: Mesh, *, device: torch.device, prefix: str = ""
) -> dict[str, Any]:
    """Return the state dict of a whole model in host memory, on every rank; collective.

    The additional memory on the device is one tensor at a time. Tied values are one tensor.

    Args:
        module: The model; its parameters may be in parts on ranks, and stages on other ones.
        mesh: The ranks that hold it.
        device: Device of the gathered tensors.
        prefix: Text to put in front of every name.

    Raises:
        ValueError: `module` is not held whole by the ranks together.
    """
    state = model_state(module, prefix=prefix)
    groups = state.names_by_tensor
    tensors: dict[str, torch.Tensor] = {}
    whole = gathered({name: state.tensors[name] for name in groups}, mesh, device=device)
    for names, tensor in zip(groups.values(), whole, strict=True):
        tensors.update(dict.fromkeys(names, tensor.detach().to("cpu", copy=True)))
    # In the order of the names, as tied values are gathered once.
    return dict(stored_values(FlatStateDict({name: tensors[name] for name in state.tensors}, state.tree)))


@called_by_all_ranks("load", "a state dict")
def load_whole_state_dict(
    module: nn.Module, content: Mapping[str, Any], *, strict: bool = True
) -> LoadReport:
    """Load whole values into a model; each rank copies its own slices. Collective.

    Args:
        module: The model.
        content: The values by name, the same on all ranks.
        strict: Whether names that do not fit are an error; else they are logged. Shapes that do not fit are
            one in any case, and values of another dtype are converted, as torch does.

    Raises:
        ValueError: Names or shapes in `content` are not the model's; nothing was overwritten.
    """
    flat = flat_state(content)
    opened = OpenedModel("the state dict", FlatStateDict(stored_views(flat.tensors), flat.tree))
    return fill_model(module, opened, strict=strict, prefix="", any_dtype=True, same_shapes=True)
