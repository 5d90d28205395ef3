"""Flat state dict: tensors by name and a tree of the plain values, and how its names fit those of a model.

What is saved (a model, an optimizer) comes as a flat dictionary of tensors, which may be sharded, and a JSON
tree (see `resharding/_tree`). A `Kind` says what its files are called and how the two parts look inside a
single torch file, where users expect the shape that `torch.save` of a state dict would give. A `FileLayout`
says which files there shall be.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from colossalai.checkpoint_io._hugging_face_index import Stems
from colossalai.checkpoint_io.resharding import ShardedTensor, StoredTensor, TensorMetadata
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, Json, listed

TensorT = TypeVar("TensorT", bound=torch.Tensor | TensorMetadata, covariant=True)
TREE_KEY = "colossalai"  # under it the tree stands in a safetensors header and in an index file


@dataclass(frozen=True)
class FlatStateDict(Generic[TensorT]):
    """The content of a checkpoint.

    Attributes:
        tensors: By name: `ShardedTensor`s when they are to be saved, `StoredTensor`s when they were. Tied
            names have one and the same.
        tree: The plain values, as `pack` makes them.
    """

    tensors: Mapping[str, TensorT]
    tree: Json

    @property
    def nbytes(self) -> int:
        """Bytes of all full tensors, tied ones counted once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())


ShardedStateDict: TypeAlias = FlatStateDict[ShardedTensor]
StoredStateDict: TypeAlias = FlatStateDict[StoredTensor]


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint.

    Attributes:
        part: The name of the folder of a training state that is of this kind.
        stems: The file names in a folder.
        join: Makes the content of a single torch file out of a flat state dict.
        split: Takes that content apart again; raises a ValueError that says what it is instead. Its tensors
            are those of the content.
        needs_tree: Whether there is none without values that are no tensors.
    """

    part: str
    stems: Stems
    join: Callable[[FlatStateDict[TensorMetadata]], Mapping[str, object]]
    split: Callable[[object], FlatStateDict[torch.Tensor]]
    needs_tree: bool = False


@dataclass(frozen=True)
class FileLayout:
    """How to lay a checkpoint out in files.

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


@dataclass(frozen=True)
class LoadReport:
    """What did not fit when a checkpoint was loaded.

    Attributes:
        missing: Names that the model has and the checkpoint lacks; they keep their values.
        unexpected: Names that the checkpoint has and the model lacks; they are left out.
        mismatched: Names, each with the reason (shapes, dtypes), that do not fit. Those of another shape keep
            their values, those of another dtype are converted.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        """Return one line per kind of misfit."""
        kinds = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape or dtype": self.mismatched,
        }
        return "\n".join(
            f"{len(names)} {kind}: {listed(names, shown=50)}" for kind, names in kinds.items() if names
        )


def names_by_tensor(tensors: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the names of each tensor (a tied one has several), under the first of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def common_prefix(stored: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix that all stored names have and the wanted ones lack, "" if they differ otherwise.

    Checkpoints are saved with a `prefix`, or out of a wrapper that adds one ("module.", "_orig_mod."). The
    names are only read with it removed if that makes the two sets the same, so nothing is guessed.
    """
    if not stored or set(stored) == set(wanted) or len(stored) != len(wanted):
        return ""
    # All n names are longer by the same text.
    extra, rest = divmod(sum(map(len, stored)) - sum(map(len, wanted)), len(stored))
    prefix = next(iter(stored))[: max(extra, 0)]
    return prefix if not rest and {prefix + name for name in wanted} == set(stored) else ""


def without_prefix(stored: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the stored values by their names without a prefix; a name that lacks it fits nothing."""
    for name, value in stored.items():
        has_prefix = name.startswith(prefix)
        yield name.removeprefix(prefix) if has_prefix else f"{name} (without {prefix!r} before it)", value


def without_common_prefix(
    stored: dict[str, Any], wanted: Set[str], groups: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return the stored values by the model's names, a prefix that all of them carry left out."""
    further_names = {name for names in groups.values() for name in names[1:]}
    prefix = common_prefix(stored, wanted) or common_prefix(stored, wanted - further_names)
    return {name.removeprefix(prefix): value for name, value in stored.items()}
