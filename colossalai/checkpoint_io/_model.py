"""The weights of a model: saved as full tensors by name, loaded into slices.

Saving: names are those of `module.state_dict()`, values are full tensors, whatever cut them.
Loading: everything is compared first; only then is the first value overwritten, each rank copying its own
    slice.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from colossalai.checkpoint_io._agreement import on_every_rank
from colossalai.checkpoint_io._blocks import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io._model_loading import module_names, plan_model_loading
from colossalai.checkpoint_io._model_store import MODEL, model_store
from colossalai.checkpoint_io._names import LoadReport
from colossalai.checkpoint_io._parts import names_elsewhere
from colossalai.checkpoint_io._slices import save_slices
from colossalai.checkpoint_io._store import Layout
from colossalai.checkpoint_io._store_reading import load_store
from colossalai.checkpoint_io._store_writing import save_store


def save_model(
    module: nn.Module,
    checkpoint: str | Path,
    *,
    shard: bool = False,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = False,
    variant: str | None = None,
    buffer_size: float = DEFAULT_BUFFER_MB,
    gather_dtensor: bool = True,
) -> None:
    """Save the weights of a model; collective: every rank calls it, global rank 0 writes.

    The checkpoint is replaced as a whole or not at all, and is on disk when the call returns. In safetensors
    a tensor that has several names (tied weights) is stored under the first one.

    Args:
        module: The model; its parameters may be slices (tensor parallelism), DTensors (`fully_shard` makes
            them), or both.
        checkpoint: A file; with `shard` a folder, whose other files stay as they are. A file name that ends
            with ".safetensors" chooses that format.
        shard: Write a folder of shards with an index, which `from_pretrained` of transformers opens. For a
            model of transformers its config.json is written too.
        prefix: Text to put in front of every name.
        size_per_shard: The most a shard holds, in MB (1024 * 1024 bytes). A larger tensor is a shard by
            itself.
        use_safetensors: Write that format rather than torch's.
        variant: A word for the file names in a folder ("fp16"), as transformers has it: weights of several
            variants lie side by side.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank beside the model.
        gather_dtensor: False: every rank writes what it holds into a folder that all of them see; of the
            other options only `prefix` counts then.

    Raises:
        ValueError: A file where a folder is meant or the reverse, values that the format cannot hold, or
            parameters that are both slices and DTensors.
        OSError: The checkpoint cannot be written; on all ranks. What was there before is still there.
    """
    store = model_store(module, prefix=prefix or "")
    if not gather_dtensor:
        save_slices(checkpoint, store, MODEL)
        return
    layout = Layout(
        shard=shard,
        size_per_shard=size_per_shard,
        use_safetensors=use_safetensors,
        variant=variant,
        buffer_size=buffer_size,
    )
    save_store(checkpoint, store, MODEL, layout, texts=_config_files(module))


def load_model(
    module: nn.Module,
    checkpoint: str | Path,
    *,
    strict: bool = True,
    prefix: str | None = None,
    variant: str | None = None,
    allow_pickle: bool = False,
) -> LoadReport:
    """Load the weights of a model; collective: every rank calls it and copies its own slices.

    The format is seen from the content: a torch or safetensors file, an index, or a folder of shards. If all
    names in it carry one and the same prefix that the model's lack, it is left out.

    Args:
        module: The model to overwrite; it may be cut in another way than the one that was saved.
        checkpoint: The file or folder.
        strict: Raise if anything does not fit; else load what fits and warn. Values of another dtype are
            converted.
        prefix: Text in front of the names in the checkpoint that is to be left out; names without it are
            unexpected.
        variant: The word in the file names of a folder, if it holds weights of several variants.
        allow_pickle: Run the code that a torch file may hold, if it cannot be restored without: only for a
            file from somebody whom you trust. Else such a file is refused.

    Returns:
        What did not fit.

    Raises:
        ValueError: The checkpoint is damaged, or does not fit: all misfits are named, and nothing was
            overwritten.
        OSError: It cannot be read.
    """
    store = load_store(checkpoint, MODEL, variant=variant, allow_pickle=allow_pickle)
    elsewhere = names_elsewhere(module_names(module))
    loading = on_every_rank(
        lambda: plan_model_loading(
            module, store, source=str(checkpoint), strict=strict, elsewhere=elsewhere, saved_prefix=prefix
        )
    )
    on_every_rank(loading.apply)
    return loading.report


@runtime_checkable
class _HasJson(Protocol):
    """A config of transformers."""

    def to_json_string(self) -> str: ...


def _config_files(module: nn.Module) -> dict[str, str]:
    """Return the config.json that `from_pretrained` needs beside the weights, for a model of transformers."""
    config = getattr(module, "config", None)
    return {"config.json": config.to_json_string()} if isinstance(config, _HasJson) else {}
