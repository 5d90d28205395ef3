"""Moments of a step at which a rank may have its peak, and what gradients take as they arrive.

[Note: gradients as they arrive]
`zero_grad` sets gradients to None, so at the end of a forward there are none, and they come as activations
go. What a rank has when some of them are complete is `held + begun + part * complete` bytes (`begun` from
the first one on), by how replicas average them:

- alone: the gradients. Of several microbatches all but the first find those of the earlier ones, all of them;
- torch's DDP: its buckets, which are as large as all gradients and always there, and the gradients beside;
- in a pipeline: buckets, of which gradients are parts;
- ZeRO 1: the same. ZeRO 2: buckets of 25 MB from the first gradient to the mean, two that are averaged and
  one that is filled, and the slices of means;
- ZeRO 3 (FSDP2): slices. Parameters outside of the blocks are one unit, which is gathered whenever something
  is kept, and its full gradients stay to the end. A block's backward has its own gathered parameters and full
  gradients, the next one's in a buffer, gathered ahead, and those of the one before, which are being reduced.

Where the optimizer has float32 masters, gradients become float32, too: of ranks that are alone or in a
pipeline as they come (`DataMethod.allows_float32_grads`), of ZeRO as slices of means, and of DDP all at the
update.

Where ranks share a machine, buckets lie in memory that they share. Each has its own there, and it counts.
"""

from dataclasses import dataclass

from colossalai.auto_parallel._setting import Setting

_BUCKET_BYTES = 25 * 2**20  # of colossalai.zero
_MOST_BUCKETS = 3  # two are averaged, one is filled


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """What gradients take on a rank; see [Note: gradients as they arrive].

    Attributes:
        held: Bytes that are there even when there is no gradient.
        begun: Bytes from the first gradient on.
        part: Bytes for each byte of complete gradients.
        root_part: The same for parameters outside of the blocks.
        last: Bytes more at the update.
        width: Bytes of a gradient, where it stays, for each byte of it as it comes.
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
    """Return what gradients take.

    Args:
        setting: The sizes.
        total: Bytes of all gradients of a rank as they come, before ZeRO cuts them.
        is_first: Whether this is the backward of the first microbatch.
        master_ratio: Bytes of a float32 master for each byte of its parameter; 0 without masters.
    """
    width = master_ratio or 1.0
    slices = width * total / setting.data if setting.zero >= 2 else 0.0
    if setting.zero == 3:
        return GradientMemory(held=0.0 if is_first else slices, part=1 / setting.data, root_part=1.0)
    one_bucket = min(total, _BUCKET_BYTES) / setting.data if master_ratio else 0.0  # not float32 yet
    if setting.zero == 2:
        # Of one bucket the mean comes at the end.
        part = width / setting.data if total > _BUCKET_BYTES else 0.0
        begun = min(total, _MOST_BUCKETS * _BUCKET_BYTES)
        last = 2 * one_bucket + (0.0 if part else slices)  # as it is received, and of its own
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
    """What a rank has at some moment beside its parameters and states.

    Attributes:
        gradients: Gradients of parameters and the memory that they are averaged in.
        kept: What is kept for the backward.
        working: What is there for a moment.
        gathered: Parameters of other ranks.
    """

    gradients: float
    kept: float = 0.0
    working: float = 0.0
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gradients + self.kept + self.working + self.gathered
