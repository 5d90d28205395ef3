"""Conversion of a checkpoint of any form to another: without the model's code, and block by block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from colossalai.checkpoint_io._model import MODEL
from colossalai.checkpoint_io._save_plan import SavePlan, write_training_state_alone
from colossalai.checkpoint_io._state import FileLayout
from colossalai.checkpoint_io._training_state import random_files
from colossalai.checkpoint_io.formats import WriteItem, save_whole
from colossalai.checkpoint_io.resharding import (
    FlatStateDict,
    StoredShard,
    StoredStateDict,
    StoredTensor,
    plain,
    with_own_memory,
)
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, SMALL_FILE, block_size, resolved
from colossalai.checkpoint_io.tools._open import KINDS, Opened
from colossalai.tensor import Box, whole_box

TARGETS = ("hf", "safetensors", "pt", "state")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Options of a conversion.

    Attributes:
        to: One of `TARGETS`: a folder of Hugging Face, a single file, or a training state.
        dtype: Dtype of floating-point weights; None keeps theirs. States of the optimizer keep theirs.
        size_per_shard: The most a shard of a folder holds, in MB of 1024 * 1024 bytes.
        buffer_size: The most memory that it takes, in MB.
        step: The step of a training state, if the source has none.
        progress: Called repeatedly with the number of read bytes.
    """

    to: str
    dtype: torch.dtype | None = None
    size_per_shard: float = 1024
    buffer_size: float = DEFAULT_BUFFER_MB
    step: int | None = None
    progress: Progress = field(default=lambda count: None)


@dataclass(frozen=True, eq=False)
class _Passing(StoredShard):
    """A whole tensor of a checkpoint that is being converted, possibly to another dtype."""

    box: Box
    source: StoredTensor
    progress: Progress

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        self.source.read(box, out)
        self.progress(box.numel * self.source.dtype.itemsize)


def size_of(opened: Opened) -> int:
    """Return the bytes of all tensors of a checkpoint."""
    return sum(state.nbytes for state in opened.states.values())


def convert_checkpoint(opened: Opened, target: str | Path, conversion: Conversion) -> list[str]:
    """Write a checkpoint in another form.

    Args:
        opened: The checkpoint.
        target: The file or folder to write.
        conversion: The options.

    Returns:
        Descriptions of the parts that the target cannot hold.

    Raises:
        ValueError: `target` is the source or ends as no such file does, `conversion.to` is unknown, or the
            checkpoint holds no model.
        OSError: A checkpoint cannot be read or written.
    """
    target = Path(target)
    if resolved(target) == resolved(opened.path):
        raise ValueError(f"{target} is the source itself: give another name")
    states = {part: _passing(state, part, conversion) for part, state in opened.states.items()}
    match conversion.to:
        case "state":
            return _to_state(opened, states, target, conversion)
        case "hf":
            return _to_folder(opened, states, target, conversion)
        case "safetensors" | "pt":
            return _to_file(opened, states, target, conversion)
    raise ValueError(f"to={conversion.to!r} must be one of {', '.join(TARGETS)}")


def _passing(state: StoredStateDict, part: str, conversion: Conversion) -> StoredStateDict:
    tensors: dict[str, StoredTensor] = {}
    for first, names in state.names_by_tensor.items():
        source = state.tensors[first]
        is_cast = conversion.dtype is not None and part == MODEL.part and source.dtype in _FLOATS
        dtype = conversion.dtype if is_cast and conversion.dtype is not None else source.dtype
        shard = _Passing(whole_box(source.shape), source, conversion.progress)
        tensors |= dict.fromkeys(names, StoredTensor(source.shape, dtype, (shard,)))
    return FlatStateDict({name: tensors[name] for name in state.tensors}, state.tree)


def _to_file(
    opened: Opened, states: Mapping[str, StoredStateDict], target: Path, conversion: Conversion
) -> list[str]:
    part = MODEL.part if MODEL.part in states else next(iter(states))
    use_safetensors = conversion.to == "safetensors"
    if target.suffix == ".safetensors" and not use_safetensors:
        raise ValueError(f"{target} would be a torch file: give another ending, or convert to safetensors")
    layout = FileLayout(use_safetensors=use_safetensors, buffer_size=conversion.buffer_size)
    save_whole(target, states[part], KINDS[part], layout)
    left_out = [f"the {other}" for other in states if other != part]
    return left_out + _names_of(opened)


def _to_folder(
    opened: Opened, states: Mapping[str, StoredStateDict], target: Path, conversion: Conversion
) -> list[str]:
    layout = FileLayout(
        shard=True,
        size_per_shard=conversion.size_per_shard,
        use_safetensors=True,
        buffer_size=conversion.buffer_size,
    )
    for part, state in states.items():
        texts = opened.texts if part == MODEL.part else {}
        save_whole(target, state, KINDS[part], layout, texts=texts)
    return _names_of(opened)


def _to_state(
    opened: Opened, states: Mapping[str, StoredStateDict], target: Path, conversion: Conversion
) -> list[str]:
    if MODEL.part not in states:
        raise ValueError(f"{opened.path} holds no model: a training state has one")
    num_ranks = 1 if opened.manifest is None else opened.manifest.num_ranks
    epoch = {name: opened.small[name] for name in ("epoch",) if name in opened.small}
    extra = opened.small.get("extra", epoch)
    parts = {
        name: opened.small[name] for name in ("lr_scheduler", "dataloader", "scaler") if name in opened.small
    }
    small = plain(with_own_memory({**parts, "extra": extra}), at="training state")
    step = opened.manifest.step if opened.manifest is not None else conversion.step or 0
    plan = SavePlan(
        path=target,
        step=step,
        keep_last=1,
        states=states,
        shares={part: _shares(state, num_ranks) for part, state in states.items()},
        small_files={SMALL_FILE: small, **(opened.random or random_files())},
        config=None if opened.manifest is None else opened.manifest.config,
        rank=0,
        most=block_size(conversion.buffer_size),
    )
    write_training_state_alone(plan)
    return [name for name in _names_of(opened) if name not in {*parts, "extra", "epoch"}]


def _names_of(opened: Opened) -> list[str]:
    return [name for name, value in opened.small.items() if not isinstance(value, dict) or value]


def _shares(state: StoredStateDict, num_ranks: int) -> Sequence[Sequence[WriteItem]]:
    """Return for every file the tensors that are written into it, whole."""
    shares: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for name in state.names_by_tensor:
        tensor = state.tensors[name]
        rank = loads.index(min(loads))
        loads[rank] += tensor.nbytes
        shares[rank].append(WriteItem(name, whole_box(tensor.shape), tensor, tensor))
    return [sorted(items, key=lambda item: -item.of.dtype.itemsize) for items in shares]
