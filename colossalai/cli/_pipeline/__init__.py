"""`colossalai pipeline`: simulated cost of pipeline schedules."""

from colossalai.cli._pipeline._command import PipelineOutput as PipelineOutput
from colossalai.cli._pipeline._command import PipelineSettings as PipelineSettings
from colossalai.cli._pipeline._command import compare as compare
