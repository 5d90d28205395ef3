"""What a checkpoint is before it is bytes: tensors by name, and a tree of plain values.

What is saved (a model, an optimizer) comes as a flat dictionary of tensors, which may be cut, and a JSON
tree (see `_tree`). A `Kind` says what its files are called and how the two parts look inside a single torch
file, where users expect the shape that `torch.save` of a state dict would give. A `Layout` says which files
there shall be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from colossalai.checkpoint_io._hugging_face_index import Stems
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.resharding import Json

TREE_KEY = "colossalai"  # under it the tree stands in a safetensors header and in an index file


@dataclass(frozen=True)
class Store:
    """The content of a checkpoint.

    Attributes:
        tensors: By name: what all ranks hold of them (`Spread`) when they are to be saved, what can be read
            of them (`Stored`) when they were.
        tree: The plain values, as `pack` makes them.
    """

    tensors: dict[str, Any]
    tree: Json


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint.

    Attributes:
        part: The name of the folder of a training state that is of this kind.
        stems: The file names in a folder.
        join: Makes the content of a single torch file out of a store.
        split: Takes that content apart again; raises a ValueError that says what it is instead.
        needs_tree: Whether there is none without values that are no tensors.
    """

    part: str
    stems: Stems
    join: Callable[[Store], Any]
    split: Callable[[Any], Store]
    needs_tree: bool = False


@dataclass(frozen=True)
class Layout:
    """How to lay a checkpoint out.

    Attributes:
        shard: A folder of shards rather than one file.
        size_per_shard: The most that a shard holds, in MB of 1024 * 1024 bytes.
        use_safetensors: In that format rather than torch's.
        variant: A word in the file names of a folder, by which transformers tells several weights apart.
        buffer_size: The most memory that writing takes on a rank, in MB.
    """

    shard: bool = False
    size_per_shard: float = 1024
    use_safetensors: bool = False
    variant: str | None = None
    buffer_size: float = DEFAULT_BUFFER_MB


def names_by_tensor(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of each tensor (a tied one has several), under the first of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}
