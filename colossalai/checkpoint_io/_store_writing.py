"""A store becomes a file or a folder of shards.

Every rank takes part: full tensors are gathered shard by shard, and only the writer keeps and writes them.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from colossalai.checkpoint_io._atomic import atomic_file, atomic_folder
from colossalai.checkpoint_io._gathering import gather_on_writer
from colossalai.checkpoint_io._index import Index, index_text, plan_shards
from colossalai.checkpoint_io._staging import Write, staged
from colossalai.checkpoint_io._store import TREE_KEY, Kind, Layout, Store, names_by_tensor
from colossalai.checkpoint_io._weight_file import write_safetensors, write_torch


def save_store(
    path: str | Path, store: Store, kind: Kind, layout: Layout, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint at `path`, as a whole or not at all; collective.

    A folder that exists keeps the files in it that are not of this kind of checkpoint.

    Args:
        path: A file, or a folder if `layout.shard`; a file name that ends with ".safetensors" chooses that
            format.
        store: What to write.
        kind: What it is.
        layout: How to lay it out.
        texts: Text files to put beside the shards, by name.
    """
    if not layout.shard:
        use_safetensors = layout.use_safetensors or Path(path).suffix == ".safetensors"
        with staged(atomic_file, path, num_bytes=total_bytes(store)) as write:
            write_file(write, store, kind, use_safetensors=use_safetensors)
        return
    texts = texts or {}

    def keep(name: str) -> bool:
        return not kind.stems.owns(name) and name not in texts

    with staged(partial(atomic_folder, keep=keep), path, num_bytes=total_bytes(store)) as write:
        write_folder(write, store, kind, layout)
        for name, text in texts.items():
            write(partial(_write_text, name=name, text=text))


def write_file(write: Write, store: Store, kind: Kind, *, use_safetensors: bool) -> None:
    """Write a store to the file that is being written; collective."""
    if use_safetensors:
        tensors = gather_on_writer({name: store.tensors[name] for name in names_by_tensor(store.tensors)})
        header = {TREE_KEY: json.dumps(store.tree)}
        write(lambda path: write_safetensors(path, tensors, header=header))
        return
    full = Store(gather_on_writer(store.tensors), store.tree)
    write(lambda path: write_torch(path, kind.join(full)))


def write_folder(write: Write, store: Store, kind: Kind, layout: Layout, *, subfolder: str = ".") -> None:
    """Write shards and an index into the folder that is being written; collective.

    The writer holds one shard in memory, on top of the model itself.
    """
    groups = names_by_tensor(store.tensors)
    plan = plan_shards(
        {name: store.tensors[name].nbytes for name in groups}, size_per_shard=layout.size_per_shard
    )
    weight_map: dict[str, str] = {}
    for number, first_names in enumerate(plan, start=1):
        file_name = kind.stems.shard_name(number, len(plan), use_safetensors=layout.use_safetensors)
        # safetensors has no room for a second name of the same tensor: the module that ties them restores it.
        names = (
            first_names
            if layout.use_safetensors
            else [name for first in first_names for name in groups[first]]
        )
        weight_map |= dict.fromkeys(names, file_name)
        tensors = gather_on_writer({name: store.tensors[name] for name in names})
        write(partial(_write_shard, name=f"{subfolder}/{file_name}", tensors=tensors, layout=layout))
        del tensors  # before the next shard is gathered
    index = Index(weight_map, {"total_size": total_bytes(store), TREE_KEY: store.tree})
    index_name = kind.stems.index_name(use_safetensors=layout.use_safetensors)
    write(partial(_write_text, name=f"{subfolder}/{index_name}", text=index_text(index)))


def total_bytes(store: Store) -> int:
    """Return the bytes of all full tensors, tied ones counted once."""
    return sum(store.tensors[name].nbytes for name in names_by_tensor(store.tensors))


def _write_shard(folder: Path, *, name: str, tensors: dict[str, torch.Tensor], layout: Layout) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if layout.use_safetensors:
        write_safetensors(path, tensors, header={})
    else:
        write_torch(path, tensors)


def _write_text(folder: Path, *, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
