"""Followers: tensors between layers, which are cut or whole like their neighbors.

[Note: followers]
Ranks can convert a layout only at the boundaries of a layer: between two layers the user's own code runs. So
the tensors between them are *followers*: tensors connected by elementwise operations have one layout, whole
or cut. They can be cut if every operation on them computes each feature independently. A softmax, a reshape,
a residual sum with a whole tensor, or being returned by the model makes all of them whole.
"""

from collections.abc import Iterable, Mapping

from colossalai.auto_parallel.cuts._layers import base_name
from colossalai.auto_parallel.cuts._strategies import Followers, Site
from colossalai.auto_parallel.trace._trace import ModelTrace, Operation

# Operations that compute each feature independently; the in-place variants end with "_".
_POOLING = frozenset(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg") for dims in (1, 2, 3))
_ELEMENTWISE = _POOLING | {
    *("relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "hardtanh", "hardswish"),
    *("softplus", "mish", "exp", "neg", "abs", "pow", "clone", "detach", "contiguous", "to", "_to_copy"),
    *("type_as", "add", "sub", "mul", "div"),
}


class _Sets:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Return the representative of the set of a name."""
        above = self._above.setdefault(name, name)
        while above != self._above[above]:
            above = self._above[above]
        self._above[name] = above
        return above

    def join(self, names: Iterable[str]) -> None:
        """Merge the sets of some names."""
        found = [self.find(name) for name in names]
        for each in found[1:]:
            self._above[self.find(each)] = self.find(found[0])


# See [Note: followers].
def find_followers(trace: ModelTrace, ends: set[str]) -> tuple[tuple[Followers, ...], Mapping[str, int]]:
    """Return the sets of tensors that can be cut, and the number of the set of each tensor.

    Args:
        trace: The trace.
        ends: Names of the operations of sites, at which sets begin and end.
    """
    sets = _Sets()
    inside: dict[str, list[str]] = {}
    whole: set[str] = {*trace.outputs, *trace.inputs}
    at_sites: set[str] = set()  # sets without a site, such as a count of batches, are never cut
    for operation in trace.operations:
        if operation.name in ends:
            at_sites |= {*operation.inputs, *operation.outputs}
            continue
        tensors = [name for name in (*operation.inputs, *operation.outputs) if name not in trace.buffers]
        if not tensors:
            continue
        if _passes(trace, operation):
            sets.join(tensors)
            inside.setdefault(tensors[0], []).append(operation.name)
        else:
            whole.update(tensors)
    kept: dict[str, int] = {}
    groups: list[list[str]] = []
    whole.update(name for name in trace.tensors if name not in trace.producers)
    closed = {sets.find(name) for name in whole}
    open_sets = {sets.find(name) for name in at_sites} - closed
    for name in trace.tensors:
        if name in trace.params or name in trace.buffers or (root := sets.find(name)) not in open_sets:
            continue
        if root not in kept:
            kept[root] = len(groups)
            groups.append([])
        groups[kept[root]].append(name)
    operations: list[list[str]] = [[] for _ in groups]
    for name, names in inside.items():
        if (number := kept.get(sets.find(name))) is not None:
            operations[number] += names
    followers = tuple(
        Followers(tensors=tuple(tensors), operations=tuple(own))
        for tensors, own in zip(groups, operations, strict=True)
    )
    return followers, {name: number for number, each in enumerate(followers) for name in each.tensors}


def _passes(trace: ModelTrace, operation: Operation) -> bool:
    """Whether each feature of the results depends only on the same feature of the operands."""
    kind = base_name(operation)
    # Ranks with parts of the features would need separate random states; a dropout without effect passes.
    drops = operation.argument("train", True) and operation.argument("p", 1.0) > 0
    is_known = kind in _ELEMENTWISE or (kind == "dropout" and not drops)
    if not is_known or any(name in trace.params for name in operation.inputs):
        return False
    shapes = {trace.tensors[name].shape for name in (*operation.inputs, *operation.outputs)}
    return len(shapes) == 1 or (kind in _POOLING and len({len(shape) for shape in shapes}) == 1)


def with_followers(trace: ModelTrace, site: Site, of_tensor: Mapping[str, int]) -> Site:
    """Return a site with the numbers of its followers, without strategies that need missing ones."""
    operation = trace.operations[trace.places[site.operations[0]]]
    taken = next((name for name in operation.inputs if name not in trace.params), None)
    takes = None if taken is None else of_tensor.get(taken)
    gives = of_tensor.get(operation.outputs[0])
    strategies = tuple(
        each
        for each in site.strategies
        if not (each.takes_part and takes is None) and not (each.gives_part and gives is None)
    )
    return Site(
        name=site.name,
        layers=site.layers,
        operations=site.operations,
        params=site.params,
        strategies=strategies,
        takes=takes,
        gives=gives,
    )
