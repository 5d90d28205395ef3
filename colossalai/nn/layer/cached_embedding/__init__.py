"""Embeddings with a table in host memory and a cache of its rows on the compute device (2208.05321).

| noun | definition |
| --- | --- |
| table | the whole weight, (rows, dim); rows are numbered by ids |
| cache | the parameter that is trained, (slots, dim): the rows in use |
| pinned row | a cached row that a batch without a step needs |
"""

from colossalai.nn.layer.cached_embedding._bag import CachedEmbedding as CachedEmbedding
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag as CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._bag import FreqAwareEmbeddingBag as FreqAwareEmbeddingBag
from colossalai.nn.layer.cached_embedding._param_mgr import CachedParamMgr as CachedParamMgr
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy as EvictionStrategy
from colossalai.nn.layer.cached_embedding._slots import SlotMap as SlotMap
from colossalai.nn.layer.cached_embedding.parallel import (
    ParallelCachedEmbeddingBag as ParallelCachedEmbeddingBag,
)
from colossalai.nn.layer.cached_embedding.parallel import (
    ParallelCachedEmbeddingBagTablewise as ParallelCachedEmbeddingBagTablewise,
)
from colossalai.nn.layer.cached_embedding.parallel import (
    ParallelCachedEmbeddingBagTablewiseSpiltCache as ParallelCachedEmbeddingBagTablewiseSpiltCache,
)
from colossalai.nn.layer.cached_embedding.parallel import (
    ParallelCachedEmbeddingBagTablewiseSplitCache as ParallelCachedEmbeddingBagTablewiseSplitCache,
)
from colossalai.nn.layer.cached_embedding.parallel import TablePlacement as TablePlacement
from colossalai.nn.layer.cached_embedding.parallel import (
    TablewiseEmbeddingBagConfig as TablewiseEmbeddingBagConfig,
)
from colossalai.nn.layer.cached_embedding.parallel import place_tables as place_tables
