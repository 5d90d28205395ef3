"""Ways to make gradients equal over ranks, chosen in the config by their registered names."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.compat.gradient_handler._handlers import (
    DataParallelGradientHandler as DataParallelGradientHandler,
)
from colossalai.compat.gradient_handler._handlers import MoeGradientHandler as MoeGradientHandler
from colossalai.compat.gradient_handler._handlers import (
    PipelineSharedModuleGradientHandler as PipelineSharedModuleGradientHandler,
)
from colossalai.compat.gradient_handler._handlers import (
    SequenceParallelGradientHandler as SequenceParallelGradientHandler,
)
from colossalai.compat.gradient_handler._handlers import ZeROGradientHandler as ZeROGradientHandler
from colossalai.engine import BaseGradientHandler as BaseGradientHandler
from colossalai.engine import build_gradient_handler as build_gradient_handler

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, "colossalai.engine.gradient_handler")  # PEP 562
