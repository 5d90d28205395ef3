"""Formulas for the bytes that a rank holds in training.

Parameters, gradients and optimizer states: Rajbhandari et al., "ZeRO" (1910.02054), section 3 and figure 1.
Activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198),
section 4. Its 34 bytes for each token and channel of a block, at 16 bits, are split up here, so that they
also hold for other precisions, widths and rates:

    2 r        inputs of the two layer norms                4
    2 e        inputs of qkv and of the expansion           4
    d          two dropout masks of one byte            2
    4 e / t    q, k, v, and the input of the projection     8
    2 f e / t  input and output of the activation          16

The paper's term of attention weights, 5 a s / h = (2 e + c) a s / h, is there if they are written out; fused
attention keeps none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

ADAM_BYTES = 8
"""Two moments of float32 for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Storage of a precision: bytes of each number.

    Attributes:
        weight: A parameter in the model.
        grad: Its gradient in the model.
        master: Its float32 copy in the optimizer.
        cast: Its 16-bit copy by autocast, for matrices.
        state: Its optimizer states: two moments of float32, with Adam.
        element: An element of an activation.
        residual: An element of the residual stream, the input of the layer norms.
    """

    weight: int
    grad: int
    master: int = 0
    cast: int = 0
    state: int = ADAM_BYTES
    element: int
    residual: int


_AUTOCAST = Storage(weight=4, grad=4, cast=2, element=2, residual=4)
_MASTERS = Storage(weight=2, grad=2, master=4, element=2, residual=2)
STORAGE: Mapping[str, Storage] = {
    "fp32": Storage(weight=4, grad=4, element=4, residual=4),
    "bf16": _AUTOCAST,
    "fp16": _AUTOCAST,
    "bf16_master": _MASTERS,
    "fp16_naive": _MASTERS,
}
"""Storage by the names of `Booster(mixed_precision=...)`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kind of memory.

    Attributes:
        name: Name of the kind.
        num_bytes: Number of bytes.
        formula: Formula with the symbols of `SYMBOLS`.
        numbers: The same with numbers instead of the symbols.
    """

    name: str
    num_bytes: int
    formula: str
    numbers: str


SYMBOLS: Mapping[str, str] = {
    "P": "parameters of a rank: its share by tensors (tp) and layers (pp)",
    "F": "those of a rank that are not trained",
    "C": "elements of the two largest chunks, which are whole while they are used",
    "M": "those of them that are matrices",
    "N": "data-parallel ranks (dp)",
    "k": "elements of keys and values of a token",
    "L": "blocks of a rank",
    "m": "microbatches that are in flight",
    "s": "sequence",
    "b": "batch",
    "h": "hidden size",
    "a": "attention heads",
    "f": "width of the feed-forward layer over h",
    "v": "outputs of a token (vocabulary) or a sample (classes)",
    "t": "tensor-parallel ranks (tp)",
    "e": "bytes of an element of an activation",
    "r": "bytes of an element of the residual stream",
    "d": "bytes of the two dropout masks of a block",
    "c": "bytes of the mask of the attention weights",
}
"""Meanings of the letters in the formulas."""


def state_bytes(num_params: int, storage: Storage, *, dp: int, zero: int) -> dict[str, int]:
    """Return the bytes that a rank holds of parameters, gradients, master weights and Adam's states.

    Args:
        num_params: Parameters of the rank before ZeRO cuts them.
        storage: Storage of the precision.
        dp: Number of data-parallel ranks.
        zero: Stage of ZeRO; 1 cuts masters and states over `dp`, 2 also gradients, 3 also parameters.
    """
    return {row.name: row.num_bytes for row in state_rows(num_params, storage, dp=dp, zero=zero)}


def state_rows(num_params: int, storage: Storage, *, dp: int, zero: int) -> list[Row]:
    """Return the rows of `state_bytes`; rows without bytes are left out."""
    kinds = (
        ("parameters", storage.weight, zero >= 3),
        ("gradients", storage.grad, zero >= 2),
        ("master weights", storage.master, zero >= 1),
        ("optimizer states", storage.state, zero >= 1),
    )
    rows = []
    for name, size, is_cut in kinds:
        if size > 0:
            formula = f"{size} * P / N" if is_cut else f"{size} * P"
            num_bytes = round(size * num_params / (dp if is_cut else 1))
            rows.append(_row(name, formula, num_bytes, P=num_params, N=dp))
    return rows


def frozen_row(num_params: int, storage: Storage, *, dp: int, zero: int) -> Row:
    """Return the row of frozen parameters; stage 3 of ZeRO cuts them like the others."""
    formula = f"{storage.weight} * F / N" if zero >= 3 else f"{storage.weight} * F"
    num_bytes = round(storage.weight * num_params / (dp if zero >= 3 else 1))
    return _row("frozen parameters", formula, num_bytes, F=num_params, N=dp)


def gathered_row(num_elements: int, storage: Storage) -> Row:
    """Return the row of the chunks that are gathered at a time (Gemini)."""
    size = storage.weight * num_elements
    return _row("gathered chunks", f"{storage.weight} * C", size, C=num_elements)


SPARE_TOKENS = 64
"""Tokens of a cache of keys and values in addition to those of all answers: blocks that are not full."""


def cache_row(per_token: int, *, itemsize: int, answers: int, tokens: int) -> Row:
    """Return the row of the cache of keys and values of an engine that generates answers.

    Args:
        per_token: Elements of keys and values of a token, in all layers.
        itemsize: Bytes of an element.
        answers: Number of answers at a time.
        tokens: Largest number of tokens of a prompt and its answer.
    """
    size = itemsize * per_token * answers * (tokens + SPARE_TOKENS)
    formula = f"{itemsize} * k * b * (s + {SPARE_TOKENS})"
    return _row("keys and values", formula, size, k=per_token, b=answers, s=tokens)


def float32_grads_row(num_params: int, *, is_copied: bool) -> Row:
    """Return the row of gradients of masters beyond those of the model, without ZeRO.

    Args:
        num_params: Parameters of the rank.
        is_copied: Whether float32 copies are made before the step, since torch's `DistributedDataParallel`
            reduces gradients of 16 bits; otherwise gradients accumulate in float32.
    """
    size = 4 if is_copied else 2
    return _row("gradients in float32", f"{size} * P", size * num_params, P=num_params)


@dataclass(frozen=True, kw_only=True)
class BlockExtents:
    """Extents of the tensors in a transformer block.

    Attributes:
        seq: Length of the sequence.
        batch: Number of sequences.
        hidden: Width of the residual stream.
        heads: Number of attention heads.
        inner: Width of the feed-forward layer.
        has_dropout: Whether there is dropout after the attention and the feed-forward layer.
        has_attention_dropout: Whether there is dropout on the attention weights.
        has_scores: Whether the attention weights are written out, instead of a fused attention.
    """

    seq: int
    batch: int
    hidden: int
    heads: int
    inner: int
    has_dropout: bool = True
    has_attention_dropout: bool = True
    has_scores: bool = False


def block_bytes(block: BlockExtents, storage: Storage, *, tp: int = 1) -> int:
    """Return the bytes of activations that a block keeps for its backward on each tensor-parallel rank."""
    e, r = storage.element, storage.residual
    d = 2 * block.has_dropout
    tokens = block.seq * block.batch
    channels = 2 * r + 2 * e + d + (4 * e + 2 * e * block.inner / block.hidden) / tp
    total = tokens * block.hidden * channels
    if block.has_scores:
        total += (2 * e + block.has_attention_dropout) * block.heads * block.seq * tokens / tp
    return round(total)


def block_rows(
    block: BlockExtents, storage: Storage, *, num_blocks: int, num_live: int, tp: int, recompute: bool
) -> list[Row]:
    """Return the rows of the activations of a rank's blocks.

    Args:
        block: Extents of a block.
        storage: Storage of the precision.
        num_blocks: Number of blocks of the rank.
        num_live: Number of microbatches in flight.
        tp: Number of tensor-parallel ranks.
        recompute: Whether only the input of each block is kept, and one block at a time is recomputed.
    """
    values = {
        **{"L": num_blocks, "m": num_live, "s": block.seq, "b": block.batch, "h": block.hidden},
        **{"a": block.heads, "f": block.inner / block.hidden, "t": tp, "e": storage.element},
        **{"r": storage.residual, "d": 2 * block.has_dropout, "c": int(block.has_attention_dropout)},
    }
    one = "s * b * h * (2 * r + 2 * e + d + (4 * e + 2 * f * e) / t)"
    if block.has_scores:
        one += " + (2 * e + c) * a * s * s * b / t"
    size = block_bytes(block, storage, tp=tp)
    if not recompute:
        return [_row("activations of blocks", f"L * m * ({one})", num_blocks * num_live * size, **values)]
    inputs = num_blocks * num_live * block.seq * block.batch * block.hidden * storage.residual
    return [
        _row("inputs of blocks", "L * m * s * b * h * r", inputs, **values),
        _row("the block that is recomputed", one, size, **values),
    ]


def embedding_row(block: BlockExtents, *, num_live: int) -> Row:
    """Return the row of the dropout mask after the embedding."""
    size = num_live * block.seq * block.batch * block.hidden
    return _row(
        "dropout of the embedding", "m * s * b * h", size,
        m=num_live, s=block.seq, b=block.batch, h=block.hidden,
    )  # fmt: skip


def output_row(block: BlockExtents, storage: Storage, *, num_outputs: int, per_token: bool, tp: int) -> Row:
    """Return the row of the inputs of the last norm and the head, and the loss's float32 outputs."""
    tokens = block.seq * block.batch
    num_outs = tokens if per_token else block.batch
    size = tokens * block.hidden * (storage.residual + storage.element)
    formula = (
        "s * b * h * (r + e) + 4 * s * b * v / t" if per_token else "s * b * h * (r + e) + 4 * b * v / t"
    )
    return _row(
        "norm, head and loss", formula, round(size + 4 * num_outs * num_outputs / tp),
        s=block.seq, b=block.batch, h=block.hidden, r=storage.residual, e=storage.element,
        v=num_outputs, t=tp,
    )  # fmt: skip


def cast_row(num_matrix_params: int, storage: Storage) -> Row:
    """Return the row of the copies of weights that autocast keeps from a forward to its backward."""
    size = storage.cast * num_matrix_params
    return _row("weights cast by autocast", f"{storage.cast} * M", size, M=num_matrix_params)


def _row(name: str, formula: str, num_bytes: int, **values: float) -> Row:
    numbers = re.sub(r"[A-Za-z]+", lambda match: f"{values[match[0]]:.12g}", formula)
    return Row(name=name, num_bytes=num_bytes, formula=formula, numbers=numbers)
