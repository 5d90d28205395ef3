"""Placement of tables on ranks: complete, reproducible, and not far from an even division."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossalai.nn.layer.cached_embedding import TablePlacement, TablewiseEmbeddingBagConfig, place_tables

pytestmark = pytest.mark.unit

TABLES = st.lists(
    st.builds(
        TablewiseEmbeddingBagConfig,
        st.integers(1, 10_000),
        pooling_factor=st.floats(0.1, 100),
        assigned_rank=st.one_of(st.none(), st.none(), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=12,
)


def lookups(
    configs: list[TablewiseEmbeddingBagConfig], placement: TablePlacement, num_ranks: int
) -> list[float]:
    """Return the share of the lookups of each rank, relative to an even division."""
    total = sum(config.pooling_factor for config in configs)
    return [
        sum(configs[table].pooling_factor for table in placement.tables_of(rank)) * num_ranks / total
        for rank in range(num_ranks)
    ]


@given(TABLES, st.integers(3, 5))
def test_each_table_has_one_rank(configs: list[TablewiseEmbeddingBagConfig], num_ranks: int) -> None:
    placement = place_tables(configs, num_ranks)
    assert placement == place_tables(configs, num_ranks)
    assert sorted(table for rank in range(num_ranks) for table in placement.tables_of(rank)) == [
        *range(len(configs))
    ]
    for config, rank in zip(configs, placement.ranks, strict=True):
        assert config.assigned_rank in (None, rank)
    loads = lookups(configs, placement, num_ranks)
    assert all(load <= whole + 1e-9 for load, whole in zip(loads, placement.loads, strict=True))
    assert placement.imbalance == max(placement.loads) >= 1 - 1e-9


@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.integers(1, 4))
def test_the_largest_load_exceeds_the_mean_by_less_than_a_table(sizes: list[int], num_ranks: int) -> None:
    configs = [TablewiseEmbeddingBagConfig(size, pooling_factor=size, cuda_row_num=size) for size in sizes]
    placement = place_tables(configs, num_ranks)
    assert placement.imbalance <= 1 + max(sizes) * num_ranks / sum(sizes) + 1e-9


def test_tables_are_exchanged_where_the_largest_first_is_not_best() -> None:
    """Largest first gives 7 + 5 + 3 and 6 + 4: the exchange ends with 13 and 12 (or better)."""
    sizes = (7, 6, 5, 4, 3)
    configs = [TablewiseEmbeddingBagConfig(size, pooling_factor=size, cuda_row_num=size) for size in sizes]
    placement = place_tables(configs, 2)
    assert sorted(sum(sizes[table] for table in placement.tables_of(rank)) for rank in range(2)) == [12, 13]
    assert placement.imbalance == pytest.approx(13 / 12.5)


def test_many_tables() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (10 ** (torch.rand(600, generator=generator) * 6)).long().tolist()
    configs = [TablewiseEmbeddingBagConfig(size, pooling_factor=1 + size % 20) for size in sizes]
    assert place_tables(configs, 8).imbalance < 1.05


def test_misses_count_by_the_frequencies() -> None:
    skewed, even = torch.tensor([97.0, 1, 1, 1]), torch.ones(4)
    table = TablewiseEmbeddingBagConfig(4, 1, ids_freq_mapping=skewed)
    assert table.miss_share(0.01) == pytest.approx(0.03)
    assert TablewiseEmbeddingBagConfig(4, 1, ids_freq_mapping=even).miss_share(0.01) == pytest.approx(0.75)
    assert TablewiseEmbeddingBagConfig(4, ids_freq_mapping=[0, 0, 0, 0]).miss_share(0.5) == 0
    configs = [
        TablewiseEmbeddingBagConfig(4, 1, ids_freq_mapping=each) for each in (even, even, skewed, skewed)
    ]
    first, second = (place_tables(configs, 2).tables_of(rank) for rank in range(2))
    assert {0, 1} != set(first)
    assert {0, 1} != set(second)


def test_the_report() -> None:
    configs = [
        TablewiseEmbeddingBagConfig(10, assigned_rank=0),
        TablewiseEmbeddingBagConfig(10, assigned_rank=0),
    ]
    text = str(place_tables(configs, 2))
    assert text == "2 tables on 2 ranks, imbalance 2.00: rank 0 has 2 (load 2.00), rank 1 has 0 (load 0.00)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings is 0; a table has at least one row"),
        ({"cuda_row_num": 11}, "cuda_row_num is 11; it must be from 1 to the 10 rows"),
        ({"cuda_row_num": -1}, "cuda_row_num is -1; it must be"),
        ({"buffer_size": -1}, "buffer_size is -1; it must be a number of rows"),
        ({"pooling_factor": 0}, "pooling_factor is 0; it must be above 0"),
        ({"pooling_factor": float("inf")}, "pooling_factor is inf; it must be above 0, and finite"),
        ({"ids_freq_mapping": [1]}, "ids_freq_mapping has the shape (1,), and the table has 10 rows"),
        ({"ids_freq_mapping": [-1] * 10}, "ids_freq_mapping has negative or infinite numbers"),
        ({"name": "a.b"}, "name is 'a.b'; a name of a table in a state dict has no dots"),
    ],
)
def test_wrong_tables(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TablewiseEmbeddingBagConfig(**{"num_embeddings": 10, **options})  # type: ignore[arg-type]


def test_wrong_placements() -> None:
    with pytest.raises(ValueError, match="there are no tables"):
        place_tables([], 2)
    with pytest.raises(ValueError, match="num_ranks is 0; it must be at least 1"):
        place_tables([TablewiseEmbeddingBagConfig(10)], 0)
    for options in ({"num_embeddings": 2.5}, {"name": None}):
        with pytest.raises(TypeError):
            TablewiseEmbeddingBagConfig(**{"num_embeddings": 10, **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table users has assigned_rank=2; it must be from 0 to 1, or None"):
        place_tables([TablewiseEmbeddingBagConfig(10, assigned_rank=2, name="users")], 2)
