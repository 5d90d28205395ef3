"""Ways to make gradients equal over ranks, chosen in the config by their registered names."""

from colossalai.engine.gradient_handler._base import BaseGradientHandler as BaseGradientHandler
from colossalai.engine.gradient_handler._build import build_gradient_handler as build_gradient_handler
from colossalai.engine.gradient_handler._data_parallel import (
    DataParallelGradientHandler as DataParallelGradientHandler,
)
from colossalai.engine.gradient_handler._pipeline_shared import (
    PipelineSharedModuleGradientHandler as PipelineSharedModuleGradientHandler,
)
from colossalai.engine.gradient_handler._sequence_parallel import (
    SequenceParallelGradientHandler as SequenceParallelGradientHandler,
)
from colossalai.engine.gradient_handler._zero import ZeROGradientHandler as ZeROGradientHandler
