"""What a rank holds of a tensor, and how boxes of one layout become those of another."""

from colossalai.checkpoint_io.resharding._box import Box as Box
from colossalai.checkpoint_io.resharding._box import is_tiled as is_tiled
from colossalai.checkpoint_io.resharding._box import whole_box as whole_box
from colossalai.checkpoint_io.resharding._entries import Described as Described
from colossalai.checkpoint_io.resharding._entries import Entry as Entry
from colossalai.checkpoint_io.resharding._entries import Held as Held
from colossalai.checkpoint_io.resharding._entries import Mapped as Mapped
from colossalai.checkpoint_io.resharding._entries import Piece as Piece
from colossalai.checkpoint_io.resharding._entries import Spread as Spread
from colossalai.checkpoint_io.resharding._entries import Stored as Stored
from colossalai.checkpoint_io.resharding._entries import all_mapped as all_mapped
from colossalai.checkpoint_io.resharding._local_shards import copy_into as copy_into
from colossalai.checkpoint_io.resharding._local_shards import follows as follows
from colossalai.checkpoint_io.resharding._local_shards import held as held
from colossalai.checkpoint_io.resharding._local_shards import held_state as held_state
from colossalai.checkpoint_io.resharding._local_shards import is_cut_by_spec as is_cut_by_spec
from colossalai.checkpoint_io.resharding._local_shards import new_like as new_like
from colossalai.checkpoint_io.resharding._local_shards import new_replicated as new_replicated
from colossalai.checkpoint_io.resharding._local_shards import new_state as new_state
from colossalai.checkpoint_io.resharding._local_shards import whole_shape as whole_shape
from colossalai.checkpoint_io.resharding._tree import Json as Json
from colossalai.checkpoint_io.resharding._tree import pack as pack
from colossalai.checkpoint_io.resharding._tree import plain as plain
from colossalai.checkpoint_io.resharding._tree import unpack as unpack
from colossalai.checkpoint_io.resharding._tree import with_own_memory as with_own_memory
