"""The state of an optimizer: saved by parameter name with full tensors, loaded into slices.

torch numbers parameters by their place in the groups. Names depend neither on the place nor on how the
parameters were cut, so a state loads under another plan, another order of groups, another number of ranks.
"""

from pathlib import Path

from torch.optim import Optimizer

from colossalai.checkpoint_io._agreement import on_every_rank
from colossalai.checkpoint_io._blocks import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io._optimizer_loading import optimizer_names_elsewhere, plan_optimizer_loading
from colossalai.checkpoint_io._optimizer_store import OPTIMIZER, ParamNames, opened, optimizer_store
from colossalai.checkpoint_io._slices import save_slices
from colossalai.checkpoint_io._store import Layout
from colossalai.checkpoint_io._store_reading import load_store
from colossalai.checkpoint_io._store_writing import save_store


def save_optimizer(
    optimizer: Optimizer,
    checkpoint: str | Path,
    *,
    param_names: ParamNames,
    shard: bool = False,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = False,
    buffer_size: float = DEFAULT_BUFFER_MB,
    gather_dtensor: bool = True,
) -> None:
    """Save an optimizer; collective: every rank calls it, global rank 0 writes.

    Args:
        optimizer: Its state may be DTensors, or slices of the shape of their parameter's. Several groups, a
            part of the model's parameters, and parameters that have no state yet are all right.
        checkpoint: A file; with `shard` a folder, which may be the one that holds the model.
        param_names: The name of each of its parameters; `parameter_names(model)` gives them.
        shard: Write a folder of shards with an index.
        prefix: Text to put in front of every parameter name.
        size_per_shard: The most a shard holds, in MB (1024 * 1024 bytes).
        use_safetensors: Write that format rather than torch's.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank beside its own.
        gather_dtensor: False: every rank writes what it holds into a folder that all of them see, which may
            be the one that holds the model; of the other options only `prefix` counts then.

    Raises:
        ValueError: A parameter has no name, or the state holds something that is not plain, or of another
            shape than the slice that its parameter is.
        OSError: The checkpoint cannot be written; on all ranks. What was there before is still there.
    """
    layout = Layout(
        shard=shard,
        size_per_shard=size_per_shard,
        use_safetensors=use_safetensors,
        buffer_size=buffer_size,
    )
    with opened(optimizer, loads=False) as raw:
        assert raw is not None
        store = optimizer_store(raw, param_names, prefix=prefix or "")
        if gather_dtensor:
            save_store(checkpoint, store, OPTIMIZER, layout)
        else:
            save_slices(checkpoint, store, OPTIMIZER)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path, *, param_names: ParamNames) -> None:
    """Load an optimizer's state and hyper-parameters; collective: every rank copies its own slices.

    Names decide what belongs where; the order of groups and of parameters does not matter. If all names in
    the checkpoint carry one and the same prefix, it is left out. What the optimizer held before is dropped.

    Args:
        optimizer: The optimizer to overwrite; its parameters may be cut in another way than those saved.
        checkpoint: A file or folder that `save_optimizer` wrote; the format is seen from the content.
        param_names: The name of each of its parameters.

    Raises:
        ValueError: The checkpoint is damaged, or does not fit: all misfits are named, and nothing was
            overwritten.
        OSError: It cannot be read.
    """
    store = load_store(checkpoint, OPTIMIZER)
    with opened(optimizer, loads=True) as raw:
        assert raw is not None
        elsewhere = optimizer_names_elsewhere(raw, param_names)
        loading = on_every_rank(
            lambda: plan_optimizer_loading(
                raw, store, param_names, source=str(checkpoint), elsewhere=elsewhere
            )
        )
        on_every_rank(loading.apply)
