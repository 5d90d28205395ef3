"""Residual networks for images of any size."""

from colossalai.model_zoo.resnet._model import BasicBlock as BasicBlock
from colossalai.model_zoo.resnet._model import ResNet as ResNet
from colossalai.model_zoo.resnet._model import resnet18 as resnet18
from colossalai.model_zoo.resnet._model import resnet34 as resnet34
