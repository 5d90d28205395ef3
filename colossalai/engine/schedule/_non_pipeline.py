"""Schedule without a pipeline: the whole batch forward, then backward."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from colossalai.amp import LossTerm, read_loss
from colossalai.engine.schedule._base import BaseSchedule, call_with
from colossalai.nn.loss import logits_of
from colossalai.runtime import with_labels

if TYPE_CHECKING:
    from colossalai.engine._engine import Engine


class NonPipelineSchedule(BaseSchedule):
    """Runs a batch in one piece."""

    def forward_back_step(
        self,
        engine: "Engine",
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """See the base class.

        Raises:
            ValueError: `return_loss` is False, and the backward needs a loss.
            StopIteration: `data_iter` has no more batches.
        """
        if not forward_only and not return_loss:
            raise ValueError(
                "return_loss=False leaves nothing to run the backward of: also pass forward_only=True"
            )
        data, label = self.load_batch(data_iter, engine.device)
        with torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
            takes_labels = engine.model.takes_labels
            output = call_with(
                engine, with_labels(data, label, engine.model.unwrap()) if takes_labels else data
            )
            given: LossTerm | None = None
            if return_loss:
                loss = engine.criterion(output) if label is None else engine.criterion(output, label)
                given = read_loss(loss)
                engine.training_step.loss_weight = given.weight
        if not forward_only:
            engine.backward(loss)
        kept = (logits_of(output) if takes_labels else output, label) if return_output_label else (None, None)
        return (*kept, None if given is None else given.mean)
