"""Streams (`IterableDataset`) that are divided over data-parallel ranks and loading workers."""

from colossalai.runtime.streams._shard import DealtBatch as DealtBatch
from colossalai.runtime.streams._shard import StreamShard as StreamShard
from colossalai.runtime.streams._shard import dealing_loader as dealing_loader
from colossalai.runtime.streams._shard import refuse_divided as refuse_divided
