"""What a rank of mode "sequence" takes of ids, masks and labels, which come whole, as in the other modes.

A causal model holds its positions in zigzag order, so that all ranks have the same work, another one in
contiguous order. The parts of a model and its loss ask here, so that they agree.
"""

from dataclasses import dataclass

from torch import Tensor

from colossalai.context import Axis, global_context
from colossalai.nn.layer.sequence_parallel import Order, own_positions

SEQUENCE = "sequence"


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """How the sequences of a model are cut over ranks, if they are.

    Attributes:
        is_cut: Whether the model was built in mode "sequence".
        order: Which positions a rank then holds.
    """

    is_cut: bool
    order: Order

    @property
    def axis(self) -> Axis:
        """The ranks that share the sequences; no attribute, so that a model can be copied and saved."""
        return global_context.mesh.axis("tp")

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
            ValueError: One is not.
        """
        if self.is_cut and numbers.numel() > 0:
            low, high = (bound.item() for bound in numbers.aminmax())
            if low < 0 or high >= limit:
                raise ValueError(f"{what} from {low} to {high}; there are {limit}, from 0")


def sequence_cut(*, causal: bool) -> SequenceCut:
    """Return how the current mode cuts the sequences of a model.

    Args:
        causal: Whether the model is.
    """
    is_cut = global_context.tensor_mode == SEQUENCE
    return SequenceCut(is_cut=is_cut, order="zigzag" if causal else "contiguous")
