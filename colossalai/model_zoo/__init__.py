"""Models to train with; the transformers follow the tensor mode of the current context."""

from colossalai.model_zoo import bert as bert
from colossalai.model_zoo import gpt as gpt
from colossalai.model_zoo import resnet as resnet
from colossalai.model_zoo import vit as vit
