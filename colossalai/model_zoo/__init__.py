"""Models to train with, in plain PyTorch: nothing in them knows of parallelism."""

from colossalai.model_zoo import gpt as gpt
from colossalai.model_zoo import resnet as resnet
