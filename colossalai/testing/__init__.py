"""Utilities to test parallel code: ranks, retries, comparisons, parity."""

from colossalai.cluster import free_port as free_port
from colossalai.testing._comparison import assert_close as assert_close
from colossalai.testing._comparison import assert_close_loose as assert_close_loose
from colossalai.testing._comparison import assert_equal as assert_equal
from colossalai.testing._comparison import assert_equal_in_group as assert_equal_in_group
from colossalai.testing._comparison import assert_not_equal as assert_not_equal
from colossalai.testing._comparison import check_state_dict_equal as check_state_dict_equal
from colossalai.testing._conditions import clear_cache_before_run as clear_cache_before_run
from colossalai.testing._conditions import run_on_environment_flag as run_on_environment_flag
from colossalai.testing._conditions import skip_if_not_enough_gpus as skip_if_not_enough_gpus
from colossalai.testing._parameterize import parameterize as parameterize
from colossalai.testing._parity import ParityCase as ParityCase
from colossalai.testing._parity import Subject as Subject
from colossalai.testing._parity import check_parity as check_parity
from colossalai.testing._parity import full_gradients as full_gradients
from colossalai.testing._parity import full_parameters as full_parameters
from colossalai.testing._rerun import rerun_if_address_is_in_use as rerun_if_address_is_in_use
from colossalai.testing._rerun import rerun_on_exception as rerun_on_exception
from colossalai.testing._spawn import spawn as spawn
