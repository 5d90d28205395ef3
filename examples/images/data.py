"""Handwritten digits: 1797 grey images of 8x8 pixels, which scikit-learn brings along."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

NUM_CLASSES = 10
TEST_SHARE = 0.2
GOAL = 0.95  # the test accuracy that the examples promise


def load_images(*, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Return (training, test) datasets of images (1, 8, 8) with their digits; the seed fixes the split."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([int(TEST_SHARE * len(labels))])
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
