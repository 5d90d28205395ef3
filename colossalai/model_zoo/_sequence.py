"""A rank's part of ids, masks and labels if ranks share sequences; inputs are whole, as in tensor modes.

The attention defines the order of a causal model's positions, so that all ranks have the same work; other
models use contiguous order. The parts of a model and its loss use this module, so that they agree.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from colossalai.context import Axis
from colossalai.nn.layer import launched_job
from colossalai.nn.layer.sequence_parallel import ATTENTIONS, Order, SequenceAttention, own_positions


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """The cut of a model's sequences over ranks, if any.

    Attributes:
        causal: Whether the model is causal.
        attention: The attention over cut sequences. None: sequences are not cut.
        ranks: The ranks that share sequences. None: sequences are not shared.
    """

    causal: bool
    attention: SequenceAttention | None = None
    ranks: Axis | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceCut":
        """Return the value itself: nothing of it changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Restore the ranks from the current job when a model that was saved whole is loaded."""
        return _loaded, (self.causal, self.is_cut)

    @property
    def is_cut(self) -> bool:
        """Whether the model was built where ranks share sequences."""
        return self.attention is not None

    @property
    def axis(self) -> Axis:
        """The ranks that share the sequences, where some do."""
        assert self.ranks is not None, "only a cut sequence has ranks that share it"
        return self.ranks

    @property
    def order(self) -> Order:
        """Which positions a rank holds, where sequences are cut."""
        return "contiguous" if self.attention is None else self.attention.order(causal=self.causal)

    def own_columns(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of (batch, seq); the whole where no sequence is cut.

        Args:
            whole: Ids, a mask or labels, the same on all ranks that share the sequences.

        Raises:
            ValueError: The ranks do not divide the sequence.
        """
        if not self.is_cut:
            return whole
        return whole[..., own_positions(whole.shape[-1], self.axis, order=self.order, device=whole.device)]

    def check(self, numbers: Tensor, limit: int, *, what: str) -> None:
        """Require whole numbers to be below a limit where sequences are cut: all ranks raise, or none does.

        Without cut sequences, the layers that take the numbers check them.

        Args:
            numbers: Counted ids or labels, whole.
            limit: Exclusive upper bound.
            what: Description of the numbers, for the message.

        Raises:
            ValueError: A number is negative, or not below `limit`.
        """
        if self.is_cut and numbers.numel() > 0:
            low, high = (bound.item() for bound in numbers.aminmax())
            if low < 0 or high >= limit:
                raise ValueError(f"{what} from {low} to {high}; there are {limit}, from 0")


def sequence_cut(*, causal: bool) -> SequenceCut:
    """Return the cut of a model's sequences in the launched job.

    Args:
        causal: Whether the model is causal.
    """
    job = launched_job()
    if job.layout.attention is None:
        return SequenceCut(causal=causal)
    attention = ATTENTIONS[job.layout.attention]
    return SequenceCut(causal=causal, attention=attention, ranks=job.mesh.axis("sp"))


def _loaded(causal: bool, is_cut: bool) -> SequenceCut:
    return sequence_cut(causal=causal) if is_cut else SequenceCut(causal=causal)
