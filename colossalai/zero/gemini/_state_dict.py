"""State dict of a model in chunks: whole values in host memory, and back into the sections of all ranks.

Checkpoints need neither: they are of what each rank holds (`FlatValues`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from colossalai.tensor import flat_values
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._residence import Residence
from colossalai.zero.gemini._uses import is_chunked, place_of


def whole_state(residence: Residence, raw: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a model with whole values in host memory, on every rank; collective.

    At no time are there more chunks than in training. Tied values are one tensor.

    Args:
        residence: The chunks.
        raw: The model, or a part of it.
        args: Those of `nn.Module.state_dict`, which still takes them by position.
        kwargs: As `args`; with `keep_vars` come the parameters themselves, and nothing is gathered.
    """
    # The parameters themselves: nothing else can be had of them without their chunk.
    state: dict[str, Any] = raw.state_dict(*args, **{**kwargs, "keep_vars": True})
    if kwargs.get("keep_vars") or any(args[2:3]):
        return state
    residence.share_writes()  # in a block of `gathered`: the same values on all ranks
    named = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    chunked = {id(value): value for value in named.values() if is_chunked(value)}
    by_chunk: dict[Chunk, list[torch.Tensor]] = {}
    for param in chunked.values():
        by_chunk.setdefault(place_of(param).chunk, []).append(param)
    host: dict[int, torch.Tensor] = {}
    for chunk in sorted(by_chunk, key=lambda chunk: chunk.number):
        residence.fetch(chunk)  # collective; it may let go of the one before
        for param in by_chunk[chunk]:
            host[id(param)] = place_of(param).view().detach().to("cpu", copy=True)
    for name, value in named.items():
        state[name] = host[id(value)] if id(value) in host else value.detach().cpu()
    return state


def load_whole_state(
    residence: Residence, raw: nn.Module, content: Mapping[str, Any], *, strict: bool
) -> Any:
    """Load whole values into a model, as `nn.Module.load_state_dict` does; every rank loads the same.

    Nothing is gathered: what torch copies into a parameter goes into this rank's section.

    Args:
        residence: The chunks.
        raw: The model, or a part of it.
        content: The values by name.
        strict: Whether names that are missing or unexpected are an error.

    Returns:
        The names that are missing and unexpected.

    Raises:
        RuntimeError: Names or shapes do not fit; what fits was loaded, as by torch.
    """
    residence.share_writes()
    try:
        with _IntoSections():
            return raw.load_state_dict(content, strict=strict)
    finally:
        for chunk in residence.chunks:  # those that nothing came for, too: which they are need not be known
            residence.note_loaded(chunk)


class _IntoSections(TorchFunctionMode):
    """What is copied into a parameter in a chunk, this rank takes its part of."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy into the section, or call the function."""
        if func is not torch.Tensor.copy_ or not is_chunked(args[0]):
            return func(*args, **(kwargs or {}))
        param, values = args[:2]
        held = flat_values(param)
        assert held is not None, "its values lie in a chunk"
        held.tensor.copy_(values.expand(param.shape).reshape(-1)[held.part.begin : held.part.end])
        return param
