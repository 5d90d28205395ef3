"""A small language model with axial layers, for tests that give ids to a model."""

import torch
from torch import Tensor, nn

from colossalai.model_zoo.evoformer import Evoformer, EvoformerConfig

SHAPE = EvoformerConfig(
    c_m=16,
    c_z=8,
    num_blocks=2,
    msa_heads=2,
    msa_head_dim=4,
    pair_heads=2,
    pair_head_dim=4,
    outer_dim=4,
    triangle_dim=8,
    msa_dropout=0.0,
    pair_dropout=0.0,
)


class AxialLM(nn.Module):
    """Logits of ids by an Evoformer, whose alignment has a sequence and its reverse.

    Args:
        vocab: Number of ids.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, SHAPE.c_m)
        self.evoformer = Evoformer(SHAPE)
        self.head = nn.Linear(SHAPE.c_m + SHAPE.c_z, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (batch, seq, vocab) of (batch, seq)."""
        x = self.embedding(ids)
        pair = x.unsqueeze(1)[..., : SHAPE.c_z] * x.unsqueeze(2)[..., : SHAPE.c_z]
        msa, pair = self.evoformer(torch.stack([x, x.flip(1)], 1), pair)
        logits: Tensor = self.head(torch.cat([msa[:, 0], pair.mean(2)], -1))
        return logits


def axial_lm(vocab: int) -> AxialLM:
    """Return a model in which all layers have an effect; new blocks are the identity."""
    model = AxialLM(vocab)
    for param in model.evoformer.parameters():
        nn.init.normal_(param, std=0.2)
    return model
