"""ResNet: shapes, published sizes, and that it can learn."""

import pytest
import torch
from torch import nn

from colossalai.model_zoo.resnet import resnet18, resnet34

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("build", "millions"), [(resnet18, 11.690), (resnet34, 21.798)])
def test_published_sizes(build: type[nn.Module], millions: float) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(param.numel() for param in model.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)


@pytest.mark.parametrize(("small_input", "feature_size"), [(True, 32), (False, 8)])
def test_small_input_keeps_the_size_in_the_stem(small_input: bool, feature_size: int) -> None:
    model = resnet18(num_classes=10, in_channels=1, small_input=small_input, width=4)
    images = torch.randn(2, 1, 32, 32)
    assert model.stem(images).shape == (2, 4, feature_size, feature_size)
    assert model(images).shape == (2, 10)


def test_learns_a_few_images() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=4, in_channels=1, small_input=True, width=4)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
