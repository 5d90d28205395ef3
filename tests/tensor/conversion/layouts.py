"""All layouts of a tensor over a mesh, and pairs between which there is a conversion."""

import itertools
from collections.abc import Iterator

from colossalai.context import Mesh
from colossalai.tensor import ShardingLayout, ShardingSpec

SUM = -2
NOWHERE = -1


def all_layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[ShardingLayout]:
    """Every assignment of axes to dimensions, in every order, to the sum, and to nothing."""
    found = []
    for places in itertools.product((SUM, NOWHERE, *range(len(shape))), repeat=len(mesh.axes)):
        of_axes = dict(zip(mesh.axes, places, strict=True))
        cuts = [[axis for axis, place in of_axes.items() if place == dim] for dim in range(len(shape))]
        partial = tuple(axis for axis, place in of_axes.items() if place == SUM)
        for orders in itertools.product(*(itertools.permutations(axes) for axes in cuts)):
            found.append(ShardingLayout(ShardingSpec(shape, orders, mesh), partial))
    return found


def all_pairs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[ShardingLayout, ShardingLayout]]:
    """Every two layouts of which the second has no sum that the first has not."""
    layouts = all_layouts(mesh, shape)
    for source, target in itertools.product(layouts, layouts):
        if set(target.partial) <= set(source.partial):
            yield source, target
