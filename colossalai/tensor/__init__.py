"""Tensors that are cut over ranks: what a rank holds of them, and what holds for the whole."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.tensor._attributes import CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
from colossalai.tensor._attributes import CHECKPOINT_TIED_NAMES as CHECKPOINT_TIED_NAMES
from colossalai.tensor._attributes import CHUNK_PLACE as CHUNK_PLACE
from colossalai.tensor._attributes import DDP_IGNORED as DDP_IGNORED
from colossalai.tensor._attributes import LAZY_TAPE as LAZY_TAPE
from colossalai.tensor._attributes import PART_OF_CUT_MODEL as PART_OF_CUT_MODEL
from colossalai.tensor._attributes import PIPELINE_SHARE as PIPELINE_SHARE
from colossalai.tensor._flat_range import FlatRange as FlatRange
from colossalai.tensor._flat_range import FlatValues as FlatValues
from colossalai.tensor._flat_range import flat_values as flat_values
from colossalai.tensor._flat_range import range_of_states as range_of_states
from colossalai.tensor._flat_range import set_flat_values as set_flat_values
from colossalai.tensor._flat_range import set_range_of_states as set_range_of_states
from colossalai.tensor._nested import map_leaves as map_leaves
from colossalai.tensor._nested import map_tensors as map_tensors
from colossalai.tensor._nested import parts_of as parts_of
from colossalai.tensor._nested import rebuilt as rebuilt
from colossalai.tensor._norm import count_zero_grads as count_zero_grads
from colossalai.tensor._norm import global_grad_norm as global_grad_norm
from colossalai.tensor._norm import scale_grads as scale_grads
from colossalai.tensor._padded import PaddedSpec as PaddedSpec
from colossalai.tensor._padded import pad_to as pad_to
from colossalai.tensor._padded import padded_size as padded_size
from colossalai.tensor._sharded_module import SpecKeeper as SpecKeeper
from colossalai.tensor._sharded_module import built_for as built_for
from colossalai.tensor._sharded_module import set_built_for as set_built_for
from colossalai.tensor._spec import GradientSync as GradientSync
from colossalai.tensor._spec import ShardingSpec as ShardingSpec
from colossalai.tensor._spec import cut_dims as cut_dims
from colossalai.tensor._spec import gradient_sync as gradient_sync
from colossalai.tensor._spec import local_grads as local_grads
from colossalai.tensor._spec import local_slice as local_slice
from colossalai.tensor._spec import set_fragment as set_fragment
from colossalai.tensor._spec import set_spec as set_spec
from colossalai.tensor._spec import sharding_groups as sharding_groups
from colossalai.tensor._spec import spec_of as spec_of

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
