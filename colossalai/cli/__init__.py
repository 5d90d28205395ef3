"""The command `colossalai`: `run` starts a job on this machine, `check` looks at the installation."""

from colossalai.cli._main import main as main
