"""How a batch goes through forward and backward."""

from colossalai.engine.schedule._base import BaseSchedule as BaseSchedule
from colossalai.engine.schedule._non_pipeline import NonPipelineSchedule as NonPipelineSchedule
