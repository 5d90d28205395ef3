"""Two tables, of families of models and of optimizers, each cell of which is a run on two ranks.

The document has them; `python -m tests.verdicts` runs all cells and writes them anew. The tests run a cell
and compare its verdict with that of the document: "equal" to one process, or "refused" by name, before
anything was changed. A number that is off has no verdict: its cell raises.
"""
