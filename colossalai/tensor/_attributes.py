"""The names of all attributes that the package hangs on tensors and modules of others.

What has to travel with a tensor or a module, whoever holds it, hangs on it. Each name is here once, with what
it hangs on and what it says; the file that sets and reads it is the one that is named. `tests/layers` refuses
any other.
"""

SHARDING_SPEC = "sharding_spec"
"""A tensor: its `ShardingSpec` (`tensor/_spec.py`)."""

FRAGMENT_OF = "fragment_of"
"""A tensor: of which one it is a piece, and over which group (`tensor/_spec.py`)."""

RANGE_OF_STATES = "range_of_states"
"""A parameter: the flat range of it that its optimizer states are of (`tensor/_flat_range.py`)."""

FLAT_VALUES = "flat_values"
"""A parameter: finds the flat range of its values that this rank holds (`tensor/_flat_range.py`)."""

KEEPS_DTYPE = "keeps_dtype"
"""A buffer: no precision casts it (`tensor/_sharded_module.py`)."""

BUILT_FOR = "built_for"
"""A module: the extents of the mesh that its specs were made for (`tensor/_sharded_module.py`)."""

CHUNK_PLACE = "chunk_place"
"""A parameter of a model in chunks: where its values are (`zero/gemini/_hooks.py`)."""

LAZY_TAPE = "lazy_tape"
"""The storage of a lazy tensor: the operations that will write it (`lazy/_tape.py`)."""

PART_OF_CUT_MODEL = "is_part_of_a_cut_model"
"""A module: it is a part of a model that has been cut into stages (`pipeline/stages/_chunks.py`)."""

PIPELINE_SHARE = "pipeline_share"
"""A parameter: the stages that share it (`pipeline/stages/_tied_weights.py`)."""

CHECKPOINT_PREFIX = "checkpoint_prefix"
"""The module of a stage: what stands before its names in checkpoints (`checkpoint_io/_state.py`)."""

CHECKPOINT_TIED_NAMES = "checkpoint_tied_names"
"""A parameter: its names in the whole model (`checkpoint_io/_state.py`)."""

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""A module, while DDP reads it: torch's own name for what it leaves alone (`nn/parallel/_ddp.py`)."""
