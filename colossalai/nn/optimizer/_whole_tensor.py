"""What layer-wise optimizers share: a norm is one of the whole tensor, wherever its pieces lie."""

from collections.abc import Iterable

import torch
from torch import Tensor


def tensors_with_grad(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, in lists that torch's foreach functions take in one call.

    Args:
        params: The parameters of one group.

    Returns:
        One list for each device, dtype and device mesh (None for plain tensors).

    Raises:
        ValueError: A gradient is sparse.
    """
    from torch.distributed.tensor import DTensor  # in the function: half a second of imports

    lists: dict[tuple[object, ...], list[Tensor]] = {}
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(param.shape)} is sparse, but this optimizer "
                f"needs dense ones: build the embedding with sparse=False, or use torch.optim.SparseAdam"
            )
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        lists.setdefault((param.device, param.dtype, mesh), []).append(param)
    return list(lists.values())


def whole_norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors as one vector, in float32 or better.

    A DTensor counts as a whole: the ranks of its mesh add up the squares, in a scalar all-reduce per tensor.
    """
    from torch.distributed.tensor import DTensor

    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    return torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])
