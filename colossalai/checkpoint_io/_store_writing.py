"""A store becomes a file or a folder of shards, which the writer writes.

Every rank takes part: tensors travel to the writer block by block (see `_gathering`) and go to disk as they
come. So neither a shard nor a tensor is ever whole in memory, beside what the ranks hold anyway.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colossalai.checkpoint_io._agreement import on_every_rank
from colossalai.checkpoint_io._atomic import atomic_file, atomic_folder
from colossalai.checkpoint_io._blocks import Flow, block_size, stored_blocks
from colossalai.checkpoint_io._chunk_index import INDEX
from colossalai.checkpoint_io._entries import Entry, Spread
from colossalai.checkpoint_io._gathering import gathered_blocks, local_sparse, refuse_what_cannot_be_gathered
from colossalai.checkpoint_io._index import Index, index_text, plan_shards
from colossalai.checkpoint_io._safetensors import in_file_order, write_safetensors
from colossalai.checkpoint_io._staging import Write, staged
from colossalai.checkpoint_io._store import TREE_KEY, Kind, Layout, Store, names_by_tensor
from colossalai.checkpoint_io._torch_file import write_torch_stream


def save_store(
    path: str | Path, store: Store, kind: Kind, layout: Layout, *, texts: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint at `path`, as a whole or not at all; collective.

    A folder that exists keeps the files in it that are not of this kind of checkpoint.

    Args:
        path: A file, or a folder if `layout.shard`; a file name that ends with ".safetensors" chooses that
            format.
        store: What to write: tensors that the ranks hold, or tensors in another checkpoint.
        kind: What it is.
        layout: How to lay it out.
        texts: Text files to put beside the shards, by name.
    """
    size = block_size(layout.buffer_size)
    if not layout.shard:
        if layout.variant is not None:
            raise ValueError(
                f"variant={layout.variant!r} is a part of the file names in a folder: give shard=True, or "
                f"put it in the name of the file"
            )
        use_safetensors = layout.use_safetensors or Path(path).suffix == ".safetensors"
        with staged(atomic_file, path, num_bytes=total_bytes(store)) as write:
            _write_file(write, store, kind, use_safetensors=use_safetensors, size=size)
        return
    texts = texts or {}

    def keep(name: str) -> bool:
        is_same = kind.stems.owns(name, variant=layout.variant) or name in texts
        is_in_slices = name == kind.part and (Path(path) / name / INDEX).is_file()  # it would be read instead
        return not is_same and not is_in_slices

    with staged(partial(atomic_folder, keep=keep), path, num_bytes=total_bytes(store)) as write:
        _write_folder(write, store, kind, layout, size=size)
        for name, text in texts.items():
            write(partial(_write_text, name=name, text=text))


def write_torch_store(write: Write, content: Any, stores: Iterable[Store], *, buffer_size: float) -> None:
    """Write plain values with the tensors of some stores in them as one torch file; collective.

    Args:
        write: Writes to the file.
        content: The values; in the place of a tensor is its entry in one of the stores.
        stores: The stores.
        buffer_size: The most memory that this takes on a rank, in MB.
    """
    tensors = []
    for store in stores:
        on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=False))
        tensors += [store.tensors[name] for name in names_by_tensor(store.tensors)]
    _write_torch(write, content, tensors, ".", size=block_size(buffer_size))


def total_bytes(store: Store) -> int:
    """Return the bytes of all full tensors, tied ones counted once."""
    return sum(store.tensors[name].nbytes for name in names_by_tensor(store.tensors))


def _write_file(write: Write, store: Store, kind: Kind, *, use_safetensors: bool, size: int) -> None:
    on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=use_safetensors))
    tensors = {name: store.tensors[name] for name in names_by_tensor(store.tensors)}
    if use_safetensors:
        _write_safetensors(write, tensors, ".", size=size, header={TREE_KEY: json.dumps(store.tree)})
    else:
        _write_torch(write, kind.join(store), tensors.values(), ".", size=size)


def _write_folder(write: Write, store: Store, kind: Kind, layout: Layout, *, size: int) -> None:
    """Write shards and an index into the folder that is being written; collective."""
    on_every_rank(partial(refuse_what_cannot_be_gathered, store, only_dense=layout.use_safetensors))
    groups = names_by_tensor(store.tensors)
    plan = plan_shards(
        {name: store.tensors[name].nbytes for name in groups}, size_per_shard=layout.size_per_shard
    )
    weight_map: dict[str, str] = {}
    for number, first_names in enumerate(plan, start=1):
        file = kind.stems.shard_name(
            number, len(plan), use_safetensors=layout.use_safetensors, variant=layout.variant
        )
        tensors = {name: store.tensors[name] for name in first_names}
        if layout.use_safetensors:
            # No room for a second name of the same tensor: the module that ties them restores it.
            weight_map |= dict.fromkeys(first_names, file)
            _write_safetensors(write, tensors, file, size=size, header={})
        else:
            names = [name for first in first_names for name in groups[first]]
            weight_map |= dict.fromkeys(names, file)
            content = {name: store.tensors[name] for name in names}
            _write_torch(write, content, tensors.values(), file, size=size)
    index = Index(weight_map, {"total_size": total_bytes(store), TREE_KEY: store.tree})
    index_name = kind.stems.index_name(use_safetensors=layout.use_safetensors, variant=layout.variant)
    write(partial(_write_text, name=index_name, text=index_text(index)))


def _write_torch(write: Write, content: Any, tensors: Iterable[Entry], name: str, *, size: int) -> None:
    streamed = [tensor for tensor in tensors if local_sparse(tensor) is None]

    def act(path: Path, flow: Flow) -> None:
        write_torch_stream(path / name, content, streamed, flow=flow, held_locally=local_sparse)

    _stream(write, streamed, act, size=size)


def _write_safetensors(
    write: Write, tensors: Mapping[str, Entry], name: str, *, size: int, header: Mapping[str, str]
) -> None:
    tensors = in_file_order(tensors)

    def act(path: Path, flow: Flow) -> None:
        write_safetensors(path / name, tensors, header=header, flow=flow)

    _stream(write, tensors.values(), act, size=size)


def _stream(
    write: Write, tensors: Iterable[Entry], action: Callable[[Path, Flow], None], *, size: int
) -> None:
    """Have the writer do something with the values of tensors, while the other ranks send them."""
    flow = Flow(tensors, partial(_blocks, size=size))

    def act(path: Path) -> None:
        try:
            action(path, flow)
        finally:
            flow.drain()  # also after an error: the others are sending

    write(act, elsewhere=flow.drain)


def _blocks(tensor: Entry, *, size: int) -> Iterator[torch.Tensor]:
    return (gathered_blocks if isinstance(tensor, Spread) else stored_blocks)(tensor, size=size)


def _write_text(folder: Path, *, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
