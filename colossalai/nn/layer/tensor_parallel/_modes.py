"""Layers of one tensor mode: each is a parallel layer built for the point that the model has reached.

`Linear2D` is the linear layer with the scheme of mode "2d"; the classes differ in nothing but the mode, so
they are made from a table.
"""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from colossalai.communication import split_forward_gather_backward
from colossalai.nn.layer.tensor_parallel._base import Initializer
from colossalai.nn.layer.tensor_parallel._dropout import ParallelDropout
from colossalai.nn.layer.tensor_parallel._embedding import ParallelEmbedding, ParallelPatchEmbedding
from colossalai.nn.layer.tensor_parallel._flow import advance, end_with, entry_of, numbered
from colossalai.nn.layer.tensor_parallel._launched import require_mode
from colossalai.nn.layer.tensor_parallel._linear import ParallelLinear
from colossalai.nn.layer.tensor_parallel._norm import ParallelLayerNorm
from colossalai.nn.layer.tensor_parallel._record import Passage, RecordEntry
from colossalai.nn.layer.tensor_parallel._scheme import (
    COLUMN,
    HEAD_SCHEMES,
    ROW,
    Axes,
    Cut,
    LinearScheme,
    first_cut,
    head_scheme,
    linear_scheme,
)

Layer = TypeVar("Layer", bound=nn.Module)

_STORED_AS_TORCH = (None, "1d")


class ModeLinear(ParallelLinear):
    """The linear layer of a mode; without `input_cut` and `after` it follows the layer built before it.

    Attributes:
        mode: The mode.
        fixed_scheme: Its scheme where it does not follow from the layer before.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether there is a bias.
        dtype: Type of the parameters.
        gather_output: Whether every rank gets all output features.
        skip_bias_add: `forward` returns the output and the bias, which is not added.
        input_cut: Cut of the input.
        after: The layer whose output it takes, instead of `input_cut`.
        options: The initializers and `in_panels` of `ParallelLinear`.

    Raises:
        ValueError: The axes do not divide the features, the mode has no such `input_cut`, or its layers
            cannot follow the layer built before.
    """

    passage: Passage
    mode: ClassVar[str | None]
    fixed_scheme: ClassVar[LinearScheme | None] = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        *,
        input_cut: Cut | None = None,
        after: nn.Module | None = None,
        **options: Any,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        layer = numbered(type(self).__name__, in_features, out_features)
        entry = self._entry(layer, in_features, input_cut=input_cut, after=after)
        scheme = self.fixed_scheme or linear_scheme(self.mode, entry.cut)
        transposed = self.mode in _STORED_AS_TORCH
        super().__init__(
            in_features, out_features, bias, dtype, scheme=scheme, weight_is_transposed=transposed, **options
        )
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        left = Cut(batch=scheme.y.batch) if gather_output else scheme.y
        self.passage = Passage(mode=self.mode, layer=layer, entry=entry, output_cut=left)
        advance(self.mode, left, layer=layer, features=out_features)

    def _entry(
        self, layer: str, in_features: int, *, input_cut: Cut | None, after: nn.Module | None
    ) -> RecordEntry:
        """Return the cut of the input; a fixed scheme has one."""
        if self.fixed_scheme is None or input_cut is not None or after is not None:
            entry = entry_of(self.mode, layer, in_features, input_cut=input_cut, after=after)
            if self.fixed_scheme is not None and entry.cut != self.fixed_scheme.x:
                raise ValueError(f"{layer} takes an input cut as {self.fixed_scheme.x}, not as {entry.cut}")
            return entry
        return RecordEntry(cut=self.fixed_scheme.x)


class Linear1D_Col(ModeLinear):
    """The linear layer of mode "1d" whose output features are cut; see `ModeLinear`."""

    mode = "1d"
    fixed_scheme = COLUMN


class Linear1D_Row(ModeLinear):
    """The linear layer of mode "1d" whose input features are cut.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        parallel_input: Whether the input is cut already; otherwise the layer takes its slice of a whole one.
        skip_bias_add: `forward` returns the output and the bias, which is not added.
        stream_chunk_num: Number of parts in which the output features are computed, so that one part is
            summed over the ranks while the next one is computed. The result is the same.
        options: `input_cut`, `after` and the initializers of `ParallelLinear`.

    Raises:
        ValueError: `stream_chunk_num` is not from 1 to `out_features`.
    """

    mode = "1d"
    fixed_scheme = ROW

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        stream_chunk_num: int = 1,
        **options: Any,
    ) -> None:
        if not 1 <= stream_chunk_num <= out_features:
            raise ValueError(
                f"stream_chunk_num is {stream_chunk_num}; it must be from 1 to {out_features}, the number of "
                "output features"
            )
        super().__init__(in_features, out_features, bias, dtype, skip_bias_add=skip_bias_add, **options)
        self.parallel_input = parallel_input
        self.num_chunks = stream_chunk_num
        if not parallel_input:
            self.passage = replace(self.passage, entry=RecordEntry(cut=Cut()))

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output, whole on every rank.

        Raises:
            ValueError: The last dimension is not this rank's share of the input features.
        """
        if not self.parallel_input:
            self.check_share(x, self.in_features, (), what="features")  # before it is cut, so on all ranks
            x = split_forward_gather_backward(x, self.mesh.axis("tp"), -1)
        return super().forward(x)


class ModeClassifier(ParallelLinear):
    """The last layer of a model in a mode: from features to one number for each class.

    Its weight is stored (classes, features), cut as an embedding's is, so that it can be shared with one.
    With `vocab_parallel` the classes of the output are cut, otherwise every rank gets all of them for its
    part of the batch. Classes that the ranks do not divide are padded; the logits of the padding are minus
    infinity.

    Args:
        in_features: Global size of the features.
        num_classes: Number of classes.
        weight: The weight of an embedding to be shared.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        gather_output: Whether every rank gets all classes where they are cut.
        input_cut: Cut of the input; default: the output cut of the layer built before.
        after: The layer whose output it takes, instead of `input_cut`.
        options: The initializers and `in_panels` of `ParallelLinear`.
    """

    passage: Passage
    mode: ClassVar[str | None]
    vocab_parallel: ClassVar[bool] = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        *,
        input_cut: Cut | None = None,
        after: nn.Module | None = None,
        **options: Any,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        layer = numbered(type(self).__name__, in_features, num_classes)
        entry = entry_of(self.mode, layer, in_features, input_cut=input_cut, after=after)
        scheme = head_scheme(self.mode, entry.cut, vocab_parallel=self.vocab_parallel)
        super().__init__(
            in_features,
            num_classes,
            bias,
            dtype,
            scheme=scheme,
            weight_is_transposed=True,
            padded=self.vocab_parallel,
            weight=weight,
            **options,
        )
        self.gather_output = gather_output
        left = Cut(batch=scheme.y.batch) if gather_output else scheme.y
        self.passage = Passage(mode=self.mode, layer=layer, entry=entry, output_cut=left)
        end_with(self.mode, left)


class VocabParallelModeClassifier(ModeClassifier):
    """The classifier of a mode whose classes are cut."""

    vocab_parallel = True


class ModeLayerNorm(ParallelLayerNorm):
    """Layer normalization in a mode; see `ParallelLayerNorm`.

    Args:
        normalized_shape: Global size of the last dimension.
        eps: Added to the variance.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        input_cut: Cut of the input; default: the output cut of the layer built before.
        after: The layer whose output it takes, instead of `input_cut`.
    """

    passage: Passage
    mode: ClassVar[str | None]

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        input_cut: Cut | None = None,
        after: nn.Module | None = None,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        layer = numbered(type(self).__name__, normalized_shape)
        entry = entry_of(self.mode, layer, normalized_shape, input_cut=input_cut, after=after)
        super().__init__(normalized_shape, eps, bias, dtype, cut=entry.cut)
        self.passage = Passage(mode=self.mode, layer=layer, entry=entry, output_cut=entry.cut)
        advance(self.mode, entry.cut, layer=layer, features=normalized_shape)


class ModeEmbedding(ParallelEmbedding):
    """The embedding of a mode, with a whole vocabulary on every rank; it begins a model.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Global size of the features.
        padding_idx: An id whose row gets no gradient.
        dtype: Type of the weight.
        weight_initializer: Fills the whole weight; default: standard normal.
    """

    passage: Passage
    mode: ClassVar[str | None]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        weight_initializer: Initializer | None = None,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            dtype,
            cut=first_cut(self.mode),
            vocab_axes=self.vocab_axes_of_mode(),
            weight_initializer=weight_initializer,
        )
        self.passage = _beginning(self, self.mode, num_embeddings, embedding_dim)

    def vocab_axes_of_mode(self) -> Axes:
        """Return the axes that cut the vocabulary."""
        return ()


class VocabParallelModeEmbedding(ModeEmbedding):
    """The embedding of a mode whose vocabulary is cut; it begins a model."""

    def vocab_axes_of_mode(self) -> Axes:
        """Return the axes that cut the vocabulary: those of the classifier that may share the weight."""
        return HEAD_SCHEMES[self.mode][0].w_out


class ModePatchEmbedding(ParallelPatchEmbedding):
    """The patch embedding of a mode; it begins a model. See `ParallelPatchEmbedding`."""

    passage: Passage
    mode: ClassVar[str | None]

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        dtype: torch.dtype | None = None,
        flatten: bool = True,
        **initializers: Any,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        cut = first_cut(self.mode)
        super().__init__(img_size, patch_size, in_chans, embed_size, dtype, flatten, cut=cut, **initializers)
        self.passage = _beginning(self, self.mode, img_size, patch_size, in_chans, embed_size)


class ModeDropout(ParallelDropout):
    """Dropout in a mode; see `ParallelDropout`.

    Args:
        p: Probability of a zero.
        inplace: Whether to change the input.
        input_cut: Cut of the input; default: the output cut of the layer built before.
        after: The layer whose output it takes, instead of `input_cut`.
    """

    mode: ClassVar[str | None]

    def __init__(
        self,
        p: float = 0.5,
        inplace: bool = False,
        *,
        input_cut: Cut | None = None,
        after: nn.Module | None = None,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        entry = entry_of(self.mode, type(self).__name__, input_cut=input_cut, after=after)
        super().__init__(p, inplace, cut=entry.cut)


def _beginning(module: nn.Module, mode: str | None, *sizes: int) -> Passage:
    """Return the passage of a layer that begins a model, and let the next one follow it."""
    layer, cut = numbered(type(module).__name__, *sizes), first_cut(mode)
    advance(mode, cut, layer=layer, features=sizes[-1])
    return Passage(mode=mode, layer=layer, entry=RecordEntry(cut=cut), output_cut=cut)


def of_mode(base: type[Layer], mode: str | None, name: str) -> type[Layer]:
    """Return the class of a layer in a mode."""
    doc = f"`{base.__name__}` of mode {mode!r}.\n\n{base.__doc__}"
    return type(name, (base,), {"mode": mode, "__doc__": doc, "__module__": "colossalai.nn.layer"})
