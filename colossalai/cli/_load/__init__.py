"""`colossalai benchmark --serve`: a load on any OpenAI-compatible server, measured by its clients."""

from colossalai.cli._load._command import LoadOutput as LoadOutput
from colossalai.cli._load._command import run_load as run_load
from colossalai.cli._load._load import LoadSettings as LoadSettings
