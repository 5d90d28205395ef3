"""Entry point of `python -m colossalai.cli`, the command `colossalai`."""

from colossalai.cli._main import main

main(prog_name="colossalai")
