"""`python -m colossalai.cli` is the command `colossalai`."""

from colossalai.cli._main import main

main(prog_name="colossalai")
