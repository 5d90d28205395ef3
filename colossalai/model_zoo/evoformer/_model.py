"""The Evoformer (Jumper et al., Nature 596, 2021, supplement 1.6; algorithm 6).

msa += row attention(msa, pair);  msa += column attention(msa);  msa += transition(msa)
pair += outer product mean(msa);  pair += triangle updates(pair);  pair += transition(pair)
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.nn.layer.axial import (
    AxialModule,
    ColumnAttention,
    GlobalColumnAttention,
    OuterProductMean,
    RowAttention,
    SharedDropout,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    check_shape,
)


@dataclass(frozen=True)
class EvoformerConfig:
    """The shape of an Evoformer; defaults are those of AlphaFold 2.

    Attributes:
        c_m: Width of the alignment.
        c_z: Width of the pairs.
        num_blocks: Number of blocks.
        msa_heads: Number of heads of the attention of the alignment.
        msa_head_dim: Width of these heads.
        pair_heads: Number of heads of the attention of pairs.
        pair_head_dim: Width of these heads.
        outer_dim: Width of the projections of the outer product mean.
        triangle_dim: Width of the projections of triangle multiplications.
        transition_factor: Width of the hidden layers of transitions, in units of their inputs.
        msa_dropout: Probability of dropout of the alignment.
        pair_dropout: Probability of dropout of the pairs.
        is_global: Whether columns have global attention, as in the stack of extra sequences.
        is_multimer: Whether a block begins with the outer product mean, as in AlphaFold-Multimer.

    Raises:
        ValueError: A width or a number is not positive.
    """

    c_m: int = 256
    c_z: int = 128
    num_blocks: int = 48
    msa_heads: int = 8
    msa_head_dim: int = 32
    pair_heads: int = 4
    pair_head_dim: int = 32
    outer_dim: int = 32
    triangle_dim: int = 128
    transition_factor: int = 4
    msa_dropout: float = 0.15
    pair_dropout: float = 0.25
    is_global: bool = False
    is_multimer: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (0 if field.name == "num_blocks" else 1):
                raise ValueError(f"{field.name} is {value}; it must be positive")


class EvoformerBlock(AxialModule):
    """A block of the Evoformer.

    Under DAP with p ranks, the alignment has sequences/p rows between blocks (is_multimer: residues/p
    columns), and pairs have residues/p rows. Masks are whole.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        c_m, c_z = config.c_m, config.c_z
        self.is_multimer = config.is_multimer
        of_columns = GlobalColumnAttention if config.is_global else ColumnAttention
        self.row_attention = RowAttention(c_m, config.msa_heads, config.msa_head_dim, c_z)
        self.column_attention = of_columns(c_m, config.msa_heads, config.msa_head_dim)
        self.msa_transition = Transition(c_m, config.transition_factor)
        self.outer_product_mean = OuterProductMean(c_m, c_z, config.outer_dim)
        self.outgoing = TriangleMultiplication(c_z, config.triangle_dim, outgoing=True)
        self.incoming = TriangleMultiplication(c_z, config.triangle_dim, outgoing=False)
        self.starting = TriangleAttention(c_z, config.pair_heads, config.pair_head_dim, starting=True)
        self.ending = TriangleAttention(c_z, config.pair_heads, config.pair_head_dim, starting=False)
        self.pair_transition = Transition(c_z, config.transition_factor)
        self.msa_dropout = SharedDropout(config.msa_dropout, 1)
        self.row_dropout = SharedDropout(config.pair_dropout, 1)
        self.column_dropout = SharedDropout(config.pair_dropout, 2)

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both representations after the block; see `Evoformer.forward`."""
        # Pairs enter the alignment as a bias of its rows, and the alignment enters pairs by the outer product
        # mean: after its update, or before it in a multimer, where both updates can run at the same time.
        # Under DAP, rows of the alignment arrive while pairs are updated.
        group = self.group
        msa_rows, msa_columns = group.part(msa_mask, 1), group.part(msa_mask, 2)
        pair_rows, pair_columns = group.part(pair_mask, 1), group.part(pair_mask, 2)
        if self.is_multimer:
            rows_of_msa = group.to_rows_async(msa)
            pair = pair + self.outer_product_mean(msa, msa_columns)
            msa = rows_of_msa.wait()
        msa = msa + self.msa_dropout(self.row_attention(msa, pair, msa_rows))
        msa = group.to_columns(msa)
        msa = msa + self.column_attention(msa, msa_columns)
        msa = msa + self.msa_transition(msa)
        if not self.is_multimer:
            rows_of_msa = group.to_rows_async(msa)
            pair = pair + self.outer_product_mean(msa, msa_columns)
        # Each edge of a triangle is updated by its two others.
        pair = pair + self.row_dropout(self.outgoing(pair, pair_rows))
        pair = pair + self.row_dropout(self.incoming(pair, pair_rows))
        pair = pair + self.row_dropout(self.starting(pair, pair_rows))
        pair = group.to_columns(pair)
        pair = pair + self.column_dropout(self.ending(pair, pair_columns))
        pair = pair + self.pair_transition(pair)
        if not self.is_multimer:
            msa = rows_of_msa.wait()
        return msa, group.to_rows(pair)


class Evoformer(AxialModule):
    """The blocks of an Evoformer.

    Under DAP with p ranks, each has 1/p of both representations from the first to the last block. For
    alignments of s bytes and pairs of z bytes, a block sends in each direction (p - 1)/p (2 (s + z) / p) for
    the exchanges of rows and columns, and the bytes of its layers; the ends of the stack send (p - 1)/p
    (s + z) each. Sizes that p does not divide are padded once, and masked.

    Args:
        config: The shape of the model. Default: that of AlphaFold 2.
        options: Values of `EvoformerConfig` in the place of those of `config`.
    """

    def __init__(self, config: EvoformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        self.config = replace(config or EvoformerConfig(), **options)
        self.blocks = nn.ModuleList(EvoformerBlock(self.config) for _ in range(self.config.num_blocks))

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both representations after all blocks.

        Args:
            msa: The alignment, (batch, sequences, residues, c_m).
            pair: The pairs, (batch, residues, residues, c_z).
            msa_mask: (batch, sequences, residues): positions that exist.
            pair_mask: (batch, residues, residues): pairs that exist.

        Returns:
            Tensors of the shapes of `msa` and `pair`.

        Raises:
            ValueError: The shapes of `msa`, `pair` and masks differ from these.
        """
        check_shape("msa", msa, ("batch", "sequences", "residues", self.config.c_m))
        batch, _, n, _ = msa.shape
        check_shape("pair", pair, (batch, n, n, self.config.c_z))
        check_shape("msa_mask", msa_mask, msa.shape[:-1])
        check_shape("pair_mask", pair_mask, (batch, n, n))
        group, cut = self.group, 2 if self.config.is_multimer else 1
        num_sequences = msa.shape[1]
        msa_mask, pair_mask = (self._padded_mask(mask, x) for mask, x in ((msa_mask, msa), (pair_mask, pair)))
        msa = group.scatter(group.pad(msa, (1, 2)), cut)
        pair = group.scatter(group.pad(pair, (1, 2)), 1)
        for block in self.blocks:
            msa, pair = block(msa, pair, msa_mask, pair_mask)
        msa, pair = group.gather(msa, cut), group.gather(pair, 1)
        return msa[:, :num_sequences, :n], pair[:, :n, :n]

    def _padded_mask(self, mask: Tensor | None, x: Tensor) -> Tensor | None:
        """Return the mask of a representation after `DapGroup.pad`, which needs one if it adds positions."""
        if not any(size % self.group.size for size in x.shape[1:3]):
            return mask
        exists = torch.ones(x.shape[:-1], dtype=torch.int8, device=x.device) if mask is None else mask
        return self.group.pad(exists.to(torch.int8) if exists.dtype == torch.bool else exists, (1, 2), -1)
