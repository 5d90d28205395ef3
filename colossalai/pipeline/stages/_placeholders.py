"""Stand-ins for the parts of a model that other stages hold, so that its own forward runs on every stage.

They hold no parameters. What is read off a part besides calling it (`embedding.weight.dtype`, a block's
`attention_type`) is answered by its outline: the part itself, which has no memory here any more.

[Note: a stage runs the forward of the whole model]
Masks, positions and rotary tables are computed by the model's own code from the data, on every stage. What
runs before the blocks is replaced by shapes: `FrontElsewhere` returns zeros. A block of an earlier stage
returns what the last block before this stage has returned over there; so whatever the model does between
block and block (takes the first of a tuple, say) happens as in the whole model, and the first block of this
stage sees what it would see there. The forward ends behind the last block of the stage (`StageEnd`).
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
    """Return a tensor of the same kind (a parameter for a parameter) with memory of its own on `device`."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter of the same shape and dtype on the meta device."""
    return new_like(tensor, "meta")


def copy_with(module: nn.Module, make: MakeTensor) -> nn.Module:
    """Return a deep copy of a module in which `make` has made every tensor; none of its memory is copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            memo.update({id(v): make(v) for v in held.values() if isinstance(v, torch.Tensor)})
    return copy.deepcopy(module, memo)


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether a module stands for a part that another stage holds."""
    return isinstance(module, _Elsewhere)


class _Elsewhere(nn.Module):
    """A part that another stage holds.

    Args:
        name: Its name in the whole model.
        outline: The part, or what answers for it.
        flow: That of the stage.
    """

    def __init__(self, name: str, outline: nn.Module, flow: StageFlow) -> None:
        super().__init__()
        self.name = name
        self.flow = flow
        # Not a sub-module: what it holds belongs to another stage.
        object.__setattr__(self, "_outline", outline)

    def __getattr__(self, attribute: str) -> Any:
        outline = self.__dict__.get("_outline")
        if outline is None:  # it is being copied
            raise AttributeError(attribute)
        return getattr(outline, attribute)

    @property
    def outline(self) -> nn.Module:
        """What answers for the part."""
        outline: nn.Module = self.__dict__["_outline"]
        return outline

    def extra_repr(self) -> str:
        """Say what it stands for."""
        return f"{self.name}: {type(self.outline).__name__} of another stage"


def _cut_with(option: str, name: str) -> str:
    return f"pass stages that colossalai.pipeline.cut_model makes with {option}=[{name!r}]"


class FrontElsewhere(_Elsewhere):
    """A part that runs before the blocks, on the first stage; here it returns zeros of the right shapes.

    Args:
        name: Its name in the whole model.
        part: The part.
        flow: That of the stage.
        feeds_blocks: What it returns goes to the first block as it is: it has the shape of what the stage
            receives, and the part need not be run for it. (A tensor-parallel embedding cannot be: it would
            communicate.)
    """

    def __init__(self, name: str, part: nn.Module, flow: StageFlow, *, feeds_blocks: bool) -> None:
        super().__init__(name, copy_with(part, on_meta), flow)  # this rank may hold the part in another chunk
        self.feeds_blocks = feeds_blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return something of the shape and dtype that the part would return.

        Raises:
            RuntimeError: The part is called after the blocks, where its values count, or cannot be run on
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
                "this stage would learn the shape of what it returns: " + _cut_with("everywhere", self.name)
            ) from error
        return tree_map(lambda leaf: _zeros(leaf, received.device), shapes)

    def _apply(self, fn: MakeTensor, recurse: bool = True) -> nn.Module:
        """Follow a change of dtype; the outline stays on the meta device."""
        self.outline._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype))
        return self


class BehindElsewhere(_Elsewhere):
    """A part that runs after the blocks, on the last stage; here nobody calls it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            RuntimeError: The model calls a part of the last stage before its blocks, the only call that comes
                here.
        """
        raise RuntimeError(
            f"{self.name!r} is on the last stage only, but the model calls it before its blocks: "
            + _cut_with("first", self.name)
        )


class BlockElsewhere(_Elsewhere):
    """A block of another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the last block of the stage before has returned."""
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
