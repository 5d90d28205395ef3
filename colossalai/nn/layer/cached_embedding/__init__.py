"""Embeddings with a table in host memory and a cache of its rows on the compute device (2208.05321).

| noun | definition |
| --- | --- |
| table | the whole weight, (rows, dim); rows are numbered by ids |
| cache | the parameter that is trained, (slots, dim): the rows in use |
| pinned row | a cached row that a batch without a step needs |
"""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag as CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._bag import FreqAwareEmbeddingBag as FreqAwareEmbeddingBag
from colossalai.nn.layer.cached_embedding._embedding import CachedEmbedding as CachedEmbedding
from colossalai.nn.layer.cached_embedding._param_mgr import CachedParamMgr as CachedParamMgr
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy as EvictionStrategy
from colossalai.nn.layer.cached_embedding._slots import SlotMap as SlotMap

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: missing names
