"""Interface of schedules, and the split of a batch into data and label."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from colossalai.runtime import to_device

if TYPE_CHECKING:
    from colossalai.engine._engine import Engine

DataProcess = Callable[[Any], tuple[Any, Any]]


class BaseSchedule(ABC):
    """Runs forward and backward of a batch.

    Args:
        data_process_func: Function from a batch to (data, label). Default: a pair is (data, label), any other
            batch is data without a label.
    """

    def __init__(self, data_process_func: DataProcess | None = None) -> None:
        self.data_process_func = data_process_func

    @abstractmethod
    def forward_back_step(
        self,
        engine: "Engine",
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch; return output, label and loss, None for parts that were not requested."""

    def forward_backward_step(
        self,
        engine: "Engine",
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Call `forward_back_step`, of which this is another name; override that method."""
        return self.forward_back_step(engine, data_iter, forward_only, return_loss, return_output_label)

    def load_batch(self, data_iter: Iterator[Any], device: torch.device) -> tuple[Any, Any]:
        """Return data and label of the next batch, on `device`.

        Raises:
            StopIteration: `data_iter` has no more batches.
        """
        batch = next(data_iter)
        if self.data_process_func is not None:
            data, label = self.data_process_func(batch)
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            data, label = batch
        else:
            data, label = batch, None
        return to_device(data, device), to_device(label, device)


def call_with(function: Callable[..., Any], data: Any) -> Any:
    """Call a model with a batch's data: a dict as keyword arguments, a tuple or list as positional ones."""
    if isinstance(data, Mapping):
        return function(**data)
    return function(*data) if isinstance(data, tuple | list) else function(data)
