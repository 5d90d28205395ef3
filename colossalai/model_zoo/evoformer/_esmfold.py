"""ESMFold's trunk with axial layers: `inject_fastnn` replaces the blocks of a model of transformers in place.

A block of ESMFold (Lin et al., Science 379, 2023) is one of the Evoformer for a single sequence: attention
along it with a bias from pairs, an outer product and an outer difference instead of the outer product mean,
and the same triangle updates.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.nn.layer.axial import (
    RowAttention,
    SharedDropout,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    dap_group,
)

_BLOCK = "EsmFoldTriangularSelfAttentionBlock"  # of transformers.models.esm.modeling_esmfold

# Layers here, and in a block of transformers; the projection of queries, keys and values there is one layer.
_PROJECTION = "seq_attention.proj.weight"
_LAYERS = {
    "sequence_attention.norm": "layernorm_1",
    "sequence_attention.attention.gate": "seq_attention.g_proj",
    "sequence_attention.attention.out": "seq_attention.o_proj",
    "sequence_attention.pair_norm": "pair_to_sequence.layernorm",
    "sequence_attention.pair_bias": "pair_to_sequence.linear",
    "sequence_transition.norm": "mlp_seq.mlp.0",
    "sequence_transition.hidden": "mlp_seq.mlp.1",
    "sequence_transition.out": "mlp_seq.mlp.3",
    "sequence_to_pair.norm": "sequence_to_pair.layernorm",
    "sequence_to_pair.projection": "sequence_to_pair.proj",
    "sequence_to_pair.out": "sequence_to_pair.o_proj",
    "pair_transition.norm": "mlp_pair.mlp.0",
    "pair_transition.hidden": "mlp_pair.mlp.1",
    "pair_transition.out": "mlp_pair.mlp.3",
    **{
        f"{own}.{layer}": f"{other}.{name}"
        for own, other in (("outgoing", "tri_mul_out"), ("incoming", "tri_mul_in"))
        for layer, name in (
            ("norm", "layer_norm_in"),
            ("left", "linear_a_p"),
            ("left_gate", "linear_a_g"),
            ("right", "linear_b_p"),
            ("right_gate", "linear_b_g"),
            ("product_norm", "layer_norm_out"),
            ("out", "linear_z"),
            ("gate", "linear_g"),
        )
    },
    **{
        f"{own}.{layer}": f"{other}.{name}"
        for own, other in (("starting", "tri_att_start"), ("ending", "tri_att_end"))
        for layer, name in (
            ("norm", "layer_norm"),
            ("bias", "linear"),
            ("attention.query", "mha.linear_q"),
            ("attention.key", "mha.linear_k"),
            ("attention.value", "mha.linear_v"),
            ("attention.gate", "mha.linear_g"),
            ("attention.out", "mha.linear_o"),
        )
    },
}


def inject_fastnn(model: nn.Module) -> nn.Module:
    """Replace the blocks of the trunk of transformers' ESMFold by `FoldingBlock`, with the same weights.

    Outputs of residues that exist are equal up to rounding, and the names of the parameters are new: load
    weights before, and call `remove_fastnn` before `save_pretrained`. Optimizers, adapters and hooks of
    blocks are made afterwards.

    Args:
        model: A `transformers.EsmForProteinFolding`, or its trunk; it is changed in place.

    Returns:
        `model`.

    Raises:
        ValueError: `model` has no block of ESMFold, or one with other parameters; no block is replaced.
    """
    blocks = list(_blocks(model, _BLOCK))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no {_BLOCK}: inject_fastnn replaces these blocks of a "
            "transformers.EsmForProteinFolding, once"
        )
    _replace(blocks, FoldingBlock.from_transformers)
    return model


def remove_fastnn(model: nn.Module) -> nn.Module:
    """Replace the blocks of `inject_fastnn` by those of transformers, with the current parameters.

    Args:
        model: A model after `inject_fastnn`; it is changed in place.

    Returns:
        `model`.

    Raises:
        ValueError: `model` has no `FoldingBlock`, or one with other parameters; no block is replaced.
    """
    blocks = list(_blocks(model, FoldingBlock.__name__))
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no FoldingBlock: remove_fastnn follows inject_fastnn")
    _replace(blocks, FoldingBlock.to_transformers)
    return model


def _blocks(model: nn.Module, name: str) -> Iterator[tuple[nn.ModuleList, int]]:
    """Yield the lists and the indices of blocks of a class."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from ((module, i) for i, block in enumerate(module) if type(block).__name__ == name)


def _replace(blocks: Sequence[tuple[nn.ModuleList, int]], convert: Callable[[Any], nn.Module]) -> None:
    """Replace blocks by converted ones: all, or none if one cannot be converted."""
    converted = {block: convert(block) for block in {stack[i]: None for stack, i in blocks}}
    for stack, i in blocks:
        stack[i] = converted[stack[i]]


class SequenceToPair(nn.Module):
    """Pairs by the product and the difference of projections of their residues.

    Args:
        dim: Width of the sequence.
        hidden_dim: Width of both projections.
        pair_dim: Width of the outputs.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        pair_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.projection = nn.Linear(dim, 2 * hidden_dim, device=device, dtype=dtype)
        self.out = nn.Linear(2 * hidden_dim, pair_dim, device=device, dtype=dtype)
        nn.init.zeros_(self.projection.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the update of pairs, (batch, n, n, pair_dim), of a sequence (batch, n, dim)."""
        first, second = self.projection(self.norm(sequence)).chunk(2, -1)  # (batch, n, hidden_dim)
        first, second = first.unsqueeze(1), second.unsqueeze(2)
        pair: Tensor = self.out(torch.cat([first * second, first - second], -1))
        return pair


class FoldingBlock(nn.Module):
    """A block of ESMFold's trunk.

    Args:
        config: The shape, as a `transformers` config of the trunk of ESMFold: sequence_state_dim,
            pairwise_state_dim, sequence_head_width, pairwise_head_width and dropout are read.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    def __init__(
        self, config: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if dap_group().size > 1:
            raise ValueError(
                "ESMFold in tensor mode 'dap': its blocks work on whole activations; leave the mode out, or "
                "take an Evoformer"
            )
        self.config = config
        c_s, c_z = config.sequence_state_dim, config.pairwise_state_dim
        heads, pair_heads = c_s // config.sequence_head_width, c_z // config.pairwise_head_width
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sequence_attention = RowAttention(c_s, heads, config.sequence_head_width, c_z, **place)
        self.sequence_transition = Transition(c_s, **place)
        self.sequence_to_pair = SequenceToPair(c_s, c_z // 2, c_z, **place)
        self.outgoing = TriangleMultiplication(c_z, outgoing=True, **place)
        self.incoming = TriangleMultiplication(c_z, outgoing=False, **place)
        self.starting = TriangleAttention(c_z, pair_heads, config.pairwise_head_width, starting=True, **place)
        self.ending = TriangleAttention(c_z, pair_heads, config.pairwise_head_width, starting=False, **place)
        self.pair_transition = Transition(c_z, **place)
        self.dropout = nn.Dropout(config.dropout)
        self.start_dropout = SharedDropout(2 * config.dropout, 2)
        self.end_dropout = SharedDropout(2 * config.dropout, 1)

    @classmethod
    def from_transformers(cls, block: nn.Module) -> "FoldingBlock":
        """Return a block with the parameters of a block of transformers, in its mode.

        Raises:
            ValueError: `block` has parameters that ESMFold lacks, such as those of adapters.
        """
        own = cls(block.config, device="meta")  # gets no memory: each parameter is replaced
        theirs = dict(block.named_parameters())
        others = {f"{_LAYERS[layer]}.{kind}": (layer, kind) for layer, kind in _parameters_of(own)}
        if unknown := theirs.keys() ^ {*others, _PROJECTION}:
            raise ValueError(
                f"a block differs from ESMFold's in {_first_names(unknown)}: call inject_fastnn before "
                "adapters or quantization"
            )
        # The same objects, so that frozen parameters stay frozen and no weight is copied.
        for name, (layer, kind) in others.items():
            own.get_submodule(layer).register_parameter(kind, theirs[name])
        # The fused projection has the rows of a head next to each other: (heads, 3, head_dim, dim).
        attention, fused = own.sequence_attention.attention, theirs[_PROJECTION]
        parts = fused.detach().unflatten(0, (attention.num_heads, 3, -1)).unbind(1)
        for linear, part in zip((attention.query, attention.key, attention.value), parts, strict=True):
            linear.weight = nn.Parameter(part.flatten(0, 1).clone(), requires_grad=fused.requires_grad)
        return own.train(block.training)

    def to_transformers(self) -> nn.Module:
        """Return a block of transformers with the parameters of this one, in its mode.

        Raises:
            ValueError: The block has other parameters than a new one, such as those of adapters.
        """
        from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

        plain = FoldingBlock(self.config, device="meta")
        if unknown := {name for name, _ in self.named_parameters()} ^ {
            name for name, _ in plain.named_parameters()
        }:
            raise ValueError(
                f"a block has changed since inject_fastnn in {_first_names(unknown)}: merge adapters before "
                "remove_fastnn"
            )
        with torch.device("meta"):
            theirs: nn.Module = EsmFoldTriangularSelfAttentionBlock(self.config)
        for layer, kind in _parameters_of(self):
            param = self.get_submodule(layer).get_parameter(kind)
            theirs.get_submodule(_LAYERS[layer]).register_parameter(kind, param)
        attention = self.sequence_attention.attention
        linears = (attention.query, attention.key, attention.value)
        # One parameter again, which is trained if a part of it was.
        parts = [linear.weight.detach().unflatten(0, (attention.num_heads, -1)) for linear in linears]
        fused = nn.Parameter(
            torch.stack(parts, 1).flatten(0, 2),
            requires_grad=any(linear.weight.requires_grad for linear in linears),
        )
        layer, _, kind = _PROJECTION.rpartition(".")
        theirs.get_submodule(layer).register_parameter(kind, fused)
        return theirs.train(self.training)

    def forward(
        self,
        sequence_state: Tensor,
        pairwise_state: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        residue_index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return both representations after the block.

        Args:
            sequence_state: (batch, n, sequence_state_dim).
            pairwise_state: (batch, n, n, pairwise_state_dim).
            mask: (batch, n): residues that exist.
            chunk_size: Number of residues whose pairs triangle attention computes at a time. Default: all.
            residue_index: (batch, n); the trunk passes it, and no layer of a block depends on it.

        Returns:
            Tensors of the shapes of both.
        """
        rows = None if mask is None else mask.unsqueeze(1)
        update = self.sequence_attention(sequence_state.unsqueeze(1), pairwise_state, rows).squeeze(1)
        sequence = sequence_state + self.dropout(update)
        sequence = sequence + self.dropout(self.sequence_transition(sequence))

        pair_mask = None if mask is None else mask.unsqueeze(2) * mask.unsqueeze(1)
        pair = pairwise_state + self.sequence_to_pair(sequence)
        pair = pair + self.start_dropout(self.outgoing(pair, pair_mask))
        pair = pair + self.end_dropout(self.incoming(pair, pair_mask))
        pair = pair + self.start_dropout(self.starting(pair, pair_mask, chunk_size))
        pair = pair + self.end_dropout(self.ending(pair, pair_mask, chunk_size))
        return sequence, pair + self.dropout(self.pair_transition(pair))


def _parameters_of(block: FoldingBlock) -> Iterator[tuple[str, str]]:
    """Yield the layers and kinds of the parameters that a block of transformers has, too."""
    for name, _ in block.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer in _LAYERS:
            yield layer, kind


def _first_names(names: Collection[str]) -> str:
    """Return the first names as text."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
