"""Command line `colossalai`: options and output; the packages below implement the commands.

For the package's entry point: `main`, the group of all commands.
"""

from colossalai.cli._main import main as main
