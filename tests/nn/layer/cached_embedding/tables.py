"""A bag of torch and a cached one from the same seed, optimizers, and batches of ids by a power law."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag
from colossalai.nn.optimizer import RowWiseAdagrad

NUM_ROWS, DIM = 400, 8
OWN = (
    "evict_strategy",
    "ids_freq_mapping",
    "buffer_size",
    "warmup_ratio",
    "overflow",
    "weight_path",
    "local_batches",
    "name",
)  # options that torch's lacks

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "adagrad": lambda params: Adagrad(params, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "sparse_adam": lambda params: SparseAdam(params, lr=0.01),
    "row_wise": lambda params: RowWiseAdagrad(params, lr=0.1, initial_accumulator_value=0.1),
}


def make_pair(cache_ratio: float = 0.2, **options: Any) -> tuple[nn.EmbeddingBag, CachedEmbeddingBag]:
    """Return torch's bag and the cached one with the same table."""
    options = {"mode": "sum", "sparse": True, **options}
    own = {key: options.pop(key) for key in OWN if key in options}
    torch.manual_seed(0)
    reference = nn.EmbeddingBag(NUM_ROWS, DIM, **options)
    torch.manual_seed(0)
    return reference, CachedEmbeddingBag(NUM_ROWS, DIM, cache_ratio=cache_ratio, **options, **own)


def weights_of(path: Path) -> torch.Tensor:
    """Return the table of a file as another program reads it."""
    return load_file(path)["weight"]


def batches(number: int, shape: tuple[int, int] = (6, 4), *, seed: int = 0) -> Iterator[Tensor]:
    """Yield ids of which the first are the most frequent."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, NUM_ROWS + 1, dtype=torch.float64) ** -1.05
    for _ in range(number):
        yield torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator).view(
            shape
        )


def backward(bag: nn.Module, ids: Tensor) -> float:
    """Compute a loss that weighs the bags differently, and its gradients; return the loss."""
    output = bag(ids)
    loss: Tensor = (output * torch.linspace(0.5, 2, output.numel()).view_as(output)).square().sum()
    loss.backward()
    return loss.item()


def train(bag: nn.Module, optimizer: Optimizer, all_ids: Iterable[Tensor]) -> list[float]:
    """Make a step for each batch; return the losses."""
    losses = []
    for ids in all_ids:
        optimizer.zero_grad()
        losses.append(backward(bag, ids))
        optimizer.step()
    return losses


def check_equal(reference: nn.Module, bag: nn.Module, *optimizers: Optimizer) -> None:
    """Check that tables, and states of two optimizers, have equal bits."""
    assert torch.equal(reference.weight, bag.weight)  # type: ignore[arg-type]
    if not optimizers:
        return
    wanted, states = (each.state_dict()["state"].get(0, {}) for each in optimizers)
    assert wanted.keys() == states.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(
            states[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}"
        )
