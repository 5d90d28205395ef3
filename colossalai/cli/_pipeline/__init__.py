"""`colossalai pipeline`: what pipeline schedules cost, without running one."""

from colossalai.cli._pipeline._command import Output as Output
from colossalai.cli._pipeline._command import Settings as Settings
from colossalai.cli._pipeline._command import compare as compare
