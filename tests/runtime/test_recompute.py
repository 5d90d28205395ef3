"""Recomputation: the same gradients, dropout masks included, for fewer saved activations."""

import copy

import pytest
import torch
from torch import nn

import colossalai
from colossalai.runtime import apply_recompute, checkpoint, find_blocks
from tests.runtime.test_segments import WIDTH, Block, Net, alone, check
from tests.shardformer.models import gemma3, language_loss

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("launched")]


@pytest.mark.parametrize(
    ("select", "times"),
    [(True, [2] * 6), (["blocks.0", "blocks.2"], [2, 1, 2, 1, 1, 1]), ("blocks.1", [1, 2, 1, 1, 1, 1])],
)
def test_gradients_and_later_random_numbers_are_the_same(select, times):
    model = Net(alone).double()
    twin = copy.deepcopy(model)
    apply_recompute(model, select)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    check(model, twin, lambda model: model(x).sum())
    assert [block.calls for block in model.blocks] == times  # forward, and again for the backward
    assert list(dict(model.named_parameters())) == list(dict(twin.named_parameters()))


def test_fewer_activations_are_saved():
    def saved_bytes(model):
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(64, WIDTH, requires_grad=True))
        return total

    assert saved_bytes(apply_recompute(Net(alone), True)) < 0.5 * saved_bytes(Net(alone))


def test_checkpoint_as_documented():
    block, x = Block().eval(), torch.randn(2, 6, requires_grad=True)
    for offload in (False, True):
        checkpoint(block, offload, x).sum().backward()
        assert x.grad is not None
        x.grad = None


def test_checkpoint_in_other_documented_forms(capfd):
    block, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(2, 6, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    for options in ({"use_reentrant": False}, {"use_reentrant": True}, {"determinism_check": "default"}):
        found = torch.autograd.grad(checkpoint(block, False, x, **options).sum(), x)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert capfd.readouterr().err.count("use_reentrant=True has no effect") == 1


def test_what_checkpoint_cannot_take_is_said():
    block, x = Block(), torch.randn(2, 6)
    with pytest.raises(ValueError, match=r"activation_offload is a Tensor; .* checkpoint\(block, False, x\)"):
        checkpoint(block, x)
    with pytest.raises(ValueError, match="which cannot be called: pass a module"):
        checkpoint(block(x), False, x)
    with pytest.raises(ValueError, match="all random states by itself: leave preserve_rng_state out"):
        checkpoint(block, False, x, preserve_rng_state=True)


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_module_recomputes_while_it_trains(offload):
    class Own(colossalai.nn.CheckpointModule):
        def __init__(self, checkpoint):
            super().__init__(checkpoint, offload)
            self.block = Block()

        def _forward(self, x):
            return self.block(x)

    own, plain, x = Own(True), Own(False), torch.randn(2, 6)
    plain.load_state_dict(own.state_dict())
    check(own, plain, lambda model: model(x).sum())
    assert (own.block.calls, plain.block.calls) == (2, 1)
    own.eval()(x).sum().backward()
    assert own.block.calls == 3
    with pytest.raises(NotImplementedError, match="CheckpointModule and must define _forward"):
        colossalai.nn.CheckpointModule()(x)


def test_blocks_are_found():
    model = Net(alone)
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert len(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == 2


def test_refusals():
    with pytest.raises(ValueError, match="no stack of blocks"):
        apply_recompute(nn.Linear(2, 2), True)
    with pytest.raises(ValueError, match=r"'block\.0', which is not a sub-module; there are \['blocks'"):
        apply_recompute(Net(alone), ["block.0"])
    with pytest.raises(ValueError, match=r"recompute names 'block', which is not a sub-module"):
        apply_recompute(Net(alone), "block")
    with pytest.raises(ValueError, match=r"'blocks', a ModuleList, which is never called .* \['blocks\.0',"):
        apply_recompute(Net(alone), "blocks")


def test_blocks_beside_other_parts_of_a_stack_are_found():
    stack = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 6), Net(alone))
    assert find_blocks(stack) == [stack[1], stack[2], *stack[4].blocks]
    assert find_blocks(nn.Sequential(nn.Linear(6, 6), Block())) == []


@pytest.mark.unit
def test_a_model_that_caches_keys_keeps_none_in_training():
    """A block that runs again would attend to the keys of its first run, too, which windows show."""
    pytest.importorskip("transformers")
    model = gemma3().double()
    ids = torch.arange(12).reshape(2, 6)
    language_loss(model(ids), ids).backward()
    truth = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    apply_recompute(model, True)
    language_loss(model(ids), ids).backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), truth, strict=True))
    assert model(ids).get("past_key_values") is None
    assert model.eval()(ids).get("past_key_values") is not None
