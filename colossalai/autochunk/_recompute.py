"""The graph with cheap results computed again for each use.

[Note: results that are computed again]
A normalized tensor with several users lives from the first to the last one, and is as large as its input,
which a residual connection keeps as well. Regions cannot help: a later region that reads parts of it needs it
whole before the region. So for budgets that are too small otherwise, each user receives a result of its own,
of inputs that live as long anyway. Within a loop, equal ones are merged again.
"""

from copy import copy

from torch import Tensor, fx

from colossalai.autochunk._calls import is_cheap
from colossalai.autochunk._profile import GraphProfile


def with_recomputation(graph: fx.Graph, profile: GraphProfile) -> fx.Graph:
    """Return a graph in which users of cheap results have their own ones.

    See [Note: results that are computed again].

    Args:
        graph: The traced graph, which is not changed.
        profile: Its profile.
    """
    copied = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    own = {node for node in profile.nodes if _can_repeat(node, profile)}
    copied.set_codegen(copy(graph._codegen))
    used: set[fx.Node] = set()

    def repeat_inputs(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in own and source in used:
                repeat_inputs(source)
                new[source] = copied.node_copy(source, new.__getitem__)

    for node in graph.nodes:
        repeat_inputs(node)
        used.update(node.all_input_nodes)
        new[node] = copied.node_copy(node, new.__getitem__)
    return copied


def _can_repeat(node: fx.Node, profile: GraphProfile) -> bool:
    """Return whether a result can be computed again at any of its users, of inputs that live then anyway."""
    at = profile.positions[node]
    users = [profile.positions.get(user, len(profile.nodes)) for user in node.users]
    numbers = profile.of_node[at]
    is_new = len(numbers) == 1 and profile.storages[numbers[0]].first == at
    if len(users) < 2 or max(users) == len(profile.nodes) or not (is_new and is_cheap(node)):
        return False
    if not isinstance(node.meta["val"], Tensor) or numbers[0] in profile.writes:
        return False
    sources = [profile.positions[each] for each in node.all_input_nodes if each in profile.positions]
    storages = [number for source in sources for number in profile.of_node[source]]
    is_outside = len(sources) < len(node.all_input_nodes) or not all(
        profile.of_node[each] for each in sources
    )
    if is_outside and profile.writes_outside:
        return False
    return all(profile.storages[each].last >= max(users) and each not in profile.writes for each in storages)
