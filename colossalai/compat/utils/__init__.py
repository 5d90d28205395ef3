"""Small things that training scripts import; a facade: nothing inside the package imports it."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.cluster import free_port as free_port
from colossalai.compat.utils._checkpoint import (
    gather_pipeline_parallel_state_dict as gather_pipeline_parallel_state_dict,
)
from colossalai.compat.utils._checkpoint import load_checkpoint as load_checkpoint
from colossalai.compat.utils._checkpoint import save_checkpoint as save_checkpoint
from colossalai.compat.utils._dataloader import DataParallelSampler as DataParallelSampler
from colossalai.compat.utils._dataloader import get_dataloader as get_dataloader
from colossalai.compat.utils._device import empty_cache as empty_cache
from colossalai.compat.utils._device import get_current_device as get_current_device
from colossalai.compat.utils._device import synchronize as synchronize
from colossalai.compat.utils._memory import (
    colo_set_process_memory_fraction as colo_set_process_memory_fraction,
)
from colossalai.compat.utils._memory import report_memory_usage as report_memory_usage
from colossalai.compat.utils._parallel import clip_grad_norm as clip_grad_norm
from colossalai.compat.utils._parallel import clip_grad_norm_fp32 as clip_grad_norm_fp32
from colossalai.compat.utils._parallel import conditional_context as conditional_context
from colossalai.compat.utils._parallel import count_zeros_fp32 as count_zeros_fp32
from colossalai.compat.utils._parallel import ensure_path_exists as ensure_path_exists
from colossalai.compat.utils._parallel import is_dp_rank_0 as is_dp_rank_0
from colossalai.compat.utils._parallel import is_model_parallel_parameter as is_model_parallel_parameter
from colossalai.compat.utils._parallel import is_no_pp_or_last_stage as is_no_pp_or_last_stage
from colossalai.compat.utils._parallel import is_tp_rank_0 as is_tp_rank_0
from colossalai.compat.utils._parallel import is_using_ddp as is_using_ddp
from colossalai.compat.utils._parallel import is_using_pp as is_using_pp
from colossalai.compat.utils._parallel import is_using_sequence as is_using_sequence
from colossalai.compat.utils._parallel import print_rank_0 as print_rank_0
from colossalai.compat.utils._parallel import sync_model_param as sync_model_param
from colossalai.context import set_seed as set_seed
from colossalai.runtime import checkpoint as checkpoint
from colossalai.trainer import MultiTimer as MultiTimer
from colossalai.trainer import Timer as Timer

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, "colossalai.utils")  # PEP 562: missing names
