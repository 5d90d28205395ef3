"""The network of the image examples: the project's own ResNet, or one of a library that is there."""

import importlib
from types import ModuleType

from torch import nn

from colossalai.model_zoo.resnet import resnet18

LIBRARIES = ("model_zoo", "torchvision", "timm")
WIDTH = 8  # an eighth of the published width is plenty for 8x8 pixels


def build_model(*, num_classes: int, library: str = "model_zoo") -> nn.Module:
    """Build a ResNet-18 for small grey images.

    Args:
        num_classes: Number of classes.
        library: One of `LIBRARIES`.

    Raises:
        ValueError: There is no such library, or it does not import here.
    """
    if library == "model_zoo":
        return resnet18(num_classes=num_classes, in_channels=1, small_input=True, width=WIDTH)
    if library == "torchvision":
        model: nn.Module = _import("torchvision.models").resnet18(num_classes=num_classes)
        model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return model
    if library == "timm":
        return _import("timm").create_model("resnet18", num_classes=num_classes, in_chans=1)
    raise ValueError(f"library {library!r}: choose one of {', '.join(LIBRARIES)}")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # built for another torch, it fails in ways of its own
        raise ValueError(f"{name} does not import here ({error}): use the library model_zoo") from error
