"""Averages gradients over the ranks that share sequences, and the data-parallel ones, after the backward."""

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._average import GradientAverage
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over SEQUENCE_DP: every parameter is replicated there; see `GradientAverage`.

    So is the slice of one that tensor parallelism beside it cuts.

    A rank's loss is the mean over the tokens that it holds, and its backward gives the gradient of the sum of
    all ranks' losses, with respect to its own copy. So where all ranks hold equally many tokens that count,
    the mean over the ranks is the gradient of the mean over all tokens. Where they do not (padding, a masked
    language model), give the loss its weight: `engine.backward(loss, weight=number_of_own_tokens)`.
    """

    _average: GradientAverage | None = None  # from the first call on

    def handle_gradient(self) -> None:
        """Average the gradients in place.

        Raises:
            ValueError: No ranks of the launched job share sequences.
        """
        self._average = self._average or GradientAverage(global_context.axis(ParallelMode.SEQUENCE_DP))
        self._average(self._model.parameters())
