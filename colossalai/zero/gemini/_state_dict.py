"""State dict of a model in chunks, whole values in host memory, and back; and an ordinary copy of the model.

Checkpoints need neither: they save the local part of each rank (`FlatValues`).
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from colossalai.tensor import RowCacheModule, flat_values
from colossalai.zero.gemini._cache import ChunkCache
from colossalai.zero.gemini._chunk import Chunk
from colossalai.zero.gemini._hooks import ModelHooks, handle_of, is_chunked


def whole_state(cache: ChunkCache, raw: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the state dict of a model with whole values in host memory, on every rank; collective.

    At no time are there more chunks than in training. Tied values are one tensor.

    Args:
        cache: The chunks.
        raw: The model, or a part of it.
        args: Those of `nn.Module.state_dict`, which still takes them by position.
        kwargs: As `args`; with `keep_vars` come the parameters themselves, and nothing is gathered.
    """
    # The parameters themselves: their values are not available without their chunk.
    state: dict[str, Any] = raw.state_dict(*args, **{**kwargs, "keep_vars": True})
    if kwargs.get("keep_vars") or any(args[2:3]):
        return state
    named = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    host = _host_values(cache, [value for value in named.values() if is_chunked(value)])
    for name, value in named.items():
        state[name] = host[id(value)] if id(value) in host else value.detach().cpu()
    prefix = kwargs.get("prefix", "").removesuffix(".")
    for name, part in raw.named_modules(prefix=prefix, remove_duplicate=False):
        if isinstance(part, RowCacheModule):  # of which a rank has its own tables
            state |= part.state_dict(prefix=f"{name}." if name else "")
    return state


def load_whole_state(cache: ChunkCache, raw: nn.Module, content: Mapping[str, Any], *, strict: bool) -> Any:
    """Load whole values into a model, as `nn.Module.load_state_dict` does; every rank loads the same.

    Nothing is gathered: torch's copies into a parameter are redirected to this rank's section.

    Args:
        cache: The chunks.
        raw: The model, or a part of it.
        content: The values by name.
        strict: Whether names that are missing or unexpected are an error.

    Returns:
        The names that are missing and unexpected.

    Raises:
        RuntimeError: Names or shapes do not fit; the values that fit were loaded, as by torch.
    """
    cache.share_writes()
    try:
        with _IntoSections():
            return raw.load_state_dict(content, strict=strict)
    finally:
        for chunk in cache.chunks:  # including chunks without new values, so that all ranks do the same
            cache.note_loaded(chunk)


def ordinary_copy(
    raw: nn.Module, *, device: torch.device, dtype: torch.dtype | None, is_wanted: bool
) -> nn.Module:
    """Return a copy of a module whose parameters are ordinary ones with whole values; collective.

    Args:
        raw: The module; parameters that are in no chunk are copied as they are.
        device: Of the copy.
        dtype: Of the floating tensors of the copy; None: as they are.
        is_wanted: Whether this rank needs the values; if not, its copy is on the meta device.
    """
    params = [param for param in raw.parameters() if is_chunked(param)]
    memo: dict[int, Any] = {}
    hooks_of_models = list(dict.fromkeys(handle_of(param).hooks for param in params))
    for hooks in hooks_of_models:
        own = [param for param in params if handle_of(param).hooks is hooks]
        host = _host_values(hooks.cache, own, keeps=is_wanted)
        memo.update((id(param), nn.Parameter(host.pop(id(param)), param.requires_grad)) for param in own)
    copied = copy.deepcopy(raw, memo)
    for part in copied.modules():
        _remove_hooks(part, hooks_of_models)
    return copied.to(device=device if is_wanted else torch.device("meta"), dtype=dtype)


@torch.no_grad()
def _host_values(
    cache: ChunkCache, params: Iterable[torch.Tensor], *, keeps: bool = True
) -> dict[int, torch.Tensor]:
    """Return copies of whole values in host memory, by the `id` of their parameter; collective.

    Args:
        cache: The chunks, of which no more are present than in training.
        params: The parameters.
        keeps: Whether this rank needs the values; if not, it gets tensors on the meta device.
    """
    cache.share_writes()  # in a block of `gathered`: the same values on all ranks
    by_chunk: dict[Chunk, list[torch.Tensor]] = {}
    for param in {id(param): param for param in params}.values():
        by_chunk.setdefault(handle_of(param).chunk, []).append(param)
    host: dict[int, torch.Tensor] = {}
    for chunk in sorted(by_chunk, key=lambda chunk: chunk.number):
        cache.fetch(chunk)  # collective; it can evict the one before
        for param in by_chunk[chunk]:
            view = handle_of(param).view().detach()
            host[id(param)] = view.to("cpu", copy=True) if keeps else view.to("meta")
    return host


def _remove_hooks(part: nn.Module, of_models: Collection[ModelHooks]) -> None:
    """Remove the hooks of chunks from a copy of a module, which has ordinary parameters."""
    for hooks in (part._forward_pre_hooks, part._forward_hooks):
        own = [key for key, hook in hooks.items() if getattr(hook, "__self__", None) in of_models]
        for key in own:
            del hooks[key]
            part._forward_hooks_always_called.pop(key, None)


class _IntoSections(TorchFunctionMode):
    """Redirects copies into a parameter in a chunk to this rank's section."""

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
        assert held is not None, "its values are in a chunk"
        held.tensor.copy_(values.expand(param.shape).reshape(-1)[held.part.begin : held.part.end])
        return param
