"""Embeddings of tokens, whole or cut along the vocabulary, and of image patches.

Ids and images come whole: the ranks of a tensor-parallel group read the same batch. Each layer takes its part
of it.
"""

import math

import torch
from torch import nn

from colossalai.communication import reduce_forward_copy_backward, scatter_forward_gather_backward
from colossalai.context import Mesh
from colossalai.nn.layer.tensor_parallel._base import Initializer, ParallelModule, empty_parameter
from colossalai.nn.layer.tensor_parallel._batch import check_batch, own_part
from colossalai.nn.layer.tensor_parallel._scheme import Axes, Cut
from colossalai.tensor import padded_size


class ParallelEmbedding(ParallelModule):
    """Looks up rows of a weight (vocabulary, features).

    The weight is cut along the features as the activation is, and along the vocabulary by `vocab_axes`. A
    rank then looks up the rows that it has, and the ranks' results are summed: scattered along the batch over
    the axes that cut the batch, by all-reduce over the others. So no rank ever gathers a weight. A vocabulary
    that the ranks do not divide is padded with unused rows, see `PaddedSpec`.

    Bytes that a rank sends for an output slice of |y| over p ranks: nothing with a whole vocabulary; (p-1)
    |y| over an axis that also cuts the batch and as much in the backward, 2 (p-1)/p |y| over another one; and
    2 (p-1)/p |w| for the gradient over the axes that cut the batch alone.

    Args:
        num_embeddings: Size of the vocabulary.
        embedding_dim: Global size of the features.
        padding_idx: An id whose row gets no gradient; a negative one counts from the end.
        dtype: Type of the weight.
        cut: Cut of the activation.
        vocab_axes: Axes that cut the vocabulary, the coarsest cut first.
        mesh: The ranks; default: those of the launched job.
        weight_initializer: Fills the whole weight; default: standard normal, as torch.
        weight: A weight that has been cut, instead of a new one.

    Shape:
        Input (batch, ...) of ids, whole; output (batch, ..., features), a slice by `cut`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        cut: Cut,
        vocab_axes: Axes = (),
        mesh: Mesh | None = None,
        weight_initializer: Initializer | None = None,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__(mesh)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else self._from_start(padding_idx)
        self.cut = cut
        self.vocab_axes = vocab_axes
        self._vocab_rank = self.mesh.axis_rank_in_order(vocab_axes)
        self._only_batch = tuple(name for name in cut.batch if name not in vocab_axes)
        self._summed_over = [self.mesh.axis(name) for name in vocab_axes if name not in cut.batch]
        self._scattered_over = [self.mesh.axis(name) for name in cut.batch if name in vocab_axes]
        if weight is not None:
            self.weight = weight
            return
        whole = empty_parameter(num_embeddings, embedding_dim, dtype=dtype)
        (weight_initializer or _normal)(whole, num_embeddings, embedding_dim)
        if padding_idx is not None and weight_initializer is None:
            whole[padding_idx].zero_()
        rows = padded_size(num_embeddings, self.mesh.axis_size(vocab_axes))
        self.weight = self.cut_parameter(
            "weight", whole, (vocab_axes, cut.features), padded_shape=(rows, embedding_dim)
        )

    def extra_repr(self) -> str:
        """Return the arguments for `print(model)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, weight {tuple(self.weight.shape)}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the embedded batch.

        Raises:
            ValueError: An id is not in the vocabulary, or the axes do not divide the batch.
        """
        self._check(ids)
        weight: torch.Tensor = self.weight
        if self._only_batch:
            ids = own_part(ids, self._only_batch, self.mesh, by=type(self).__name__)
            weight = self.shared_over(self._only_batch, weight)
        if self.vocab_axes:
            y = self._look_up_own_rows(ids, weight)
            # The row of an id is on one rank; the others add zeros.
            for axis in self._summed_over:
                y = reduce_forward_copy_backward(y, axis)
            for axis in self._scattered_over:
                y = scatter_forward_gather_backward(y, axis, 0)
        else:
            y = nn.functional.embedding(ids, weight, self.padding_idx)
        return y if self.passage is None else self.passage.leave(y)

    def _look_up_own_rows(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the embedding of the ids whose rows this rank has, and zeros for the others."""
        num_rows = weight.shape[0]
        first = self._vocab_rank * num_rows
        elsewhere = (ids < first) | (ids >= first + num_rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < num_rows:
            padding = None  # another rank has that row
        y = nn.functional.embedding((ids - first).masked_fill(elsewhere, 0), weight, padding)
        return y.masked_fill(elsewhere.unsqueeze(-1), 0)

    def _from_start(self, padding_idx: int) -> int:
        if not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise ValueError(
                f"{type(self).__name__} got padding_idx={padding_idx}; its vocabulary has "
                f"{self.num_embeddings} entries, from 0"
            )
        return padding_idx % self.num_embeddings

    def _check(self, ids: torch.Tensor) -> None:
        if ids.numel() > 0:
            bounds = ids.aminmax()
            low, high = bounds.min.item(), bounds.max.item()
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"{type(self).__name__} got ids from {low} to {high}; its vocabulary has "
                    f"{self.num_embeddings} entries, from 0"
                )
        if self.cut.batch:
            check_batch(ids, self.cut.batch, self.mesh, by=type(self).__name__)


class ParallelPatchEmbedding(ParallelModule):
    """Cuts images into patches, embeds them, adds a class token and positions (ViT, 2010.11929).

    All parameters are cut along the embedding, and every rank works on its part of the batch; nothing is sent
    but the gradients of the parameters over the axes that cut the batch.

    Args:
        img_size: Height and width of an image.
        patch_size: Height and width of a patch.
        in_chans: Channels of an image.
        embed_size: Global size of the embedding.
        dtype: Type of the parameters.
        flatten: Whether to return (batch, 1 + patches, embedding); otherwise (batch, embedding, height,
            width) without class token and positions.
        cut: Cut of the activation.
        mesh: The ranks; default: those of the launched job.
        weight_initializer: Fills the whole weight; default: as torch's convolution.
        bias_initializer: Fills the whole bias; default: as torch's convolution.
        position_embed_initializer: Fills the whole positions; default: zeros.

    Shape:
        Input (batch, channels, height, width), whole; output a slice by `cut`.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        dtype: torch.dtype | None = None,
        flatten: bool = True,
        *,
        cut: Cut,
        mesh: Mesh | None = None,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        position_embed_initializer: Initializer | None = None,
    ) -> None:
        super().__init__(mesh)
        if img_size % patch_size:
            raise ValueError(f"{type(self).__name__}: patches of {patch_size} do not tile {img_size} pixels")
        self.img_size = img_size
        self.in_chans = in_chans
        self.patch_size = patch_size
        self.flatten = flatten
        self.cut = cut
        num_patches = (img_size // patch_size) ** 2
        fan_in = in_chans * patch_size**2
        whole = empty_parameter(embed_size, in_chans, patch_size, patch_size, dtype=dtype)
        (weight_initializer or _convolution)(whole, fan_in, embed_size)
        self.weight = self.cut_parameter("weight", whole, (cut.features, (), (), ()))
        whole = empty_parameter(embed_size, dtype=dtype)
        (bias_initializer or _convolution_bias)(whole, fan_in, embed_size)
        self.bias = self.cut_parameter("bias", whole, (cut.features,))
        if flatten:
            whole = nn.init.zeros_(empty_parameter(1, 1, embed_size, dtype=dtype))
            self.cls_token = self.cut_parameter("cls_token", whole, ((), (), cut.features))
            whole = empty_parameter(1, num_patches + 1, embed_size, dtype=dtype)
            (position_embed_initializer or _zeros)(whole, fan_in, embed_size)
            self.pos_embed = self.cut_parameter("pos_embed", whole, ((), (), cut.features))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the embedded batch.

        Raises:
            ValueError: The images are of another size, or the axes do not divide the batch.
        """
        wanted = (self.in_chans, self.img_size, self.img_size)
        if tuple(images.shape[1:]) != wanted:
            raise ValueError(
                f"{type(self).__name__} got images of shape {tuple(images.shape)}; it takes (batch, "
                f"channels, height, width) with {wanted} after the batch"
            )
        images = own_part(images, self.cut.batch, self.mesh, by=type(self).__name__)
        weight, bias = (self.shared_over(self.cut.batch, param) for param in (self.weight, self.bias))
        y = nn.functional.conv2d(images, weight, bias, stride=self.patch_size)
        if self.flatten:
            token, positions = (self.shared_over(self.cut.batch, p) for p in (self.cls_token, self.pos_embed))
            y = torch.cat([token.expand(y.shape[0], -1, -1), y.flatten(2).transpose(1, 2)], dim=1) + positions
        return y if self.passage is None else self.passage.leave(y)


def _normal(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.normal_(whole)


def _zeros(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.zeros_(whole)


def _convolution(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5))


def _convolution_bias(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.uniform_(whole, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
