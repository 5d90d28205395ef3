"""Models to train with; the transformers follow the tensor mode of the current context."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.model_zoo import bert as bert
from colossalai.model_zoo import evoformer as evoformer
from colossalai.model_zoo import gpt as gpt
from colossalai.model_zoo import moe as moe
from colossalai.model_zoo import resnet as resnet
from colossalai.model_zoo import vit as vit
from colossalai.model_zoo._attention import SelfAttention as SelfAttention
from colossalai.model_zoo._config import TransformerConfig as TransformerConfig

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names of the interface without code so far
