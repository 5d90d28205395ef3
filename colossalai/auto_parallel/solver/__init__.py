"""The combinatorial solver: one option for each node of a graph, least seconds within a budget of bytes."""
