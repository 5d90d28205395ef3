"""Schedules: forward and backward of a batch, with and without a pipeline."""

from colossalai.engine.schedule._base import BaseSchedule as BaseSchedule
from colossalai.engine.schedule._non_pipeline import NonPipelineSchedule as NonPipelineSchedule
from colossalai.engine.schedule._pipeline import InterleavedPipelineSchedule as InterleavedPipelineSchedule
from colossalai.engine.schedule._pipeline import PipelineSchedule as PipelineSchedule
from colossalai.engine.schedule._pipeline import get_tensor_shape as get_tensor_shape
