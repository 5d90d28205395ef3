"""Folding by ESMFold with a bound of its activations: `fold`.

Blocks of the trunk and the invariant point attention of the structure module hold the largest activations:
tensors of pairs with many channels. `autochunk` runs them in parts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from alphabet import encode
from torch import Tensor, nn
from torch.func import functional_call
from transformers import EsmForProteinFolding
from transformers.models.esm.openfold_utils import Rigid, Rotation

from colossalai.autochunk import autochunk
from colossalai.model_zoo.evoformer import FoldingBlock

LINKER, GAP_OF_CHAINS = "G" * 25, 512  # residues between chains, and the distance of their numbers


def features_of(sequence: str) -> dict[str, Tensor]:
    """Return the inputs of ESMFold for a sequence, or for the chains of a complex, separated by ':'.

    Chains are joined by a linker, with a gap of the numbers of residues, as ESMFold was made for one chain.

    Returns:
        `input_ids` and `position_ids`, (1, residues).
    """
    chains = sequence.split(":")
    numbers, begin = [], 0
    for chain in chains:
        length = len(chain) + (len(LINKER) if len(numbers) < len(chains) - 1 else 0)
        numbers.append(torch.arange(begin, begin + length))
        begin += length + GAP_OF_CHAINS
    return {"input_ids": encode(LINKER.join(chains))[None], "position_ids": torch.cat(numbers)[None]}


def chains_of(sequence: str) -> Tensor:
    """Return the index of the chain of each residue of `features_of`, (residues,); -1 in a linker."""
    linker = torch.full((len(LINKER),), -1)
    parts = [torch.full((len(chain),), index) for index, chain in enumerate(sequence.split(":"))]
    return torch.cat([each for part in parts for each in (linker, part)][1:])


@torch.no_grad()
def fold(
    model: EsmForProteinFolding,
    features: Mapping[str, Tensor],
    *,
    memory_budget: int | str | None = None,
    num_recycles: int | None = None,
) -> Any:
    """Predict the structure of a protein, with less memory.

    Args:
        model: A model after `inject_fastnn`, in evaluation mode. In tensor mode "dap" the ranks share pairs.
        features: Its inputs; see `features_of`.
        memory_budget: Largest number of live bytes of activations in a block of the trunk, and in the
            invariant point attention, such as "2 GB". Inputs of blocks and outputs of the model are not
            counted. Default: no bound.
        num_recycles: Number of times that the outputs of the trunk are fed back. Default: by the config.

    Returns:
        The output of the model.

    Raises:
        ValueError: The budget is too small, and the message has the smallest possible one; or `model` has
            blocks of transformers.
    """
    if not all(isinstance(block, FoldingBlock) for block in model.trunk.blocks):
        raise ValueError("the model has blocks of transformers: call inject_fastnn(model) before")
    if memory_budget is None:
        return model(**features, num_recycles=num_recycles)
    ids = features["input_ids"]
    mask = features.get("attention_mask")
    with chunked(model, torch.ones_like(ids) if mask is None else mask, memory_budget):
        return model(**features, num_recycles=num_recycles)


@contextmanager
def chunked(model: EsmForProteinFolding, mask: Tensor, memory_budget: int | str) -> Iterator[None]:
    """Replace the blocks and the attention of a model by chunked ones, for proteins of the shape of a mask.

    Args:
        model: The model; it is restored at the end.
        mask: The attention mask, (batch, residues).
        memory_budget: See `fold`.
    """
    trunk, structure = model.trunk, model.trunk.structure_module
    blocks, attention = trunk.blocks, structure.ipa
    chunked_kinds: dict[tuple[bool, bool], nn.Module] = {}

    def with_chunks(block: FoldingBlock) -> nn.Module:
        # Blocks of a kind have the same operations: one is traced, and computes with the parameters of all.
        kind = (block.is_first, block.is_last) if block.group.size > 1 else (True, True)
        if kind not in chunked_kinds:
            inputs = inputs_of_block(block, mask)
            chunked_kinds[kind] = autochunk(block, inputs, memory_budget=memory_budget, inplace=True)
        return BlockWithParameters(chunked_kinds[kind], block)

    try:
        trunk.blocks = nn.ModuleList([with_chunks(block) for block in blocks])
        structure.ipa = ChunkedAttention(attention, mask.shape, memory_budget)
        yield
    finally:
        trunk.blocks, structure.ipa = blocks, attention


def inputs_of_block(block: FoldingBlock, mask: Tensor) -> dict[str, Tensor]:
    """Return arguments of the shapes with which the trunk calls a block."""
    batch, length = mask.shape
    size = block.group.size
    padded = length if block.is_first else -(-length // size) * size
    rows = length if block.is_first else padded // size
    weight = block.pair_transition.norm.weight
    return {
        "sequence_state": weight.new_empty(batch, padded, block.config.sequence_state_dim),
        "pairwise_state": weight.new_empty(batch, rows, padded, block.config.pairwise_state_dim),
        "mask": mask,
    }


class BlockWithParameters(nn.Module):
    """A chunked block that computes with the parameters of another one of the same kind."""

    def __init__(self, chunked: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.chunked, self.block = chunked, block

    def forward(self, sequence: Tensor, pair: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return both representations after the block; a plan replaces the `chunk_size` of the trunk."""
        params = dict(self.block.named_parameters())
        output: tuple[Tensor, Tensor] = functional_call(self.chunked, params, (sequence, pair, mask))
        return output


class ChunkedAttention(nn.Module):
    """A chunked invariant point attention; frames enter the trace as two tensors."""

    def __init__(self, attention: nn.Module, shape: torch.Size, memory_budget: int | str) -> None:
        super().__init__()
        weight = attention.linear_q.weight
        batch, length = shape
        inputs = (
            weight.new_empty(batch, length, attention.linear_q.in_features),
            weight.new_empty(batch, length, length, attention.linear_b.in_features),
            # Frames and masks are in float32 for each dtype of the model.
            torch.empty(batch, length, 3, 3, device=weight.device),
            torch.empty(batch, length, 3, device=weight.device),
            torch.empty(batch, length, device=weight.device),
        )
        self.chunked = autochunk(
            AttentionOfTensors(attention).train(attention.training),
            inputs,
            memory_budget=memory_budget,
            inplace=True,
        )

    def forward(self, sequence: Tensor, pair: Tensor, frames: Rigid, mask: Tensor, **options: Any) -> Tensor:
        """Return the update of the sequence."""
        rotations = frames.get_rots().get_rot_mats()
        output: Tensor = self.chunked(sequence, pair, rotations, frames.get_trans(), mask)
        return output


class AttentionOfTensors(nn.Module):
    """An invariant point attention whose frames are rotations and translations."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, sequence: Tensor, pair: Tensor, rotations: Tensor, shifts: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the update of the sequence."""
        frames = Rigid(Rotation(rot_mats=rotations), shifts)
        output: Tensor = self.attention(sequence, pair, frames, mask)
        return output
