"""Sharded layers: replacements of layers whose parameters are cut, which keep their names and identity."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import nn

from colossalai.communication import (
    copy_forward_reduce_backward,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from colossalai.context import Axis, Mesh, draw_together, drawing_apart, drawing_together
from colossalai.nn.layer import ParallelEmbedding
from colossalai.nn.layer.tensor_parallel import LinearScheme, ParallelMatmul
from colossalai.tensor import PaddedSpec, ShardingSpec, SpecKeeper, pad_to, padded_size, set_spec, spec_of

AXIS = "tp"


def cut_param(
    param: torch.Tensor,
    dims: tuple[tuple[str, ...], ...],
    mesh: Mesh,
    *,
    parts: tuple[int, ...],
) -> None:
    """Reduce a parameter or buffer to this rank's slice, unless it is already cut, as a shared one may be.

    A vocabulary that the ranks do not divide is padded; other dimensions have been checked before.
    """
    if spec_of(param) is not None:
        return
    whole = tuple(param.shape)
    fused = parts if max(parts) > 1 else None
    ranks = [mesh.axis_size(axes) if axes else 1 for axes in dims]
    shape = tuple(padded_size(size, num) for size, num in zip(whole, ranks, strict=True))
    spec = (
        ShardingSpec(whole, dims, mesh, parts=fused)
        if shape == whole
        else PaddedSpec(shape, dims, mesh, parts=fused, unpadded=whole)
    )
    with torch.no_grad():
        param.data = spec.cut(pad_to(param.data, shape))
    set_spec(param, spec)


class LinearShard(SpecKeeper):
    """A linear layer along a 1D scheme.

    Args:
        weight: This rank's slice, with its spec.
        bias: This rank's slice, or the whole behind a row layer; None for none.
        scheme: `COLUMN` or `ROW`.
        mesh: The ranks.
        out_first: Whether the weight is (out, in).

    Shape:
        Input (..., in), output (..., out). The output of a column layer and the input of a row layer are cut.
    """

    takes_all: ClassVar[bool] = False
    """Whether a row layer is given all input features."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        scheme: LinearScheme,
        mesh: Mesh,
        out_first: bool,
    ) -> None:
        super().__init__(mesh)
        self.scheme = scheme
        self._matmul = ParallelMatmul(scheme, mesh)
        self.out_first = out_first
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the output."""
        weight = self.weight.t() if self.out_first else self.weight
        return self._matmul(x, weight, bias=self.bias)

    def extra_repr(self) -> str:
        """Return the description in `print(model)`."""
        return f"weight {tuple(self.weight.shape)}, {'out' if self.scheme.w_out else 'in'} features cut"


class HeadShard(LinearShard):
    """A column layer whose output is gathered: the logits of the whole vocabulary, on every rank.

    The padding of the features is removed. All ranks compute the rest alike, so each has the whole gradient,
    and takes its slice of it.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, **options: Any) -> None:
        super().__init__(weight, bias, **options)
        spec = spec_of(weight)
        assert spec is not None
        self.num_outputs = spec.whole_shape[
            0 if self.out_first else 1
        ]  # FSDP puts other tensors in a forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all logits."""
        whole = gather_forward_split_backward(super().forward(x), self.mesh.axis(AXIS), -1)
        return whole[..., : self.num_outputs]


class SplitRowShard(LinearShard):
    """A row layer that is given all features, by ranks that computed them alike: each takes its slice."""

    takes_all: ClassVar[bool] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products."""
        return super().forward(split_forward_gather_backward(x, self.mesh.axis(AXIS), -1))


class InnerRowShard(LinearShard):
    """A row layer inside a cut region, with an output for each head: of the sum each rank takes its heads.

    A rank finds the gradient of its own heads; these are gathered, so weight and bias receive whole ones.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of the ranks' products."""
        return split_forward_gather_backward(super().forward(x), self.mesh.axis(AXIS), -1)


@dataclass(frozen=True)
class LinearParts:
    """Operands of a linear layer, cut or not, for other implementations of its product.

    Attributes:
        weight: (out, in), this rank's slice.
        bias: (out,), this rank's slice, or the whole if outputs are summed; None for none.
        summed_over: The ranks over which products are summed, before the bias is added; None for none.
        gathered_over: The ranks over which outputs are gathered; None for none.
        num_outputs: Number of gathered outputs without the padding behind them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    summed_over: Axis | None = None
    gathered_over: Axis | None = None
    num_outputs: int = 0


def linear_parts(layer: nn.Module) -> LinearParts | None:
    """Return the operands of a linear layer, or of this rank's shard of one; None for other modules."""
    if type(layer) is nn.Linear:
        return LinearParts(layer.weight, layer.bias)
    if type(layer).__name__ == "Conv1D":
        return LinearParts(layer.get_parameter("weight").t(), layer.get_parameter("bias"))
    if type(layer) not in (LinearShard, HeadShard):
        return None
    assert isinstance(layer, LinearShard)
    weight = layer.weight if layer.out_first else layer.weight.t()
    axis = layer.mesh.axis(AXIS)
    if isinstance(layer, HeadShard):
        return LinearParts(weight, layer.bias, gathered_over=axis, num_outputs=layer.num_outputs)
    return LinearParts(weight, layer.bias, summed_over=axis if layer.scheme.reduce_y else None)


class VocabularyShard(ParallelEmbedding, nn.Embedding):
    """Put behind a class of embeddings, in the place of `nn.Embedding`, whose `forward` it extends.

    If a class scales its embeddings (Gemma 3), it scales the sum over the ranks.
    """

    weight: nn.Parameter


class SumsGradients(SpecKeeper):
    """Put before the class of a norm that a rank applies to its own heads: gradients are summed.

    Its parameters are whole on every rank, but their gradients have the terms of the rank's own heads only. A
    hook on a parameter would be lost if the parameter is replaced (FSDP, `to_empty`), so the forward handles
    the current one. A cut parameter has only entries of the rank's own heads, and keeps its gradient.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with parameters whose gradients are summed over the ranks."""
        own = {
            name: param
            for name, param in self._parameters.items()
            if param is not None and not ((spec := self._specs.get(name)) and AXIS in spec.axes)
        }
        axis = self.mesh.axis(AXIS)
        held: dict[str, Any] = self._parameters
        held.update({name: copy_forward_reduce_backward(param, axis) for name, param in own.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            held.update(own)


@dataclass
class AttentionRequest:
    """Whether the current forward returns the weights of its attentions."""

    attentions: bool = False


@dataclass
class AttentionRequestHook:
    """A hook before the forward of a model that detects a request of attention weights.

    Attributes:
        asked: The flag for `GathersHeads`.
        is_outermost: Whether the model is not part of another one, which may have received the request.
    """

    asked: AttentionRequest
    is_outermost: bool

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note it."""
        given = kwargs.get("output_attentions")
        if given is not None:
            self.asked.attentions = bool(given)
        elif self.is_outermost:
            self.asked.attentions = bool(getattr(module.config, "output_attentions", False))


@dataclass
class GathersHeads:
    """A hook behind an attention with a part of the heads: it gathers the weights of all heads.

    Without a request of the weights nothing is sent. It is registered before the hooks by which transformers
    collects them, as those are registered in the first forward.

    Attributes:
        asked: The flag of the request.
        mesh: The ranks.
        place: Index of the weights in the output.
    """

    asked: AttentionRequest
    mesh: Mesh
    place: int = 1

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the weights (batch, heads, queries, keys) gathered along the heads."""
        if not self.asked.attentions or not isinstance(output, tuple) or output[self.place] is None:
            return output
        weights = gather_forward_split_backward(output[self.place], self.mesh.axis(AXIS), 1)
        return *output[: self.place], weights, *output[self.place + 1 :]

    def __deepcopy__(self, memo: dict[int, Any]) -> "GathersHeads":
        """Return a hook of a copied model, over the same mesh."""
        return GathersHeads(copy.deepcopy(self.asked, memo), self.mesh, self.place)


@dataclass
class TakesOwnHeads:
    """A hook before a module with a part of the heads: it slices arguments for all heads to the rank's own.

    Attributes:
        places: Names of the arguments, (batch * heads, ...), and their places among the positional ones.
        num_heads: The number of heads on all ranks.
        mesh: The ranks.
    """

    places: dict[str, int]
    num_heads: int
    mesh: Mesh

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments with those of this rank's heads."""
        taken = {name: self._own(kwargs[name]) for name in self.places if name in kwargs}
        given = {place: self._own(args[place]) for place in self.places.values() if place < len(args)}
        return tuple(given.get(place, arg) for place, arg in enumerate(args)), {**kwargs, **taken}

    def _own(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        num_own = self.num_heads // self.mesh.axis_size(AXIS)
        by_head: torch.Tensor = tensor.unflatten(0, (-1, self.num_heads))  # (batch, heads, ...)
        begin = self.mesh.axis_rank(AXIS) * num_own
        return by_head[:, begin : begin + num_own].flatten(0, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TakesOwnHeads":
        """Return a hook of a copied model, over the same mesh."""
        return TakesOwnHeads(dict(self.places), self.num_heads, self.mesh)


class DrawsApart(nn.Module):
    """Put before the class of a module between column and row layers: each rank draws other numbers in it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with drawing_apart(only_if_drawn=True) if self.training else nullcontext():
            return super().forward(*args, **kwargs)


class DrawsTogether(nn.Module):
    """Put before the class of a module inside of such a one: the ranks draw the same numbers in it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with drawing_together() if self.training else nullcontext():
            return super().forward(*args, **kwargs)


def draw_together_behind(module: nn.Module, args: Any, output: Any) -> None:
    """Draw the same numbers on all ranks from here on; a hook behind a row layer."""
    draw_together()


def put_before(first: type[nn.Module], module: nn.Module) -> Callable[[], None]:
    """Change the class of a module, in place: the `forward` of `first` wraps the module's own.

    Returns:
        A function that restores the class of the module.
    """
    kind = type(module)
    _change_class(module, class_of(kind.__name__, kind.__module__, (first, kind)))
    return partial(_change_class, module, kind)


def put_behind(last: type[nn.Module], module: nn.Module) -> None:
    """Change the class of a module, in place: `last` becomes the base of its own class."""
    kind = type(module)
    _change_class(module, class_of(kind.__name__, kind.__module__, (kind, last)))


def _change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    # In place, since other modules and users hold the module. A wrapping module would rename its parameters,
    # and a hook cannot replace the computation of its forward.
    module.__class__ = kind


@cache  # layers of one class stay of one class
def class_of(name: str, module: str, bases: tuple[type, type]) -> type[nn.Module]:
    """Return a class with two bases, under the name of another one."""
    return type(name, bases, {"__module__": module})


_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)


def take_hooks(module: nn.Module, place_of: nn.Module) -> None:
    """Let a module that takes the place of another one run the hooks around its forward and backward.

    They are the same dictionaries, so the handles of the hooks still remove them.
    """
    vars(module).update({name: vars(place_of)[name] for name in _HOOKS})


def keep_specs(module: nn.Module, mesh: Mesh, kind: type[SpecKeeper]) -> None:
    """Put a class before the class of a module, in place, and keep the specs of the module's parameters."""
    vars(module).update(vars(SpecKeeper(mesh)) | vars(module))
    if not isinstance(module, kind):  # a layer of `head_norms` may own `head_params`
        put_before(kind, module)
    for name, param in module.named_parameters(recurse=False):
        module.register_parameter(name, param)
