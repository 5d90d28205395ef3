"""Selection of the blocks of a chain to recompute: rotor's dynamic program, and Chen's square root.

For users: `CheckpointSolverRotor`, `CheckpointSolverChen`. For the package: `TracedGraph`, `graph_of` and
`profiled`. Their modules depend on the predictions, which depend on `_chain.py` of this package: the imports
are lazy.
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._lazy import find_name

if TYPE_CHECKING:
    from colossalai.auto_parallel.checkpoint._graph import TracedGraph as TracedGraph
    from colossalai.auto_parallel.checkpoint._graph import graph_of as graph_of
    from colossalai.auto_parallel.checkpoint._graph import profiled as profiled
    from colossalai.auto_parallel.checkpoint._solvers import CheckpointSolverChen as CheckpointSolverChen
    from colossalai.auto_parallel.checkpoint._solvers import CheckpointSolverRotor as CheckpointSolverRotor
else:
    _HOMES = {
        "CheckpointSolverChen": "colossalai.auto_parallel.checkpoint._solvers",
        "CheckpointSolverRotor": "colossalai.auto_parallel.checkpoint._solvers",
        "TracedGraph": "colossalai.auto_parallel.checkpoint._graph",
        "graph_of": "colossalai.auto_parallel.checkpoint._graph",
        "profiled": "colossalai.auto_parallel.checkpoint._graph",
    }
    __getattr__ = partial(find_name, __name__, _HOMES)  # PEP 562
