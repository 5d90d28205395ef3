"""File formats: sharded folders, single files of torch or safetensors, folders of Hugging Face, torch's DCP.

For users: `Stateful`, `save_lr_scheduler`, `load_lr_scheduler`, by the face of `checkpoint_io`. The rest is
of this package.
"""

from colossalai.checkpoint_io.formats._reader import load_state as load_state
from colossalai.checkpoint_io.formats._reader import read_state as read_state
from colossalai.checkpoint_io.formats._reader import state_of as state_of
from colossalai.checkpoint_io.formats._sharded_folder import ShardedIndex as ShardedIndex
from colossalai.checkpoint_io.formats._sharded_folder import WriteItem as WriteItem
from colossalai.checkpoint_io.formats._sharded_folder import WriteResult as WriteResult
from colossalai.checkpoint_io.formats._sharded_folder import file_of_rank as file_of_rank
from colossalai.checkpoint_io.formats._sharded_folder import index_of as index_of
from colossalai.checkpoint_io.formats._sharded_folder import read_sharded_index as read_sharded_index
from colossalai.checkpoint_io.formats._sharded_folder import save_sharded as save_sharded
from colossalai.checkpoint_io.formats._sharded_folder import share_out as share_out
from colossalai.checkpoint_io.formats._sharded_folder import write_items as write_items
from colossalai.checkpoint_io.formats._sharded_folder import write_sharded_index as write_sharded_index
from colossalai.checkpoint_io.formats._single import Format as Format
from colossalai.checkpoint_io.formats._single import Stateful as Stateful
from colossalai.checkpoint_io.formats._single import detect_format as detect_format
from colossalai.checkpoint_io.formats._single import has_checksums as has_checksums
from colossalai.checkpoint_io.formats._single import load_lr_scheduler as load_lr_scheduler
from colossalai.checkpoint_io.formats._single import read_plain as read_plain
from colossalai.checkpoint_io.formats._single import read_torch as read_torch
from colossalai.checkpoint_io.formats._single import save_lr_scheduler as save_lr_scheduler
from colossalai.checkpoint_io.formats._single import verify as verify
from colossalai.checkpoint_io.formats._single import write_torch as write_torch
from colossalai.checkpoint_io.formats._torch_dcp import DCP_INDEX as DCP_INDEX
from colossalai.checkpoint_io.formats._torch_dcp import DcpShard as DcpShard
from colossalai.checkpoint_io.formats._torch_dcp import read_dcp as read_dcp
from colossalai.checkpoint_io.formats._whole_writer import save_whole as save_whole
from colossalai.checkpoint_io.formats._whole_writer import write_torch_states as write_torch_states
