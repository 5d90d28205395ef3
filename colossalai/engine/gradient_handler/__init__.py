"""Ways to make gradients equal over ranks, chosen in the config by their registered names."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.engine.gradient_handler._base import BaseGradientHandler as BaseGradientHandler
from colossalai.engine.gradient_handler._build import build_gradient_handler as build_gradient_handler
from colossalai.engine.gradient_handler._data_parallel import (
    DataParallelGradientHandler as DataParallelGradientHandler,
)
from colossalai.engine.gradient_handler._moe import MoeGradientHandler as MoeGradientHandler
from colossalai.engine.gradient_handler._pipeline_shared import (
    PipelineSharedModuleGradientHandler as PipelineSharedModuleGradientHandler,
)
from colossalai.engine.gradient_handler._sequence_parallel import (
    SequenceParallelGradientHandler as SequenceParallelGradientHandler,
)
from colossalai.engine.gradient_handler._zero import ZeROGradientHandler as ZeROGradientHandler

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
