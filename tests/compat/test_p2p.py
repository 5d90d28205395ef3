"""Messages between stages by hand, and the state dict of all stages on the first one."""

import pytest
import torch

import colossalai
from colossalai import communication
from colossalai.communication import ledger, p2p
from colossalai.core import global_context as gpc
from colossalai.utils import gather_pipeline_parallel_state_dict
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
SHAPE = (2, 3)


def _launch(num_stages, backend="nccl"):
    colossalai.launch_from_torch({"parallel": {"pipeline": num_stages}}, backend=backend)
    return gpc.get_local_rank(colossalai.context.ParallelMode.PIPELINE)


def _full(value, dtype=torch.float32):
    return torch.full(SHAPE, float(value), dtype=dtype)


def _pass_along():
    stage = _launch(3)
    first, last = stage == 0, stage == 2
    received = p2p.recv_forward(SHAPE, dtype=torch.float64)
    assert (received is None) == first
    if not first:
        assert received.requires_grad
        assert torch.equal(received.detach(), _full(stage - 1, torch.float64))
    with ledger() as sent:
        communication.send_forward(_full(stage, torch.float64))
    assert sum(entry.num_bytes for entry in sent.entries) == (0 if last else 6 * 8)

    grad = p2p.recv_backward(SHAPE)
    assert (grad is None) == last
    assert last or torch.equal(grad, _full(10 * (stage + 1)))
    p2p.send_backward(_full(10 * stage))


def _both_directions():
    stage = _launch(3)
    first, last = stage == 0, stage == 2
    shapes = [SHAPE, (4,)]
    received, grads = p2p.send_forward_backward_recv_forward_backward(
        [_full(stage), torch.full((4,), 0.5 + stage)],
        [_full(-stage), torch.full((4,), -0.5 - stage)],
        shapes,
        shapes,
    )
    assert (received is None, grads is None) == (first, last)
    for tensors, sign, neighbour in ((received, 1, stage - 1), (grads, -1, stage + 1)):
        if tensors is not None:
            assert torch.equal(tensors[0].detach(), _full(sign * neighbour))
            assert torch.equal(tensors[1].detach(), torch.full((4,), sign * (0.5 + neighbour)))


def _in_pairs():
    """Each pair of calls that meet on two neighbours."""
    stage = _launch(2)
    if stage == 0:
        grad = p2p.send_forward_recv_backward(_full(1), SHAPE)
        assert torch.equal(grad, _full(2))
        assert p2p.send_forward_recv_forward(_full(3), SHAPE, next_rank=1) is None
        assert p2p.send_forward_recv_backward(_full(3), SHAPE, recv_next=False) is None
        assert torch.equal(p2p.send_backward_recv_backward(_full(0), SHAPE), _full(4))
    else:
        assert torch.equal(p2p.recv_forward(SHAPE).detach(), _full(1))
        received = p2p.send_backward_recv_forward(_full(2), SHAPE)
        assert torch.equal(received.detach(), _full(3))
        received = p2p.send_forward_recv_forward(_full(0), SHAPE, prev_rank=0)
        assert torch.equal(received.detach(), _full(3))
        p2p.send_backward(_full(4), prev_rank=0, scatter_gather_tensors=True)


def _gather_state(backend):
    stage = _launch(2, backend)
    own = {  # the weight is a view that is not contiguous
        f"{stage}.weight": (torch.arange(6.0).view(SHAPE) + stage).T,
        f"{stage}.bias": torch.arange(stage + 1.0, dtype=torch.bfloat16),
        f"{stage}.empty": torch.empty(0, 2),
        f"{stage}.step": stage,
    }
    whole = gather_pipeline_parallel_state_dict(own)
    if stage > 0:
        assert whole == {}
        return
    assert list(whole) == [
        f"{each}.{name}" for each in (0, 1) for name in ("weight", "bias", "empty", "step")
    ]
    assert torch.equal(whole["1.weight"], torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]))
    assert torch.equal(whole["1.bias"], torch.arange(2.0, dtype=torch.bfloat16))
    assert whole["1.empty"].shape == (0, 2)
    assert whole["1.step"] == 1


@pytest.mark.parametrize("program", [_pass_along, _both_directions])
def test_messages_of_three_stages(program):
    run_ranks(program, 3)


def test_two_stages():
    run_ranks(_in_pairs, 2)


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_the_state_of_both_stages_is_gathered(backend):
    run_ranks(_gather_state, 2, backend)


def test_without_a_pipeline_nothing_is_sent():
    state = {"weight": _full(1)}
    assert gather_pipeline_parallel_state_dict(state) == state
