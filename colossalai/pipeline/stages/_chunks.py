"""The stages of a rank with several: a list of modules in which parameters keep their full names."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from colossalai.pipeline.stages._stage import PipelineStage
from colossalai.tensor import PART_OF_CUT_MODEL


class ChunkList(nn.ModuleList):
    """Parts of one model, in the order of their stages.

    Every name is the one in the whole model: in the state dict, `named_parameters` and the like it is
    "5.weight", not "0.5.weight", for layer 5 in chunk 0. So no two chunks can use one name for two tensors.
    """

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all chunks."""
        seen: set[nn.Parameter] = set()
        for chunk in self:
            for name, param in chunk.named_parameters(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and param in seen):
                    seen.add(param)
                    yield name, param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of all chunks."""
        seen: set[int] = set()
        for chunk in self:
            for name, buffer in chunk.named_buffers(prefix, recurse, remove_duplicate):
                if not (remove_duplicate and id(buffer) in seen):
                    seen.add(id(buffer))
                    yield name, buffer

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the list itself and the modules inside the chunks; a chunk itself has no name."""
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        for chunk in self:
            yield from chunk.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module of that name, from the first chunk that has it.

        Raises:
            AttributeError: No chunk has a module `target`.
        """
        return self if target == "" else _find(self, "named_modules", target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of that name, from the first chunk that has it.

        Raises:
            AttributeError: No chunk has a parameter `target`.
        """
        param: nn.Parameter = _find(self, "named_parameters", target)
        return param

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer of that name, from the first chunk that has it.

        Raises:
            AttributeError: No chunk has a buffer `target`.
        """
        buffer: torch.Tensor = _find(self, "named_buffers", target)
        return buffer

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the states of all chunks in one dictionary."""
        for chunk in self:
            destination = chunk.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load a state into all chunks.

        Raises:
            RuntimeError: `strict` is set, and a tensor of a chunk is missing or a given tensor belongs to no
                chunk.
        """
        missing: list[str] = []
        unexpected = list(state_dict)
        for chunk in self:
            report = chunk.load_state_dict(state_dict, strict=False, assign=assign)
            missing += report.missing_keys
            surplus = set(report.unexpected_keys)
            unexpected = [name for name in unexpected if name in surplus]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit the {len(self)} chunks: missing {missing}, unexpected {unexpected}"
            )
        return _IncompatibleKeys(missing, unexpected)


def as_model(chunks: list[nn.Module]) -> nn.Module:
    """Return the only chunk, or the list of several, marked as a part of a cut model."""
    model = chunks[0] if len(chunks) == 1 else ChunkList(chunks)
    setattr(model, PART_OF_CUT_MODEL, True)
    return model


def has_full_names(module: nn.Module) -> bool:
    """Return whether a module is this rank's part of a model, with the names of the whole."""
    return isinstance(module, PipelineStage | ChunkList) or hasattr(module, PART_OF_CUT_MODEL)


def _find(chunks: ChunkList, kind: str, name: str) -> Any:
    for chunk in chunks:
        named = dict(getattr(chunk, kind)(remove_duplicate=False))
        if name in named:
            return named[name]
    raise AttributeError(f"none of the {len(chunks)} chunks has {name!r} among its {kind}")
