"""Notations of cuts: what is written is what is read, and what cannot be said is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from colossalai.context import Mesh
from colossalai.tensor import ShardingLayout, ShardingSpec
from tests.tensor.conversion.layouts import all_layouts

pytestmark = pytest.mark.unit

MESH = Mesh({"dp": 2, "pp": 1, "tp": 2}, rank=0)
SPECS = [layout.spec for layout in all_layouts(MESH, (4, 4, 4)) if not layout.partial]


class View:
    mesh = MESH


@given(st.sampled_from(SPECS))
def test_a_notation_is_read_as_it_was_written(spec):
    assert ShardingSpec.from_notation(spec.notation, spec.shape, MESH) == spec
    assert ShardingSpec.from_dim_partition_dict(spec.dim_partition_dict, spec.shape, View()) == spec


@given(st.sampled_from(SPECS))
def test_placements_say_what_torch_can_say(spec):
    several = [[axis for axis in axes if axis != "pp"] for axes in spec.dims]  # pp has one rank
    if ["tp", "dp"] in several:
        with pytest.raises(ValueError, match="torch's Shard"):
            spec.to_placements()
        return
    placements = spec.to_placements()
    back = ShardingSpec.from_placements(placements, spec.shape, MESH)
    assert ShardingLayout(back).placement == ShardingLayout(spec).placement


def test_digits_are_positions_in_the_mesh():
    spec = ShardingSpec.from_notation("S20R", (4, 3), MESH)
    assert spec.dims == (("tp", "dp"), ())
    assert spec.dim_partition_dict == {0: [2, 0]}
    assert ShardingSpec.from_dim_partition_dict({-1: [0]}, (4, 6), MESH).dims == ((), ("dp",))
    with pytest.raises(ValueError, match="cut over tp then dp, and torch's Shard"):
        spec.to_placements()
    spec = ShardingSpec.from_placements([Shard(-1), Replicate(), Shard(0)], (4, 6), MESH)
    assert spec.notation == "S2S0"
    assert spec.to_placements() == (Shard(1), Replicate(), Shard(0))


def test_a_spec_of_parts_is_none_of_torch():
    spec = ShardingSpec((12, 4), (("tp",), ()), MESH, parts=(3, 1))
    with pytest.raises(ValueError, match="are each cut"):
        spec.to_placements()


@pytest.mark.parametrize(
    ("notation", "shape", "message"),
    [
        ("S0X", (4, 4), "'S0X' is not the notation of a cut: write R"),
        ("SR", (4, 4), "is not the notation"),
        ("s0R", (4, 4), "is not the notation"),
        ("S3R", (4, 4), "there is no axis 3: the mesh has"),
        ("S0S0", (4, 4), "an axis cuts twice"),
        ("S0", (4, 4), "a spec of 1 dimensions for a tensor of shape"),
        ("S0R", (5, 4), r"pad_to\(tensor, shape\) and a PaddedSpec"),
    ],
)
def test_what_is_no_cut_is_refused(notation, shape, message):
    with pytest.raises(ValueError, match=message):
        ShardingSpec.from_notation(notation, shape, MESH)


def test_further_refusals():
    with pytest.raises(ValueError, match="dimension 2 in"):
        ShardingSpec.from_dim_partition_dict({2: [0]}, (4, 4), MESH)
    with pytest.raises(ValueError, match="dimension 1 is twice"):
        ShardingSpec.from_dim_partition_dict({1: [0], -1: [2]}, (4, 4), MESH)
    with pytest.raises(ValueError, match="2 placements for the 3 axes"):
        ShardingSpec.from_placements([Shard(0), Shard(1)], (4, 4), MESH)
    with pytest.raises(ValueError, match="is not a cut"):
        ShardingSpec.from_placements([Partial(), Replicate(), Replicate()], (4, 4), MESH)
    with pytest.raises(ValueError, match="of a tensor of 2 dimensions"):
        ShardingSpec.from_placements([Shard(2), Replicate(), Replicate()], (4, 4), MESH)
    many = Mesh({f"a{number}": 1 for number in range(12)}, rank=0)
    with pytest.raises(ValueError, match="number 11 of the mesh, and notations have one digit"):
        _ = ShardingSpec((4,), (("a11",),), many).notation
    assert torch.Size(ShardingSpec((4,), (("a11",),), many).local_shape) == (4,)
