"""`colossalai benchmark --serve`: a load on any OpenAI server, and what its clients see."""

from colossalai.cli._load._command import LoadOutput as LoadOutput
from colossalai.cli._load._command import run_load as run_load
from colossalai.cli._load._load import LoadSettings as LoadSettings
