"""What a rank that shares sequences takes of ids, masks and labels, which come whole, as in tensor modes.

The attention says in which order a causal model holds its positions, so that all ranks have the same work;
another model holds them in contiguous order. The parts of a model and its loss ask here, so that they agree.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from colossalai.context import Axis
from colossalai.nn.layer import launched_job
from colossalai.nn.layer.sequence_parallel import ATTENTIONS, Order, SequenceAttention, own_positions


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """How the sequences of a model are cut over ranks, if they are.

    Attributes:
        causal: Whether the model is.
        attention: The attention over cut sequences; None where none are cut.
        ranks: Those that share sequences; None where nobody does.
    """

    causal: bool
    attention: SequenceAttention | None = None
    ranks: Axis | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceCut":
        """Return the value itself: nothing of it changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a model that is saved whole find its ranks again in the job that loads it."""
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

        Elsewhere the layers that take them check them.

        Args:
            numbers: Ids or labels that count, whole.
            limit: How many there are, from 0.
            what: What they are, for the message.

        Raises:
            ValueError: A number is negative, or not below `limit`.
        """
        if self.is_cut and numbers.numel() > 0:
            low, high = (bound.item() for bound in numbers.aminmax())
            if low < 0 or high >= limit:
                raise ValueError(f"{what} from {low} to {high}; there are {limit}, from 0")


def sequence_cut(*, causal: bool) -> SequenceCut:
    """Return how the launched job cuts the sequences of a model.

    Args:
        causal: Whether the model is.
    """
    job = launched_job()
    if job.layout.attention is None:
        return SequenceCut(causal=causal)
    attention = ATTENTIONS[job.layout.attention]
    return SequenceCut(causal=causal, attention=attention, ranks=job.mesh.axis("sp"))


def _loaded(causal: bool, is_cut: bool) -> SequenceCut:
    return sequence_cut(causal=causal) if is_cut else SequenceCut(causal=causal)
