"""Every call of torch.distributed over shared memory gives the bits of a sum written out in rank order."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.communication.shared_memory.programs import programs, run_program
from tests.ranks import run_ranks


@pytest.mark.dist
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate,),
)
@given(drawn=programs())
def test_programs_of_calls(drawn):
    num_ranks, groups, program = drawn
    wrong = run_ranks(run_program, num_ranks, groups, program)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)
