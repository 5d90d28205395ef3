"""Memory of the fullest rank, by formulas for the shape of a model and the layout of the ranks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from colossalai.cli._memory._shape import ModelShape, ParamCount
from colossalai.nn.layer import VOCAB_PARALLEL_LIMIT
from colossalai.pipeline import partition_balanced
from colossalai.runtime import REFUSED
from colossalai.runtime.memory import (
    STORAGE,
    BlockExtents,
    Row,
    Storage,
    block_rows,
    cast_row,
    embedding_row,
    float32_grads_row,
    output_row,
    state_rows,
)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Training setup of a model.

    Attributes:
        dp: Number of data-parallel ranks.
        tp: Number of ranks that share a layer (mode 1d).
        pp: Number of pipeline ranks, with the schedule 1f1b.
        zero: Stage of ZeRO over the data-parallel ranks; 0: none.
        precision: A name of `STORAGE`.
        batch: Number of samples in a forward of a rank.
        seq: Length of the sequences.
        recompute: Whether blocks are recomputed in the backward.
        has_scores: Whether attention weights are materialized.
    """

    dp: int
    tp: int
    pp: int
    zero: int
    precision: str
    batch: int
    seq: int
    recompute: bool
    has_scores: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """Memory of the fullest rank.

    Attributes:
        shape: Shape of the model.
        job: Training setup.
        stage: Pipeline stage of the rank.
        states: Rows of the model states.
        activations: Rows of the memory between forward and backward.
    """

    shape: ModelShape
    job: TrainingSetup
    stage: int
    states: Sequence[Row]
    activations: Sequence[Row]

    @property
    def num_bytes(self) -> int:
        """Total number of bytes."""
        return total_of(self.states) + total_of(self.activations)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a dict for JSON."""
        return {
            "model": self.shape.name,
            "num_params": self.shape.num_params,
            **asdict(self.job),
            "stage": self.stage,
            "states": [asdict(row) for row in self.states],
            "activations": [asdict(row) for row in self.activations],
            "total_bytes": self.num_bytes,
        }


def total_of(rows: Sequence[Row]) -> int:
    """Return the sum of the bytes of rows."""
    return sum(row.num_bytes for row in rows)


def report_of(shape: ModelShape, job: TrainingSetup) -> Report:
    """Return the memory of the rank that needs most.

    Raises:
        ValueError: The precision is unknown, `pp` exceeds the blocks or excludes `zero`, `tp` does not divide
            the heads, or the model does not take `seq`.
    """
    check_job(shape, job)
    return max((_of_stage(shape, job, stage) for stage in range(job.pp)), key=lambda report: report.num_bytes)


def check_job(shape: ModelShape, job: TrainingSetup) -> None:
    """Validate a training setup as training itself does."""
    if job.precision not in STORAGE:
        raise ValueError(f"--precision {job.precision}: choose one of {', '.join(STORAGE)}")
    if job.pp > len(shape.blocks):
        raise ValueError(f"--pp {job.pp}: {shape.name} has {len(shape.blocks)} blocks only")
    if job.pp > 1 and job.zero > 1:
        reason = REFUSED[frozenset({"pipeline", f"ZeRO {job.zero}"})]
        raise ValueError(f"--pp {job.pp} and --zero {job.zero} cannot be combined: {reason}")
    if shape.heads % job.tp:
        raise ValueError(f"--tp {job.tp} does not divide the {shape.heads} attention heads of {shape.name}")
    if job.seq > shape.max_length:
        raise ValueError(f"--seq {job.seq}: {shape.name} takes at most {shape.max_length}")
    if shape.has_fixed_length and job.seq != shape.max_length:
        raise ValueError(
            f"--seq {job.seq}: {shape.name} takes images, of {shape.max_length} patches: leave it out"
        )


def _of_stage(shape: ModelShape, job: TrainingSetup, stage: int) -> Report:
    storage = STORAGE[job.precision]
    start, end = _blocks_of(shape, job.pp)[stage]
    is_first, is_last = stage == 0, stage == job.pp - 1
    held = sum(shape.blocks[start:end], ParamCount())
    if is_first:
        held += shape.first
    if is_last:
        held += shape.last if is_first else shape.last + shape.tied
    num_params = math.ceil(held.cut / job.tp) + held.whole
    states = state_rows(num_params, storage, dp=job.dp, zero=job.zero)
    if storage.master and job.zero == 0:
        states.insert(2, float32_grads_row(num_params, is_copied=job.dp > 1 and job.pp == 1))
    num_matrix_params = held.matrices - held.cut + math.ceil(held.cut / job.tp)
    activations = _activations(
        shape,
        job,
        storage,
        num_blocks=end - start,
        num_live=job.pp - stage,
        is_first=is_first,
        is_last=is_last,
    )
    if storage.cast:
        activations.insert(0, cast_row(num_matrix_params, storage))
    return Report(shape=shape, job=job, stage=stage, states=states, activations=activations)


def _blocks_of(shape: ModelShape, pp: int) -> list[tuple[int, int]]:
    """Return the blocks of each stage, balanced by parameters like the pipeline's stages."""
    weights = [block.cut + block.whole for block in shape.blocks]
    weights[0] += shape.first.cut + shape.first.whole
    weights[-1] += shape.last.cut + shape.last.whole
    return [parts[0] for parts in partition_balanced(weights, pp, 1)]


def _activations(
    shape: ModelShape,
    job: TrainingSetup,
    storage: Storage,
    *,
    num_blocks: int,
    num_live: int,
    is_first: bool,
    is_last: bool,
) -> list[Row]:
    block = BlockExtents(
        seq=job.seq,
        batch=job.batch,
        hidden=shape.hidden,
        heads=shape.heads,
        inner=shape.inner,
        has_dropout=shape.has_dropout,
        has_attention_dropout=shape.has_attention_dropout,
        has_scores=job.has_scores,
    )
    rows = block_rows(
        block, storage, num_blocks=num_blocks, num_live=num_live, tp=job.tp, recompute=job.recompute
    )
    if is_first and shape.has_embedding_dropout:
        rows.insert(0, embedding_row(block, num_live=num_live))
    if is_last:
        per_token = not shape.has_fixed_length
        is_cut = shape.num_outputs > VOCAB_PARALLEL_LIMIT
        rows.append(
            output_row(
                block,
                storage,
                num_outputs=shape.num_outputs,
                per_token=per_token,
                tp=job.tp if is_cut else 1,
            )
        )
    return rows
