"""Norms of layer-wise optimizers: of the whole tensor, on any layout of its pieces."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.tensor import PaddedSpec, ShardingSpec, as_memory, fragment_of, spec_of


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


def whole_norms(tensors: list[Tensor], params: list[Tensor]) -> Tensor:
    """Return the 2-norms of the tensors as one vector, in float32 or better.

    A tensor that is cut counts as a whole: a scalar all-reduce for each DTensor, and an all-reduce of one
    vector for each process group over which specs cut. Padding is left out, replicas are counted once.

    Args:
        tensors: The parameters, their gradients or their updates: this rank's slices.
        params: The parameters, which carry the specs; the same on all ranks that share one of them.

    Returns:
        One norm for each tensor; the same values on all ranks.
    """
    from torch.distributed.tensor import DTensor

    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    with as_memory():  # a ColoTensor is this rank's slice, as any other
        norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
        specs = [_spec_of_whole(param) for param in params]
        for place, spec in enumerate(specs):
            if isinstance(norm := norms[place], DTensor):
                norms[place] = norm.full_tensor()
            elif isinstance(spec, PaddedSpec):
                norms[place] = _norm_without_padding(tensors[place], spec, dtype)
        result = torch.stack(norms)
        places_by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for place, spec in enumerate(specs):
            if spec is not None and spec.axes:
                groups = tuple(spec.mesh.group(axis) for axis in spec.axes)
                places_by_groups.setdefault(groups, []).append(place)
        for groups, places in places_by_groups.items():
            squares = torch.stack([norms[place] for place in places]).square()
            for group in groups:
                # Sum of squares along one axis; all ranks visit groups in the order of parameters.
                dist.all_reduce(squares, group=group)
            result[places] = squares.sqrt()
    return result


def _spec_of_whole(param: Tensor) -> ShardingSpec | None:
    """Return the spec of a parameter; of its whole tensor if it is the only fragment of it."""
    while (fragment := fragment_of(param)) is not None:
        stands_for, _ = fragment
        assert stands_for.numel() == param.numel(), "a norm of a part of a parameter"
        param = stands_for
    return spec_of(param)


def _norm_without_padding(tensor: Tensor, spec: PaddedSpec, dtype: torch.dtype) -> Tensor:
    boxes = spec.boxes_without_padding(tensor.view(spec.local_shape))
    norm: Tensor = torch.stack([torch.linalg.vector_norm(box, dtype=dtype) for box in boxes]).norm()
    return norm
