"""Command line `colossalai`: options and printing; what the commands do is in the packages below.

For the package's entry point: `main`, the group of all commands.
"""

from colossalai.cli._main import main as main
