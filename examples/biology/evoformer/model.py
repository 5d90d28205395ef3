"""A model of contacts: the embeddings, both stacks and the recycling of AlphaFold 2, and two heads.

The names of the algorithms are those of its supplement (Jumper et al., Nature 596, 2021).
"""

from collections.abc import Mapping
from typing import Any

import torch
from alphabet import NUM_LETTERS
from torch import Tensor, nn

from colossalai.model_zoo.evoformer import Evoformer

FARTHEST = 32  # greatest distance in the sequence with an embedding of its own


class ContactModel(nn.Module):
    """Contact logits of pairs of residues, and logits of masked letters.

    Args:
        c_m: Width of the alignment.
        c_z: Width of the pairs.
        c_e: Width of the alignment of extra sequences.
        num_clusters: Number of sequences in the main stack; the others are extra sequences.
        num_blocks: Number of blocks of the main stack.
        num_extra_blocks: Number of blocks of the stack of extra sequences.
        num_recycles: Number of passes whose outputs are fed back, before the pass with gradients.
        main: Further options of the main stack; see `EvoformerConfig`.
        extra: Further options of the stack of extra sequences.
    """

    def __init__(
        self,
        *,
        c_m: int,
        c_z: int,
        c_e: int,
        num_clusters: int,
        num_blocks: int,
        num_extra_blocks: int,
        num_recycles: int,
        main: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.num_clusters, self.num_recycles = num_clusters, num_recycles
        self.letter = nn.Embedding(NUM_LETTERS, c_m)
        self.extra_letter = nn.Embedding(NUM_LETTERS, c_e)
        self.query = nn.Embedding(NUM_LETTERS, c_m)
        self.left = nn.Embedding(NUM_LETTERS, c_z)
        self.right = nn.Embedding(NUM_LETTERS, c_z)
        self.distance = nn.Embedding(2 * FARTHEST + 1, c_z)
        self.recycled_query = nn.LayerNorm(c_m)
        self.recycled_pair = nn.LayerNorm(c_z)
        self.extra_stack = Evoformer(c_m=c_e, c_z=c_z, num_blocks=num_extra_blocks, is_global=True, **extra)
        self.evoformer = Evoformer(c_m=c_m, c_z=c_z, num_blocks=num_blocks, **main)
        self.letter_head = nn.Linear(c_m, NUM_LETTERS)
        self.contact_head = nn.Linear(c_z, 1)

    def forward(self, inputs: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Return contact logits and letter logits.

        Args:
            inputs: (batch, sequences, residues), int64; more than `num_clusters` sequences.
            exists: (batch, sequences, residues), bool: False for padding.

        Returns:
            (batch, residues, residues), symmetric, and (batch, clusters, residues, letters).
        """
        batch, _, num_residues = inputs.shape
        weight = self.contact_head.weight
        query = weight.new_zeros(batch, num_residues, self.letter.embedding_dim)
        pair = weight.new_zeros(batch, num_residues, num_residues, self.distance.embedding_dim)
        with torch.no_grad():
            for _ in range(self.num_recycles):
                msa, pair = self.stacks(inputs, exists, query, pair)
                query = msa[:, 0]
        msa, pair = self.stacks(inputs, exists, query, pair)
        contacts = self.contact_head(pair + pair.transpose(1, 2)).squeeze(-1)
        return contacts, self.letter_head(msa)

    def stacks(self, inputs: Tensor, exists: Tensor, query: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Return alignment and pairs after both stacks.

        Args:
            inputs: (batch, sequences, residues).
            exists: (batch, sequences, residues).
            query: Recycled first sequence of the alignment, (batch, residues, c_m); zeros at first.
            pair: Recycled pairs, (batch, residues, residues, c_z); zeros at first.
        """
        first = inputs[:, 0]
        positions = torch.arange(inputs.shape[2], device=inputs.device)
        distances = (positions[:, None] - positions).clamp(-FARTHEST, FARTHEST) + FARTHEST
        pair = self.recycled_pair(pair) + self.distance(distances)
        pair = pair + self.left(first).unsqueeze(2) + self.right(first).unsqueeze(1)
        pair_exists = exists[:, 0, :, None] & exists[:, 0, None, :]

        num = self.num_clusters
        extra = self.extra_letter(inputs[:, num:])
        _, pair = self.extra_stack(extra, pair, exists[:, num:], pair_exists)
        msa = self.letter(inputs[:, :num]) + self.query(first).unsqueeze(1)
        msa = torch.cat([msa[:, :1] + self.recycled_query(query).unsqueeze(1), msa[:, 1:]], 1)
        msa, pair = self.evoformer(msa, pair, exists[:, :num], pair_exists)
        return msa, pair
