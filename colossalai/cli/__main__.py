"""`python -m colossalai.cli` is the command `colossalai`."""

from colossalai.cli import main

main(prog_name="colossalai")
