"""Names of all attributes that the package sets on tensors and modules of other libraries.

Metadata that must move with a tensor or a module is an attribute of it. This file has each name once, with
its object, its content, and the file that sets and reads it. `tests/layers` refuses all other attributes.
"""

SHARDING_SPEC = "sharding_spec"
"""A tensor: its `ShardingSpec` (`tensor/_spec.py`)."""

FRAGMENT_OF = "fragment_of"
"""A tensor: the tensor that it is a fragment of, and the process group (`tensor/_spec.py`)."""

RANGE_OF_STATES = "range_of_states"
"""A parameter: the flat range of its optimizer states on this rank (`tensor/_flat_range.py`)."""

FLAT_VALUES = "flat_values"
"""A parameter: function that returns the flat range of its local values (`tensor/_flat_range.py`)."""

KEEPS_DTYPE = "keeps_dtype"
"""A buffer: no precision casts it (`tensor/_sharded_module.py`)."""

BUILT_FOR = "built_for"
"""A module: the extents of the mesh that its specs were made for (`tensor/_sharded_module.py`)."""

CHUNK_PLACE = "chunk_place"
"""A parameter of a model in chunks: the place of its values (`zero/gemini/_hooks.py`)."""

ROW_CACHE = "row_cache"
"""A parameter that caches rows of tables: its `RowCache` (`tensor/_row_cache.py`)."""

CACHED_TABLE = "cached_table"
"""A table to be saved: the parameter that caches it, its key in the module (`tensor/_row_cache.py`)."""

LAZY_TAPE = "lazy_tape"
"""The storage of a lazy tensor: the operations that will write it (`lazy/_tape.py`)."""

PART_OF_CUT_MODEL = "is_part_of_a_cut_model"
"""A module: mark of a part of a model that was split into stages (`pipeline/stages/_chunks.py`)."""

PIPELINE_SHARE = "pipeline_share"
"""A parameter: the stages that share it (`pipeline/stages/_tied_weights.py`)."""

CHECKPOINT_PREFIX = "checkpoint_prefix"
"""The module of a stage: prefix of its names in checkpoints (`checkpoint_io/_state.py`)."""

CHECKPOINT_TIED_NAMES = "checkpoint_tied_names"
"""A parameter: its names in the whole model (`checkpoint_io/_state.py`)."""

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""A module, while DDP reads it: torch's own attribute for ignored parameters (`nn/parallel/_ddp.py`)."""
