"""Checkpoints opened without a model: inspected, converted, merged, compared, verified."""

from colossalai.checkpoint_io.tools._convert import Conversion as Conversion
from colossalai.checkpoint_io.tools._convert import convert_checkpoint as convert_checkpoint
from colossalai.checkpoint_io.tools._convert import size_of as size_of
from colossalai.checkpoint_io.tools._merge import differences as differences
from colossalai.checkpoint_io.tools._merge import merge_states as merge_states
from colossalai.checkpoint_io.tools._open import Opened as Opened
from colossalai.checkpoint_io.tools._open import open_checkpoint as open_checkpoint
from colossalai.checkpoint_io.tools._verify import verify_checkpoint as verify_checkpoint
