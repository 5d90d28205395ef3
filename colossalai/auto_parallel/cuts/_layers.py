"""Single layers of torch without a rule: their cuts, and the communication of the ranks."""

from torch import nn

from colossalai.auto_parallel.cuts._strategies import CUT_OF_FIELD, WHOLE, CutTransfer, Site, Strategy
from colossalai.auto_parallel.trace._trace import ModelTrace, Operation

_CONVOLUTION = ("conv1d", "conv2d", "conv3d")


def single_site(trace: ModelTrace, model: nn.Module, operation: Operation, num_ranks: int) -> Site | None:
    """Return the site of a layer of torch without a rule; None if it can only be whole."""
    module = model.get_submodule(operation.module) if operation.module else None
    if module is None or len(trace.by_module(operation.module)) > _most_operations(module):
        return None  # it is called several times, or has further operations
    fields = _fields_of(module, base_name(operation), num_ranks)
    strategies = [_strategy(trace, operation, field) for field in fields]
    if not strategies:
        return None
    return Site(
        name=operation.module,
        layers={operation.module: strategies[0].cut},
        operations=(operation.name,),
        params=tuple(name for name in operation.inputs if name in trace.params),
        strategies=(WHOLE, *strategies),
    )


def _fields_of(module: nn.Module, kind: str, num_ranks: int) -> list[str]:
    """Return the fields of a `Rule` that can contain a layer of torch, for a number of ranks."""
    if kind == "linear" and isinstance(module, nn.Linear):
        taken, made = module.in_features, module.out_features
    elif kind in _CONVOLUTION and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups > 1:
            return []
        taken, made = module.in_channels, module.out_channels
    elif kind == "embedding" and type(module) is nn.Embedding:
        is_plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return ["embeddings"] if is_plain and module.num_embeddings >= num_ranks else []
    elif kind == "batch_norm" and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return ["channel_norms"] if module.num_features % num_ranks == 0 else []
    else:
        return []
    # A head is padded to any number of outputs.
    can_gather = made % num_ranks == 0 or (kind == "linear" and made >= num_ranks)
    of_output = (["heads"] if can_gather else []) + (["columns"] if made % num_ranks == 0 else [])
    return of_output + (["splits", "rows"] if taken % num_ranks == 0 else [])


def _most_operations(module: nn.Module) -> int:
    """Return the largest number of operations of a layer: a batch norm also counts its batches."""
    return 2 if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) else 1


def _strategy(trace: ModelTrace, operation: Operation, field: str) -> Strategy:
    forward, backward = transfers(trace, operation, operation, field)
    return Strategy(
        cut=CUT_OF_FIELD[field],
        field=field,
        takes_part=field in ("rows", "channel_norms"),
        gives_part=field in ("columns", "channel_norms"),
        forward=tuple(forward),
        backward=tuple(backward),
    )


def transfers(
    trace: ModelTrace, first: Operation, last: Operation, field: str
) -> tuple[list[CutTransfer], list[CutTransfer]]:
    """Return the collectives of a layer, forward and backward, under a field of a rule."""
    taken = next((name for name in first.inputs if name not in trace.params), None)
    made = last.outputs[0] if last.outputs else None
    has_grad = taken is not None and trace.tensors[taken].dtype.is_floating_point
    forward: list[CutTransfer] = []
    backward: list[CutTransfer] = []
    if made is not None and field in ("rows", "splits", "embeddings"):
        forward.append(CutTransfer("all_reduce", made))
    if made is not None and field == "heads":
        forward.append(CutTransfer("all_gather", made))
    if taken is not None and has_grad and taken not in trace.inputs:
        if field in ("columns", "heads"):
            backward.append(CutTransfer("all_reduce", taken))
        if field == "splits":
            backward.append(CutTransfer("all_gather", taken))
    return forward, backward


def base_name(operation: Operation) -> str:
    """Return the name of the operator: "relu" for "aten.relu_.default"."""
    return operation.target.removeprefix("aten.").partition(".")[0].rstrip("_")
