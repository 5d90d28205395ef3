"""Storage reader for torch's distributed checkpoints (DCP), which lets them load our sharded folders."""

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from colossalai.checkpoint_io._model import MODEL
from colossalai.checkpoint_io.formats import read_sharded_index
from colossalai.checkpoint_io.resharding import StoredTensor
from colossalai.checkpoint_io.storage import INDEX
from colossalai.tensor import Box


class ChunkStorageReader(StorageReader):
    """Lets `torch.distributed.checkpoint.load(state_dict, storage_reader=...)` read sharded folders.

    Checksums are not compared; `colossalai checkpoint verify` does that.

    Args:
        folder: A training state, of which the model is read, or a sharded folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.reset(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a sharded folder."""
        return (_sharded_folder(Path(checkpoint_id)) / INDEX).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Look at another folder."""
        if checkpoint_id is not None:
            self.folder = _sharded_folder(Path(checkpoint_id))

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return which boxes of which tensors there are.

        Raises:
            ValueError: The folder is damaged.
            OSError: The folder is not there.
        """
        self._tensors = read_sharded_index(self.folder).state().tensors
        return Metadata(
            state_dict_metadata={name: _described(tensor) for name, tensor in self._tensors.items()},
            storage_meta=StorageMeta(checkpoint_id=self.folder),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Get ready to read on this rank."""
        if not hasattr(self, "_tensors"):  # the coordinator alone has read the index
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise ValueError(
                    f"{self.folder} holds tensors only; {item.storage_index.fqn} is something else"
                )
            begin = item.storage_index.offset or (0,) * len(item.lengths)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths)).moved(tuple(begin))
            target = planner.resolve_tensor(item).detach()
            self._tensors[item.storage_index.fqn].read(box, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _sharded_folder(folder: Path) -> Path:
    return folder if (folder / INDEX).is_file() else folder / MODEL.part


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(shard.box.offsets), torch.Size(shard.box.sizes))
            for shard in tensor.shards
        ],
    )
