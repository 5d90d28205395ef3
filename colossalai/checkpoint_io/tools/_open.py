"""Opened checkpoint of any form, without a model: its content and files.

Only metadata are read, and small values; tensors stay in their files (`StoredTensor`). Nothing is compared
with checksums here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._hugging_face_index import find_weights, read_index
from colossalai.checkpoint_io._model import MODEL
from colossalai.checkpoint_io._optimizer_state import OPTIMIZER, stored_content
from colossalai.checkpoint_io._retention import check_state, is_like_a_state
from colossalai.checkpoint_io._state import Kind
from colossalai.checkpoint_io.formats import (
    DCP_INDEX,
    DcpShard,
    Format,
    detect_format,
    read_dcp,
    read_plain,
    read_state,
    read_torch,
    state_of,
)
from colossalai.checkpoint_io.resharding import FileShard, FlatStateDict, StoredStateDict
from colossalai.checkpoint_io.storage import (
    INDEX,
    MANIFEST,
    RANDOM_FOLDER,
    SMALL_FILE,
    Manifest,
    listed,
    read_manifest,
    refuse_links_out,
)
from colossalai.logging import get_dist_logger
from colossalai.tensor import Box

KINDS = {MODEL.part: MODEL, OPTIMIZER.part: OPTIMIZER}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint of any form.

    Attributes:
        path: The file or folder.
        form: Description of its form.
        states: Its "model" and "optimizer".
        files: The files of its tensors.
        homes: For each part the file of each tensor, if a tensor is in one file.
        small: Plain values by name: lr_scheduler, extra, ...
        random: The files of random states of a training state, and their content.
        texts: Small text files next to the weights: config.json, ...
        manifest: The manifest of a training state.
    """

    path: Path
    form: str
    states: dict[str, StoredStateDict]
    files: tuple[Path, ...]
    homes: dict[str, dict[str, Path]] = field(default_factory=dict)
    small: dict[str, object] = field(default_factory=dict)
    random: dict[str, dict[str, object]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    def places_of(self, part: str, name: str) -> Iterator[tuple[Path, Box]]:
        """Yield where a tensor lies: which part of it in which file."""
        tensor = self.states[part].tensors[name]
        for shard in tensor.shards:
            if isinstance(shard, FileShard | DcpShard):
                yield shard.path, shard.box
            else:
                yield self.homes[part][name], shard.box


def open_checkpoint(path: str | Path, *, variant: str | None = None, allow_pickle: bool = False) -> Opened:
    """Open a checkpoint of any form.

    Args:
        path: A training state; a sharded folder; a folder of Hugging Face, or its index; a torch or
            safetensors file, of a model, an optimizer, or everything (`save_checkpoint`); a folder of torch's
            distributed checkpoint.
        variant: Which of the weights in a folder of Hugging Face.
        allow_pickle: Whether the index of torch's distributed checkpoint, a pickle, may be read.

    Raises:
        ValueError: `path` is a checkpoint of no form above, or damaged.
        OSError: `path` cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "there is no such file or folder", str(path))
    if not path.is_dir():
        return _open_index(path) if path.name.endswith(".json") else _open_file(path)
    if (path / MANIFEST).is_file():
        return _open_training_state(path)
    if (path / INDEX).is_file():
        state = read_state(path, MODEL, is_verified=True)
        part = _part_of(state)
        return Opened(
            path=path, form=f"{part} in chunks", states={part: state}, files=_files_of(path, "*.safetensors")
        )
    if (path / DCP_INDEX).is_file():
        return _open_dcp(path, allow_pickle=allow_pickle)
    if is_like_a_state(path):
        raise ValueError(f"{path / MANIFEST} is missing, the list of files of a training state")
    states = sorted(entry.name for entry in path.iterdir() if (entry / MANIFEST).is_file())
    if states:
        raise ValueError(f"{path} is a folder of training states: give one of {listed(states)}")
    return _open_shards(path, variant=variant)


def _open_training_state(path: Path) -> Opened:
    refuse_links_out(read_manifest(path).files, path)
    manifest = check_state(path, is_verified=True).manifest
    small = read_plain(path / SMALL_FILE)
    return Opened(
        path=path,
        form="training state",
        states={
            part: read_state(path / part, kind, is_verified=True)
            for part, kind in KINDS.items()
            if (path / part).is_dir()
        },
        files=tuple(path / name for name in manifest.files),
        small=small,
        random={
            name: read_plain(path / name) for name in manifest.files if name.startswith(f"{RANDOM_FOLDER}/")
        },
        manifest=manifest,
    )


def _open_shards(folder: Path, *, variant: str | None) -> Opened:
    """Open a folder of Hugging Face, with the optimizer if it is next to the model."""
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
        states={part: state for opened in found.values() for part, state in opened.states.items()},
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
    state = read_state(path, MODEL, is_verified=True)
    part = _part_of(state)
    homes = {name: path.parent / index.weight_map[name] for name in state.tensors if name in index.weight_map}
    return Opened(
        path=path,
        form=f"shards of a {part}",
        states={part: state},
        files=tuple(path.parent / name for name in index.files),
        homes={part: homes},
    )


def _open_file(path: Path) -> Opened:
    if detect_format(path) is Format.SAFETENSORS:
        state = read_state(path, MODEL, is_verified=True)
        return _of_file(path, f"safetensors file of a {_part_of(state)}", {_part_of(state): state})
    content = read_torch(path)
    if isinstance(content, dict) and {"epoch", MODEL.part} <= content.keys():
        states = {
            part: state_of(content[part], kind)
            for part, kind in KINDS.items()
            if content.get(part) is not None
        }
        small = {name: value for name, value in content.items() if name not in states}
        return _of_file(path, "file of save_checkpoint", states, small=small)
    refusals = []
    for part, kind in reversed(KINDS.items()):
        try:
            return _of_file(path, f"torch file of a {part}", {part: _state_in(content, kind)})
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError(f"{path}: {refusals[-1]}")


def _state_in(content: Any, kind: Kind) -> StoredStateDict:
    state = state_of(content, kind)
    if not state.tensors:
        raise ValueError(f"there are no tensors by name in it; there is {listed(map(str, content))}")
    return state


def _of_file(
    path: Path, form: str, states: dict[str, StoredStateDict], *, small: dict[str, Any] | None = None
) -> Opened:
    homes = {part: dict.fromkeys(state.tensors, path) for part, state in states.items()}
    return Opened(path=path, form=form, states=states, files=(path,), homes=homes, small=small or {})


def _open_dcp(folder: Path, *, allow_pickle: bool) -> Opened:
    state, others = read_dcp(folder, allow_pickle=allow_pickle)
    prefix = f"{MODEL.part}."
    # torch's own examples save {"model": ..., "optimizer": ...}: then the weights are below one name.
    inner = {
        name.removeprefix(prefix): item for name, item in state.tensors.items() if name.startswith(prefix)
    }
    return Opened(
        path=folder,
        form="distributed checkpoint of torch",
        states={MODEL.part: FlatStateDict(inner or state.tensors, None)},
        files=_files_of(folder, "*.distcp"),
        small=others,
    )


def _part_of(state: StoredStateDict) -> str:
    return OPTIMIZER.part if state.tree is not None and stored_content(state) else MODEL.part


def _files_of(folder: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob(pattern)))
