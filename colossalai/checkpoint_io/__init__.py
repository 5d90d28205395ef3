"""Checkpoints: full tensors by name, saved under any plan, loaded under any other, never half written.

For users:

    save_model, load_model, save_optimizer, load_optimizer, save_lr_scheduler, load_lr_scheduler
                        one part each, in a file or a folder
    save_checkpoint, load_checkpoint
                        all of them in one file
    TrainingState, save_training_state, load_training_state, resume_training_state, latest_training_state
                        a run that resumes exactly
    wait_for_saves, check_saves
                        saves in the background
    parameter_names, LoadReport, Stateful
                        arguments and results of these
    CheckpointIO, GeneralCheckpointIO
                        saving and loading as an object
    ChunkStorageReader  lets torch's distributed checkpoints (DCP) read ours
    atomic_file, atomic_folder
                        files of your own, replaced as a whole or not at all

For the other packages: `open_model` and `fill_model` (the two halves of `load_model`, for checkpoints with
names of others), `opened_tensors` (the first half for tensors in memory), `gathered_weights` (whole tensors
in memory, from the shards of ranks), `module_names` (names in a checkpoint of a part of a model),
`OpenedModel`, `ModelLoadPlan`, `StoredTensor` and `fill` (the steps between them), `set_prefix` and
`set_tied_names` (names of a pipeline stage in the whole model), `MODEL` and `names_by_tensor`,
`called_by_all_ranks` (for functions that save or load), `whole_state_dict` and `load_whole_state_dict` (the
state dict of a boosted model of which ranks hold parts), and `colossalai.checkpoint_io.tools` (for the
command line).

A tensor on its way to disk and back, in the terms of this package:

| noun | definition | home |
| --- | --- | --- |
| `Box` | offsets and sizes of a part of a global tensor | `tensor/_box` |
| `TensorMetadata` | shape and dtype of a global tensor | `resharding/_tensors` |
| `ShardedTensor` | in the memory of ranks: which of them hold which box, and views of our own | the same |
| `StoredTensor` | in a checkpoint: `StoredShard`s, boxes of which any part can be read | the same |
| `FlatStateDict` | such tensors by name, and a JSON tree of all else in a state dict | the same |
| `WriteItem` | a box that one rank writes; `WriteResult`: the written file | `formats/_sharded_folder` |
| `SavePlan` | the items of all ranks, and the small files of a training state | `_save_plan` |
| `ModelLoadPlan` | a checkpoint compared with a model, ready to be copied into it | `_model` |
| `OptimizerLoadPlan` | the same of an optimizer | `_optimizer` |

The reader for torch's distributed checkpoints, which take a second to import, and whole state dicts are
imported on first use.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name
from colossalai.checkpoint_io._checkpoint_io import CheckpointIO as CheckpointIO
from colossalai.checkpoint_io._checkpoint_io import GeneralCheckpointIO as GeneralCheckpointIO
from colossalai.checkpoint_io._collective import called_by_all_ranks as called_by_all_ranks
from colossalai.checkpoint_io._collective import on_every_rank as on_every_rank
from colossalai.checkpoint_io._collective import on_writer as on_writer
from colossalai.checkpoint_io._model import MODEL as MODEL
from colossalai.checkpoint_io._model import ModelLoadPlan as ModelLoadPlan
from colossalai.checkpoint_io._model import OpenedModel as OpenedModel
from colossalai.checkpoint_io._model import fill_model as fill_model
from colossalai.checkpoint_io._model import gathered_weights as gathered_weights
from colossalai.checkpoint_io._model import load_model as load_model
from colossalai.checkpoint_io._model import open_model as open_model
from colossalai.checkpoint_io._model import opened_tensors as opened_tensors
from colossalai.checkpoint_io._model import save_model as save_model
from colossalai.checkpoint_io._optimizer import load_optimizer as load_optimizer
from colossalai.checkpoint_io._optimizer import save_optimizer as save_optimizer
from colossalai.checkpoint_io._retention import step_folder as step_folder
from colossalai.checkpoint_io._single_file import load_checkpoint as load_checkpoint
from colossalai.checkpoint_io._single_file import save_checkpoint as save_checkpoint
from colossalai.checkpoint_io._state import LoadReport as LoadReport
from colossalai.checkpoint_io._state import module_names as module_names
from colossalai.checkpoint_io._state import parameter_names as parameter_names
from colossalai.checkpoint_io._state import set_prefix as set_prefix
from colossalai.checkpoint_io._state import set_tied_names as set_tied_names
from colossalai.checkpoint_io._training_state import TrainingState as TrainingState
from colossalai.checkpoint_io._training_state import latest_training_state as latest_training_state
from colossalai.checkpoint_io._training_state import load_training_state as load_training_state
from colossalai.checkpoint_io._training_state import resume_training_state as resume_training_state
from colossalai.checkpoint_io._training_state import save_training_state as save_training_state
from colossalai.checkpoint_io.formats import Stateful as Stateful
from colossalai.checkpoint_io.formats import load_lr_scheduler as load_lr_scheduler
from colossalai.checkpoint_io.formats import save_lr_scheduler as save_lr_scheduler
from colossalai.checkpoint_io.resharding import StoredTensor as StoredTensor
from colossalai.checkpoint_io.resharding import fill as fill
from colossalai.checkpoint_io.resharding import names_by_tensor as names_by_tensor
from colossalai.checkpoint_io.storage import atomic_file as atomic_file
from colossalai.checkpoint_io.storage import atomic_folder as atomic_folder
from colossalai.checkpoint_io.storage import check_saves as check_saves
from colossalai.checkpoint_io.storage import wait_for_saves as wait_for_saves

_LAZY = {
    "ChunkStorageReader": "colossalai.checkpoint_io._dcp_storage_reader",
    "load_whole_state_dict": "colossalai.checkpoint_io._state_dict",
    "whole_state_dict": "colossalai.checkpoint_io._state_dict",
}

if TYPE_CHECKING:
    from colossalai.checkpoint_io._dcp_storage_reader import ChunkStorageReader as ChunkStorageReader
    from colossalai.checkpoint_io._state_dict import load_whole_state_dict as load_whole_state_dict
    from colossalai.checkpoint_io._state_dict import whole_state_dict as whole_state_dict


def __getattr__(name: str) -> Any:
    """Import a name at its first use (PEP 562)."""
    return find_name(__name__, _LAZY, name)
