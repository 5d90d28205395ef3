"""Random generators of initial values: their states, and scratch memory to draw into."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, UntypedStorage

from colossalai.lazy._tape import RandomState


class Scratch:
    """Scratch memory for draws whose values are not read, reused between draws.

    Allocating and freeing memory for each draw fragments the heap between small persistent objects, and the
    heap grows by most of the size of the model.
    """

    def __init__(self) -> None:
        self._storages: dict[torch.device, UntypedStorage] = {}

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of the shape, strides and dtype of another, with arbitrary values."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        if device not in self._storages or self._storages[device].nbytes() < num_bytes:
            self._storages.pop(device, None)  # free the old one first, so that there are never two
            self._storages[device] = UntypedStorage(num_bytes, device=device)
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(self._storages[device], 0, tensor.shape, tensor.stride())


def random_state(device: torch.device, generator: Generator | None) -> RandomState:
    """Return the state that the next draw on a device starts from."""
    if generator is not None:
        return RandomState(generator.device, generator.get_state(), is_own=True)
    return RandomState(device, _get(device), is_own=False)


@contextmanager
def drawing_from(state: RandomState | None) -> Iterator[dict[str, Generator]]:
    """Set a random state, and restore the previous one afterwards.

    Yields:
        Keyword arguments for an operation that was called with its own generator.
    """
    if state is None:
        yield {}
    elif state.is_own:
        yield {"generator": Generator(state.device).set_state(state.state)}
    else:
        kept = _get(state.device)
        _set(state.state, state.device)
        try:
            yield {}
        finally:
            _set(kept, state.device)


def _get(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
