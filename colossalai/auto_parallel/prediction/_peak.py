"""Moments of a step at which a rank can have its peak, and the memory of accumulating gradients.

[Note: arrival of gradients]
`zero_grad` sets gradients to None, so at the end of a forward there are none, and they appear as activations
are freed. With some of them complete, a rank has `held + begun + part * complete` bytes (`begun` from the
first gradient on), depending on how replicas average them:

- alone: the gradients. With several microbatches, all but the first start with a complete set of gradients;
- torch's DDP: its buckets, which are as large as all gradients and persistent, and the gradients in addition;
- in a pipeline: buckets, of which gradients are parts;
- ZeRO 1: the same. ZeRO 2: buckets of 25 MB from the first gradient to the mean, two being averaged and a
  third being filled, and the slices of means;
- ZeRO 3 (FSDP2): slices. Parameters outside of the blocks are one unit, which is gathered whenever
  activations are saved, and its full gradients stay to the end. A block's backward has its own gathered
  parameters and full gradients, the next one's in a prefetch buffer, and the gradients of the previous one,
  which are being reduced.

With float32 masters in the optimizer, gradients are cast to float32, too: on ranks that are alone or in a
pipeline as they arrive (`DataMethod.allows_float32_grads`), under ZeRO as slices of means, and under DDP all
at the update.

If ranks share a machine, buckets are in shared memory. Each rank has its own part there, which counts.
"""

from dataclasses import dataclass

from colossalai.auto_parallel._setting import Setting

_BUCKET_BYTES = 25 * 2**20  # of colossalai.zero
_MOST_BUCKETS = 3  # two are averaged, one is filled


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """Memory of gradients on a rank; see [Note: arrival of gradients].

    Attributes:
        held: Bytes that are allocated even without gradients.
        begun: Bytes from the first gradient on.
        part: Bytes for each byte of complete gradients.
        root_part: The same for parameters outside of the blocks.
        last: Additional bytes at the update.
        width: Bytes of an accumulated gradient for each byte of a new one.
    """

    held: float = 0.0
    begun: float = 0.0
    part: float = 0.0
    root_part: float = 0.0
    last: float = 0.0
    width: float = 1.0


def gradient_memory(
    setting: Setting, total: float, *, is_first: bool, master_ratio: float = 0.0
) -> GradientMemory:
    """Return the memory of gradients.

    Args:
        setting: The sizes.
        total: Bytes of all new gradients of a rank, before ZeRO shards them.
        is_first: Whether this is the backward of the first microbatch.
        master_ratio: Bytes of a float32 master for each byte of its parameter; 0 without masters.
    """
    width = master_ratio or 1.0
    slices = width * total / setting.data if setting.zero >= 2 else 0.0
    if setting.zero == 3:
        return GradientMemory(held=0.0 if is_first else slices, part=1 / setting.data, root_part=1.0)
    one_bucket = min(total, _BUCKET_BYTES) / setting.data if master_ratio else 0.0  # not float32 yet
    if setting.zero == 2:
        # With a single bucket, the mean is computed at the end.
        part = width / setting.data if total > _BUCKET_BYTES else 0.0
        begun = min(total, _MOST_BUCKETS * _BUCKET_BYTES)
        last = 2 * one_bucket + (0.0 if part else slices)  # the received slice and a float32 copy
        return GradientMemory(
            held=0.0 if is_first else slices, begun=begun, part=part, root_part=part, last=last
        )
    if setting.zero == 1:
        part = master_ratio / setting.data
        return GradientMemory(held=total, part=part, root_part=part, last=one_bucket)
    if setting.data > 1 and setting.pipeline > 1:
        return GradientMemory(held=width * total, width=width)
    buckets = total if setting.data > 1 else 0.0
    stays = width if setting.data == 1 else 1.0
    if is_first:
        last = master_ratio * total if setting.data > 1 else 0.0
        return GradientMemory(held=buckets, part=stays, root_part=stays, last=last, width=stays)
    return GradientMemory(held=buckets + stays * total, width=stays)


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """Memory of a rank at some moment, in addition to its parameters and states.

    Attributes:
        gradients: Gradients of parameters and their buckets.
        kept: Tensors saved for the backward.
        working: Temporary tensors.
        gathered: Gathered parameters of other ranks.
    """

    gradients: float
    kept: float = 0.0
    working: float = 0.0
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return self.gradients + self.kept + self.working + self.gathered
