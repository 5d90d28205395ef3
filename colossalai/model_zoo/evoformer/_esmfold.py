"""ESMFold's trunk with axial layers: `inject_fastnn` replaces the blocks of a model of transformers in place.

A block of ESMFold (Lin et al., Science 379, 2023) is one of the Evoformer for a single sequence: attention
along it with a bias from pairs, an outer product and an outer difference instead of the outer product mean,
and the same triangle updates.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.communication import slice_of
from colossalai.nn.layer.axial import (
    AxialModule,
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
    blocks are made afterwards. In tensor mode "dap" the ranks share the pairs within the trunk, which takes
    and returns whole ones.

    Args:
        model: A `transformers.EsmForProteinFolding`, or its trunk; it is changed in place.

    Returns:
        `model`.

    Raises:
        ValueError: `model` has no block of ESMFold, or one with other parameters, or has one twice in tensor
            mode "dap"; no block is replaced.
    """
    blocks = list(_blocks(model, _BLOCK))
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no {_BLOCK}: inject_fastnn replaces these blocks of a "
            "transformers.EsmForProteinFolding, once"
        )
    if dap_group().size > 1 and len({stack[i] for stack, i in blocks}) < len(blocks):
        raise ValueError(
            "a trunk has a block twice; in tensor mode 'dap' its first and last block differ from the others"
        )
    _replace(blocks, FoldingBlock.from_transformers)
    # Pairs are cut in the first block and gathered in the last one; the trunk passes slices on in between.
    for stack in {stack: None for stack, _ in blocks}:
        members: list[Any] = list(stack)
        for block in members:
            block.is_first, block.is_last = block is members[0], block is members[-1]
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


class SequenceToPair(AxialModule):
    """Pairs by the product and the difference of projections of their residues.

    Under DAP with p ranks, the sequence is whole on each, and the result has n/p rows. The backward sends
    3 (p - 1)/p batch * n * hidden_dim elements.

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
        # Rows of pairs are cut, so a rank takes its part of one operand, and the whole other one.
        first = self.group.replicate(first).unsqueeze(1)
        second = self.group.scatter(second, 1).unsqueeze(2)  # of the rows of this rank
        pair: Tensor = self.out(torch.cat([first * second, first - second], -1))
        return pair


class FoldingBlock(AxialModule):
    """A block of ESMFold's trunk.

    Under DAP with p ranks, pairs have n/p rows between blocks, and the sequence is whole on each rank. Masks
    are whole. For pairs of z bytes, a block sends in each direction 2 (p - 1)/p z/p bytes to exchange rows
    and columns, and the bytes of its layers. The first block cuts pairs, and the last one gathers them,
    (p - 1)/p z each; sizes that p does not divide are padded in between.

    Attributes:
        is_first: Whether pairs come whole, as into the first block of a trunk.
        is_last: Whether pairs are returned whole, as by the last block.

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
        self.config = config
        self.is_first = self.is_last = True
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
        self.pair_dropout = SharedDropout(config.dropout, None, cut_dim=1)
        self.start_dropout = SharedDropout(2 * config.dropout, 2, cut_dim=1)
        self.end_dropout = SharedDropout(2 * config.dropout, 1)
        self.column_dropout = SharedDropout(2 * config.dropout, 1, cut_dim=2)

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
            pairwise_state: (batch, n, n, pairwise_state_dim); of a block that is not the first one the
                results of the block before.
            mask: (batch, n): residues that exist.
            chunk_size: Number of residues whose pairs triangle attention computes at a time. Default: all.
            residue_index: (batch, n); the trunk passes it, and no layer of a block depends on it.

        Returns:
            Tensors of the shapes of both; of a block that is not the last one padded and, of pairs, a slice
            of rows.

        Raises:
            ValueError: The first of several blocks is given no mask, and the ranks do not divide n.
        """
        group, sequence, pair = self.group, sequence_state, pairwise_state
        length = sequence.shape[1] if mask is None else mask.shape[1]
        if self.is_first:
            if mask is None and length % group.size:
                if not self.is_last:
                    raise ValueError(
                        f"{group.size} ranks pad {length} residues, which all blocks mask: pass a mask"
                    )
                mask = sequence.new_ones(sequence.shape[:2])
            sequence = group.pad(sequence, (1,))
            pair = group.scatter(group.pad(pair, (1, 2)), 1)
        # From here, each rank has the whole sequence and a slice of the rows of pairs.
        residues, pair_rows, pair_columns = self._padded_masks(mask)
        # Biases are gathered, so all ranks compute the same sequence.
        update = self.sequence_attention(sequence.unsqueeze(1), pair, residues).squeeze(1)
        sequence = sequence + self.dropout(update)
        sequence = sequence + self.dropout(self.sequence_transition(sequence))

        pair = pair + self.sequence_to_pair(sequence)
        pair = pair + self.start_dropout(self.outgoing(pair, pair_rows))
        pair = pair + self.end_dropout(self.incoming(pair, pair_rows))
        pair = pair + self.start_dropout(self.starting(pair, pair_rows, chunk_size))
        # Pairs that end in one residue are a column, which must be whole on a rank.
        pair = group.to_columns(pair)
        pair = pair + self.column_dropout(self.ending(pair, pair_columns, chunk_size))
        pair = group.to_rows(pair)
        pair = pair + self.pair_dropout(self.pair_transition(pair))
        if self.is_last:
            pair = group.gather(pair, 1)
            if sequence.shape[1] != length:  # padded
                sequence, pair = sequence[:, :length], pair[:, :length, :length]
        return sequence, pair

    def _padded_masks(self, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the masks of the sequence, and of this rank's rows and columns of pairs; -1 for padding."""
        if mask is None:
            return None, None, None
        if mask.dtype == torch.bool and self.group.size > 1:
            mask = mask.to(torch.int8)
        mask = self.group.pad(mask, (1,), -1)
        own = mask if self.group.size == 1 else slice_of(mask, self.group.axis, 1)
        # A pair is padding if one of its residues is; else it exists if both do.
        rows = torch.minimum(own.unsqueeze(2), mask.unsqueeze(1))
        columns = rows if self.group.size == 1 else rows.transpose(1, 2)
        return mask.unsqueeze(1), rows, columns


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
