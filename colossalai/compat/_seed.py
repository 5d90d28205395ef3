"""The seed of tests, under the name that `colossalai.testing.random` documents."""

import torch

from colossalai.context import set_seed


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators.

    Args:
        seed: The seed.
        cuda_deterministic: Make convolutions of an accelerator reproducible, at the price of their speed.
    """
    set_seed(seed)
    if cuda_deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
