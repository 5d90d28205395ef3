"""Placeholders for the parts of a model on other stages, so that its own forward runs on every stage.

They hold no parameters. Attributes of a part that the model reads (`embedding.weight.dtype`, a block's
`attention_type`) are read from its outline: the part itself, without its memory.

[Note: forward of a stage]
Masks, positions and rotary tables are computed by the model's own code from the data, on every stage. The
parts before the blocks are replaced by shapes: `FrontElsewhere` returns zeros. A block of an earlier stage
returns the output of the last block before this stage; so the model's own code between blocks (taking the
first of a tuple, for example) runs as in the whole model, and the first block of this stage gets the input
that it gets there. The forward ends after the last block of the stage (`StageEnd`).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.pipeline.stages._stage import StageFlow

MakeTensor = Callable[[torch.Tensor], torch.Tensor]


def new_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of the same kind (a parameter for a parameter) with its own memory on `device`."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter of the same shape and dtype on the meta device."""
    return new_like(tensor, "meta")


def copy_with(module: nn.Module, make: MakeTensor) -> nn.Module:
    """Return a deep copy of a module with every tensor made by `make`; no tensor memory is copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            memo.update({id(v): make(v) for v in held.values() if isinstance(v, torch.Tensor)})
    return copy.deepcopy(module, memo)


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether a module is a placeholder for a part on another stage."""
    return isinstance(module, _Elsewhere)


class _Elsewhere(nn.Module):
    """Placeholder for a part on another stage.

    Args:
        name: Its name in the whole model.
        outline: The part, or a copy of it, from which attributes are read.
        flow: State of the stage's forward.
    """

    def __init__(self, name: str, outline: nn.Module, flow: StageFlow) -> None:
        super().__init__()
        self.name = name
        self.flow = flow
        # Not a sub-module: its parameters belong to another stage.
        object.__setattr__(self, "_outline", outline)

    def __getattr__(self, attribute: str) -> Any:
        outline = self.__dict__.get("_outline")
        if outline is None:  # during a copy
            raise AttributeError(attribute)
        return getattr(outline, attribute)

    @property
    def outline(self) -> nn.Module:
        """The module from which attributes are read."""
        outline: nn.Module = self.__dict__["_outline"]
        return outline

    def extra_repr(self) -> str:
        """Return a description of the part."""
        return f"{self.name}: {type(self.outline).__name__} of another stage"


def _cut_with(option: str, name: str) -> str:
    return f"pass stages that colossalai.pipeline.cut_model makes with {option}=[{name!r}]"


class FrontElsewhere(_Elsewhere):
    """Placeholder for a part that runs before the blocks, on the first stage; it returns zeros of its shapes.

    Args:
        name: Its name in the whole model.
        part: The part.
        flow: State of the stage's forward.
        feeds_blocks: Whether its output is the input of the first block: it has the shape of the stage's
            input, and the part need not run for it. (A tensor-parallel embedding could not: it would
            communicate.)
    """

    def __init__(self, name: str, part: nn.Module, flow: StageFlow, *, feeds_blocks: bool) -> None:
        super().__init__(name, copy_with(part, on_meta), flow)  # this rank can hold the part in another chunk
        self.feeds_blocks = feeds_blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros of the shape and dtype of the part's output.

        Raises:
            RuntimeError: The part is called after the blocks, where its values matter, or cannot run on
                meta tensors.
        """
        if self.flow.has_reached_blocks:
            raise RuntimeError(
                f"{self.name!r} is on the first stage only, but the model calls it after its blocks: "
                + _cut_with("last", self.name)
            )
        received = _first_tensor(self.flow.received)
        if self.feeds_blocks:
            return received.detach()
        try:
            with torch.no_grad():
                shapes = self.outline(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        except Exception as error:
            raise RuntimeError(
                f"{self.name!r} is on the first stage only, and it cannot be run on meta tensors, from which "
                "this stage would learn the shape of its output: " + _cut_with("everywhere", self.name)
            ) from error
        return tree_map(lambda leaf: _zeros(leaf, received.device), shapes)

    def _apply(self, fn: MakeTensor, recurse: bool = True) -> nn.Module:
        """Apply a change of dtype; the outline stays on the meta device."""
        self.outline._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype))
        return self


class BehindElsewhere(_Elsewhere):
    """Placeholder for a part that runs after the blocks, on the last stage; it is never called here."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error.

        Raises:
            RuntimeError: The model calls a part of the last stage before its blocks, the only call that can
                reach this method.
        """
        raise RuntimeError(
            f"{self.name!r} is on the last stage only, but the model calls it before its blocks: "
            + _cut_with("first", self.name)
        )


class BlockElsewhere(_Elsewhere):
    """Placeholder for a block on another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last block of the stage before."""
        return self.flow.received


def _first_tensor(tree: Any) -> torch.Tensor:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise RuntimeError("this stage has received nothing: only the first stage runs without")
    return tensors[0]


def _meta(leaf: Any) -> Any:
    return on_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _zeros(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
