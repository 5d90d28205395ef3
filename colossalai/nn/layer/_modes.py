"""Layers of one tensor mode: each is a parallel layer built for the point that the model has reached.

`Linear2D` is the linear layer with the scheme of mode "2d"; the classes differ in nothing but the mode, so
they are made from a table.
"""

from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from colossalai.communication import gather_forward_split_backward, split_forward_gather_backward
from colossalai.nn.layer._base import Initializer, require_mode
from colossalai.nn.layer._dropout import ParallelDropout
from colossalai.nn.layer._embedding import ParallelEmbedding, ParallelPatchEmbedding
from colossalai.nn.layer._flow import advance, current_cut, end_with, restart
from colossalai.nn.layer._linear import ParallelLinear
from colossalai.nn.layer._norm import ParallelLayerNorm
from colossalai.nn.layer._scheme import (
    COLUMN,
    HEAD_SCHEMES,
    ROW,
    Axes,
    Cut,
    LinearScheme,
    head_scheme,
    linear_scheme,
)

Layer = TypeVar("Layer", bound=nn.Module)

_STORED_AS_TORCH = (None, "sequence", "1d")


class ModeLinear(ParallelLinear):
    """The linear layer of a mode; it follows the layer that was built before it.

    Attributes:
        mode: The mode.
        fixed_scheme: Its scheme where it does not follow from the layer before.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        gather_output: Whether every rank gets all output features.
        options: The initializers and `in_panels` of `ParallelLinear`.
    """

    mode: ClassVar[str | None]
    fixed_scheme: ClassVar[LinearScheme | None] = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        **options: Any,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        scheme = self.fixed_scheme or linear_scheme(self.mode, current_cut(self.mode))
        transposed = self.mode in _STORED_AS_TORCH
        super().__init__(
            in_features, out_features, bias, dtype, scheme=scheme, weight_is_transposed=transposed, **options
        )
        self.gather_output = gather_output
        advance(self.mode, Cut(batch=scheme.y.batch) if gather_output else scheme.y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the output."""
        y = super().forward(x)
        for name in self.scheme.y.features if self.gather_output else ():
            y = gather_forward_split_backward(y, self.mesh.axis(name), -1)
        return y


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
        options: The initializers of `ParallelLinear`.
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
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, **options)
        self.parallel_input = parallel_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        options: The initializers and `in_panels` of `ParallelLinear`.
    """

    mode: ClassVar[str | None]
    vocab_parallel: ClassVar[bool] = False

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        scheme = head_scheme(self.mode, current_cut(self.mode), vocab_parallel=self.vocab_parallel)
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
        end_with(self.mode, scheme.y)


class VocabParallelModeClassifier(ModeClassifier):
    """The classifier of a mode whose classes are cut."""

    vocab_parallel = True


class ModeLayerNorm(ParallelLayerNorm):
    """Layer normalization in a mode; see `ParallelLayerNorm`."""

    mode: ClassVar[str | None]

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        super().__init__(normalized_shape, eps, bias, dtype, cut=current_cut(self.mode))


class ModeEmbedding(ParallelEmbedding):
    """The embedding of a mode, with a whole vocabulary on every rank; it begins a model.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Global size of the features.
        padding_idx: An id whose row gets no gradient.
        dtype: Type of the weight.
        weight_initializer: Fills the whole weight; default: standard normal.
    """

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
            cut=restart(self.mode),
            vocab_axes=self.vocab_axes_of_mode(),
            weight_initializer=weight_initializer,
        )

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
        super().__init__(
            img_size, patch_size, in_chans, embed_size, dtype, flatten, cut=restart(self.mode), **initializers
        )


class ModeDropout(ParallelDropout):
    """Dropout in a mode; see `ParallelDropout`."""

    mode: ClassVar[str | None]

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        require_mode(self.mode, by=type(self).__name__)
        super().__init__(p, inplace, cut=current_cut(self.mode))


def of_mode(base: type[Layer], mode: str | None, name: str) -> type[Layer]:
    """Return the class of a layer in a mode."""
    doc = f"`{base.__name__}` of mode {mode!r}.\n\n{base.__doc__}"
    return type(name, (base,), {"mode": mode, "__doc__": doc, "__module__": "colossalai.nn.layer"})
