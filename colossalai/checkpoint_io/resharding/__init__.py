"""Tensors cut in one layout, put together in any other: local shards, tensor metadata, state trees.

Of this package; users need none of it. `ShardedTensor`: a tensor in the memory of
ranks. `StoredTensor`: a tensor in a checkpoint. `pack` and `unpack`: a nested state as a tree and flat
tensors.
"""

from colossalai.checkpoint_io.resharding._gather import gathered as gathered
from colossalai.checkpoint_io.resharding._local_shards import StateCut as StateCut
from colossalai.checkpoint_io.resharding._local_shards import fill as fill
from colossalai.checkpoint_io.resharding._local_shards import in_full_precision as in_full_precision
from colossalai.checkpoint_io.resharding._local_shards import new_like as new_like
from colossalai.checkpoint_io.resharding._local_shards import new_states as new_states
from colossalai.checkpoint_io.resharding._local_shards import notes_of as notes_of
from colossalai.checkpoint_io.resharding._local_shards import shards_of_states as shards_of_states
from colossalai.checkpoint_io.resharding._local_shards import state_cuts as state_cuts
from colossalai.checkpoint_io.resharding._local_shards import whole_shapes as whole_shapes
from colossalai.checkpoint_io.resharding._local_shards import with_local_shards as with_local_shards
from colossalai.checkpoint_io.resharding._tensors import FileShard as FileShard
from colossalai.checkpoint_io.resharding._tensors import FlatStateDict as FlatStateDict
from colossalai.checkpoint_io.resharding._tensors import ShardedStateDict as ShardedStateDict
from colossalai.checkpoint_io.resharding._tensors import ShardedTensor as ShardedTensor
from colossalai.checkpoint_io.resharding._tensors import StoredShard as StoredShard
from colossalai.checkpoint_io.resharding._tensors import StoredStateDict as StoredStateDict
from colossalai.checkpoint_io.resharding._tensors import StoredTensor as StoredTensor
from colossalai.checkpoint_io.resharding._tensors import TensorMetadata as TensorMetadata
from colossalai.checkpoint_io.resharding._tensors import ViewShard as ViewShard
from colossalai.checkpoint_io.resharding._tensors import names_by_tensor as names_by_tensor
from colossalai.checkpoint_io.resharding._tensors import stored_view as stored_view
from colossalai.checkpoint_io.resharding._tensors import stored_views as stored_views
from colossalai.checkpoint_io.resharding._tensors import wholes as wholes
from colossalai.checkpoint_io.resharding._tree import TensorLike as TensorLike
from colossalai.checkpoint_io.resharding._tree import pack as pack
from colossalai.checkpoint_io.resharding._tree import plain as plain
from colossalai.checkpoint_io.resharding._tree import unpack as unpack
from colossalai.checkpoint_io.resharding._tree import with_own_memory as with_own_memory
from colossalai.checkpoint_io.resharding._tree import with_tensors_named as with_tensors_named
