"""A checkpoint of any form, opened without knowing which: what is in it, and where it lies.

Only descriptions are read, and small values; tensors stay where they are (`Stored`). Nothing is compared with
checksums here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._hugging_face_index import find_weights, read_index
from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._model import MODEL
from colossalai.checkpoint_io._optimizer_state import OPTIMIZER, stored_content
from colossalai.checkpoint_io._retention import is_like_a_state, refuse_unlisted
from colossalai.checkpoint_io._state import Kind, Store
from colossalai.checkpoint_io.formats import (
    DCP_INDEX,
    INDEX,
    Chunked,
    DcpTensor,
    Format,
    detect_format,
    read_dcp,
    read_plain,
    read_store,
    read_torch,
    store_of,
)
from colossalai.checkpoint_io.resharding import Box, whole_box
from colossalai.checkpoint_io.storage import MANIFEST, Manifest, read_manifest, refuse_links_out
from colossalai.logging import get_dist_logger

KINDS = {MODEL.part: MODEL, OPTIMIZER.part: OPTIMIZER}
_PARTS_FILE = "parts.pt"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint of any form.

    Attributes:
        path: The file or folder.
        form: What it is, in words.
        stores: What it holds of "model" and "optimizer".
        files: The files that its tensors lie in.
        homes: For each part the file of each tensor, where a tensor lies in one file.
        small: Plain values by name: lr_scheduler, extra, ...
        random: The files of random states of a training state, and their content.
        texts: Small text files beside the weights: config.json, ...
        manifest: That of a training state.
    """

    path: Path
    form: str
    stores: dict[str, Store]
    files: tuple[Path, ...]
    homes: dict[str, dict[str, Path]] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    def places_of(self, part: str, name: str) -> Iterator[tuple[Path, Box]]:
        """Yield where a tensor lies: which part of it in which file."""
        tensor = self.stores[part].tensors[name]
        if isinstance(tensor, Chunked):
            yield from ((tensor.folder / chunk.file, chunk.box) for chunk in tensor.chunks)
        elif isinstance(tensor, DcpTensor):
            yield from ((path, box) for box, path, _, _ in tensor.chunks)
        else:
            yield self.homes[part][name], whole_box(tensor.shape)


def open_checkpoint(path: str | Path, *, variant: str | None = None, allow_pickle: bool = False) -> Opened:
    """Open a checkpoint of any form.

    Args:
        path: A training state; a folder of chunks; a folder of Hugging Face, or its index; a torch or
            safetensors file, of a model, an optimizer, or everything (`save_checkpoint`); a folder of torch's
            distributed checkpoint.
        variant: Which of the weights in a folder of Hugging Face.
        allow_pickle: Whether the index of torch's distributed checkpoint, a pickle, may be read.

    Raises:
        ValueError: It is none of these, or damaged.
        OSError: It cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "there is no such file or folder", str(path))
    if not path.is_dir():
        return _open_index(path) if path.name.endswith(".json") else _open_file(path)
    if (path / MANIFEST).is_file():
        return _open_training_state(path)
    if (path / INDEX).is_file():
        store = read_store(path, MODEL, is_verified=True)
        part = _part_of(store)
        return Opened(
            path=path, form=f"{part} in chunks", stores={part: store}, files=_files_of(path, "*.safetensors")
        )
    if (path / DCP_INDEX).is_file():
        return _open_dcp(path, allow_pickle=allow_pickle)
    if is_like_a_state(path):
        raise ValueError(f"{path / MANIFEST} is missing, which tells what a training state consists of")
    states = sorted(entry.name for entry in path.iterdir() if (entry / MANIFEST).is_file())
    if states:
        raise ValueError(f"{path} is a folder of training states: give one of {listed(states)}")
    return _open_shards(path, variant=variant)


def _open_training_state(path: Path) -> Opened:
    manifest = read_manifest(path)
    refuse_links_out(manifest.files, path)
    refuse_unlisted(path, manifest)
    small = read_plain(path / _PARTS_FILE)
    return Opened(
        path=path,
        form="training state",
        stores={
            part: read_store(path / part, kind, is_verified=True)
            for part, kind in KINDS.items()
            if (path / part).is_dir()
        },
        files=tuple(path / name for name in manifest.files),
        small=small,
        random={name: read_plain(path / name) for name in manifest.files if name.startswith("random/")},
        manifest=manifest,
    )


def _open_shards(folder: Path, *, variant: str | None) -> Opened:
    """Open a folder of Hugging Face, with the optimizer if it is beside the model."""
    found: dict[str, Opened] = {}
    refusals = []
    for part, kind in KINDS.items():
        try:
            file = find_weights(folder, kind.stems, variant=variant if kind is MODEL else None)
        except ValueError as error:
            refusals.append(error)
            continue
        found[part] = _open_index(file) if file.name.endswith(".json") else _open_file(file)
    if not found:
        raise refusals[0]
    texts = {
        entry.name: text
        for entry in folder.iterdir()
        if entry.suffix in (".json", ".txt", ".jinja") and ".index." not in entry.name
        if (text := _text_of(entry)) is not None
    }
    return Opened(
        path=folder,
        form="Hugging Face folder",
        stores={part: store for opened in found.values() for part, store in opened.stores.items()},
        files=tuple(file for opened in found.values() for file in opened.files),
        homes={part: homes for opened in found.values() for part, homes in opened.homes.items()},
        texts=texts,
    )


def _text_of(path: Path) -> str | None:
    """Return a text; None if it is no regular file, or no text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError:
        get_dist_logger().warning(f"{path} is left out: it is no text in UTF-8")
        return None


def _open_index(path: Path) -> Opened:
    index = read_index(path)
    store = read_store(path, MODEL, is_verified=True)
    part = _part_of(store)
    homes = {name: path.parent / index.weight_map[name] for name in store.tensors if name in index.weight_map}
    return Opened(
        path=path,
        form=f"shards of a {part}",
        stores={part: store},
        files=tuple(path.parent / name for name in index.files),
        homes={part: homes},
    )


def _open_file(path: Path) -> Opened:
    if detect_format(path) is Format.SAFETENSORS:
        store = read_store(path, MODEL, is_verified=True)
        return _of_file(path, f"safetensors file of a {_part_of(store)}", {_part_of(store): store})
    content = read_torch(path)
    if isinstance(content, dict) and {"epoch", "model"} <= content.keys():
        stores = {
            part: store_of(content[part], kind)
            for part, kind in KINDS.items()
            if content.get(part) is not None
        }
        small = {name: value for name, value in content.items() if name not in stores}
        return _of_file(path, "file of save_checkpoint", stores, small=small)
    refusals = []
    for part, kind in reversed(KINDS.items()):
        try:
            return _of_file(path, f"torch file of a {part}", {part: _store_in(content, kind)})
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError(f"{path}: {refusals[-1]}")


def _store_in(content: Any, kind: Kind) -> Store:
    store = store_of(content, kind)
    if not store.tensors:
        raise ValueError(f"there are no tensors by name in it; there is {listed(map(str, content))}")
    return store


def _of_file(
    path: Path, form: str, stores: dict[str, Store], *, small: dict[str, Any] | None = None
) -> Opened:
    homes = {part: dict.fromkeys(store.tensors, path) for part, store in stores.items()}
    return Opened(path=path, form=form, stores=stores, files=(path,), homes=homes, small=small or {})


def _open_dcp(folder: Path, *, allow_pickle: bool) -> Opened:
    store, others = read_dcp(folder, allow_pickle=allow_pickle)
    prefix = f"{MODEL.part}."
    # What torch's own examples save is {"model": ..., "optimizer": ...}: then the weights are below one name.
    inner = {
        name.removeprefix(prefix): item for name, item in store.tensors.items() if name.startswith(prefix)
    }
    return Opened(
        path=folder,
        form="distributed checkpoint of torch",
        stores={MODEL.part: Store(inner or store.tensors, None)},
        files=_files_of(folder, "*.distcp"),
        small=others,
    )


def _part_of(store: Store) -> str:
    return OPTIMIZER.part if store.tree is not None and stored_content(store) else MODEL.part


def _files_of(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern)))
