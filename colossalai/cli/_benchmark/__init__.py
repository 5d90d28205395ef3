"""`colossalai benchmark`: cost of each tensor-parallel configuration on this machine."""

from colossalai.cli._benchmark._command import BenchmarkOutput as BenchmarkOutput
from colossalai.cli._benchmark._command import benchmark as benchmark
from colossalai.cli._benchmark._configurations import Configuration as Configuration
from colossalai.cli._benchmark._configurations import find_configurations as find_configurations
from colossalai.cli._benchmark._results import BenchmarkSettings as BenchmarkSettings
from colossalai.cli._benchmark._results import Figures as Figures
from colossalai.cli._benchmark._results import Results as Results
from colossalai.cli._benchmark._results import Skipped as Skipped
