"""The context of a job: its config, its mesh of ranks, its random states, and the launch."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.context._check import UnknownArgumentError as UnknownArgumentError
from colossalai.context._check import check_bool as check_bool
from colossalai.context._check import check_keys as check_keys
from colossalai.context._check import check_mapping as check_mapping
from colossalai.context._check import check_number as check_number
from colossalai.context._check import check_positive as check_positive
from colossalai.context._check import names_arguments as names_arguments
from colossalai.context._config import OVERRIDES_VARIABLE as OVERRIDES_VARIABLE
from colossalai.context._config import Config as Config
from colossalai.context._config import ConfigException as ConfigException
from colossalai.context._config import join_overrides as join_overrides
from colossalai.context._config import nearest as nearest
from colossalai.context._features import check_compile as check_compile
from colossalai.context._features import plan_fields as plan_fields
from colossalai.context._group_initializer import INITIALIZER_MAPPING as INITIALIZER_MAPPING
from colossalai.context._group_initializer import ProcessGroupInitializer as ProcessGroupInitializer
from colossalai.context._launch import get_default_parser as get_default_parser
from colossalai.context._launch import launch as launch
from colossalai.context._launch import launch_from_openmpi as launch_from_openmpi
from colossalai.context._launch import launch_from_slurm as launch_from_slurm
from colossalai.context._launch import launch_from_torch as launch_from_torch
from colossalai.context._launch import relayout as relayout
from colossalai.context._layout import SEQUENCE_ATTENTIONS as SEQUENCE_ATTENTIONS
from colossalai.context._layout import Layout as Layout
from colossalai.context._layout import LayoutNames as LayoutNames
from colossalai.context._layout import read_layout as read_layout
from colossalai.context._mesh import Axis as Axis
from colossalai.context._mesh import Mesh as Mesh
from colossalai.context._mesh import make_group as make_group
from colossalai.context._moe_env import MOE_CONTEXT as MOE_CONTEXT
from colossalai.context._moe_env import MoeInfo as MoeInfo
from colossalai.context._moe_env import is_in_backward as is_in_backward
from colossalai.context._parallel_context import ParallelContext as ParallelContext
from colossalai.context._parallel_context import get_current_device as get_current_device
from colossalai.context._parallel_context import global_context as global_context
from colossalai.context._parallel_mode import TENSOR_LAYOUTS as TENSOR_LAYOUTS
from colossalai.context._parallel_mode import ParallelMode as ParallelMode
from colossalai.context._parallel_mode import TensorLayout as TensorLayout
from colossalai.context._random import add_seed as add_seed
from colossalai.context._random import draw_together as draw_together
from colossalai.context._random import drawing_apart as drawing_apart
from colossalai.context._random import drawing_by_batch as drawing_by_batch
from colossalai.context._random import drawing_expert as drawing_expert
from colossalai.context._random import drawing_together as drawing_together
from colossalai.context._random import get_current_mode as get_current_mode
from colossalai.context._random import get_seeds as get_seeds
from colossalai.context._random import get_states as get_states
from colossalai.context._random import moe_set_seed as moe_set_seed
from colossalai.context._random import random_state as random_state
from colossalai.context._random import replay as replay
from colossalai.context._random import reset_seeds as reset_seeds
from colossalai.context._random import seed as seed
from colossalai.context._random import set_mode as set_mode
from colossalai.context._random import set_seed as set_seed
from colossalai.context._random import set_seed_states as set_seed_states
from colossalai.context._random import snapshot as snapshot
from colossalai.context._random import sync_states as sync_states
from colossalai.context._random import with_seed as with_seed
from colossalai.context._random_saved import fitting_random_state as fitting_random_state
from colossalai.context._random_saved import is_of_this_place as is_of_this_place
from colossalai.context._random_saved import say_other_layout as say_other_layout
from colossalai.context._random_saved import set_random_state as set_random_state
from colossalai.context._supervision import before_end as before_end
from colossalai.context._supervision import fail_at_end as fail_at_end
from colossalai.context._supervision import is_in_job as is_in_job
from colossalai.context._supervision import is_watched as is_watched

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that do not exist yet
