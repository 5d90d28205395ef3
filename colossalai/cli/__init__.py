"""The command `colossalai`: `run` starts a job, `benchmark` compares tensor modes, `check` looks around."""

from colossalai.cli._main import main as main
