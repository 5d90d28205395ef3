"""Cached embeddings whose tables are divided among ranks: by columns, or each on one rank."""

from colossalai.nn.layer.cached_embedding.parallel._columns import (
    ParallelCachedEmbeddingBag as ParallelCachedEmbeddingBag,
)
from colossalai.nn.layer.cached_embedding.parallel._placement import TablePlacement as TablePlacement
from colossalai.nn.layer.cached_embedding.parallel._placement import (
    TablewiseEmbeddingBagConfig as TablewiseEmbeddingBagConfig,
)
from colossalai.nn.layer.cached_embedding.parallel._placement import place_tables as place_tables
from colossalai.nn.layer.cached_embedding.parallel._split_cache import (
    ParallelCachedEmbeddingBagTablewiseSpiltCache as ParallelCachedEmbeddingBagTablewiseSpiltCache,
)
from colossalai.nn.layer.cached_embedding.parallel._split_cache import (
    ParallelCachedEmbeddingBagTablewiseSplitCache as ParallelCachedEmbeddingBagTablewiseSplitCache,
)
from colossalai.nn.layer.cached_embedding.parallel._tablewise import (
    ParallelCachedEmbeddingBagTablewise as ParallelCachedEmbeddingBagTablewise,
)
