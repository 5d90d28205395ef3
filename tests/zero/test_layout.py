"""The layout of buckets: everything lies once, sections are even or whole, and what ranks get is balanced."""

import pytest
import torch
from torch import nn

from colossalai.context import Axis, Mesh
from colossalai.zero._layout import FlatBucket, deal_out, lay_out

pytestmark = pytest.mark.unit


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def replicas(num_ranks: int) -> Axis:
    return Mesh({"dp": num_ranks}, rank=0).axis("dp")


def covered(bucket: FlatBucket, index: int, num_ranks: int) -> list[int]:
    """Return the elements of a parameter that the fragments of the ranks have, in order."""
    ranges = [range(*bucket.overlap(index, rank)) for rank in range(num_ranks)]
    return [element for part in ranges for element in part]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_whole", [False, True])
def test_every_element_is_in_one_fragment(num_ranks: int, is_whole: bool) -> None:
    params = parameters(5, 1, 17, 3, 8)
    owners = deal_out(params, replicas(num_ranks)) if is_whole else {}
    buckets = lay_out(params, replicas(num_ranks), cap_bytes=80, owners=owners)
    assert {param for bucket in buckets for param in bucket.params} == set(params)
    assert sum(len(bucket.params) for bucket in buckets) == len(params)
    for bucket in buckets:
        for index, param in enumerate(bucket.params):
            assert covered(bucket, index, num_ranks) == list(range(param.numel()))
            view = bucket.view(torch.arange(bucket.numel), index)
            sections = [bucket.section(torch.arange(bucket.numel), rank) for rank in range(num_ranks)]
            placed = [part[slice(*bucket.place(index, rank))] for rank, part in enumerate(sections)]
            assert torch.equal(torch.cat(placed), view)
            assert view.tolist() == list(range(bucket.starts[index], bucket.starts[index] + param.numel()))
            if is_whole:
                assert bucket.overlap(index, owners[param]) == (0, param.numel())


def test_sections_are_even_and_only_the_end_is_padded() -> None:
    (bucket,) = lay_out(parameters(5, 4), replicas(4), cap_bytes=1000, owners={})
    assert bucket.section_sizes == [3, 3, 3, 3]
    assert (bucket.num_used, bucket.numel) == (9, 12)


def test_whole_parameters_need_no_padding_and_are_balanced() -> None:
    params = parameters(40, 1, 10, 10, 10, 9)
    owners = deal_out(params, replicas(2))
    (bucket,) = lay_out(params, replicas(2), cap_bytes=1000, owners=owners)
    assert bucket.numel == bucket.num_used == 80
    assert bucket.section_sizes == [40, 40]


def test_buckets_are_in_the_order_in_which_they_become_full_and_of_one_kind() -> None:
    low = parameters(4, 4, dtype=torch.bfloat16)
    high = parameters(2, 2, 100)
    order = [low[0], high[0], high[1], high[2], low[1]]
    buckets = lay_out(order, replicas(2), cap_bytes=64, owners={})
    assert [bucket.params for bucket in buckets] == [(high[0], high[1]), (high[2],), (low[0], low[1])]
    assert [bucket.grad_dtype for bucket in buckets] == [torch.float32, torch.float32, torch.bfloat16]
