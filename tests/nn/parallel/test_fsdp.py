"""Fully sharded data parallelism: what torch's FSDP cannot take is refused at the door, in a sentence."""

import tempfile

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import HybridAdam
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

STAGE_1 = "use LowLevelZeroPlugin (in a config, zero=dict(stage=1))"


def blocks_of():
    """Two blocks in a stack, a layer behind them."""
    torch.manual_seed(0)
    stack = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    return nn.Sequential(nn.Sequential(*stack), nn.Linear(4, 4))


def tied_across():
    model = blocks_of()
    model[0][1][0].weight = model[0][0][0].weight
    return model


def tied_with_a_block():
    model = blocks_of()
    model[1].weight = model[0][0][0].weight
    return model


def mixed(part):
    model = blocks_of()
    model.get_submodule(part).bfloat16()
    return model


def not_contiguous():
    model = blocks_of()
    model[1].weight = nn.Parameter(model[1].weight.detach().t())
    return model


def sparse():
    return nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))


def hooked(register):
    model = blocks_of()
    getattr(model[1].weight, register)(lambda _: None)
    return model


class Derived(torch.optim.Adafactor):
    pass


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


CASES = {
    **{
        f"{build.__name__} cannot update the slices of parameters that FSDP holds: {STAGE_1}": (
            lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)),
            build,
        )
        for build in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.Rprop, Derived)
    },
    "FSDP holds: use TorchDDPPlugin, or an optimizer such as AdamW": (blocks_of, torch.optim.LBFGS),
    "has states before its first step, as Adagrad": (blocks_of, torch.optim.Adagrad),
    "0.0.0.weight and 0.1.0.weight are one parameter, in two parts": (tied_across, sgd),
    f"(0.0 and the model outside of its blocks): {STAGE_1}": (tied_with_a_block, sgd),
    "0.1 has parameters of several dtypes (0.1.0.weight in torch.float32 and 0.1.2.weight in torch.b": (
        lambda: mixed("0.1.2"),
        sgd,
    ),
    "the parameter 1.weight is not contiguous": (not_contiguous, sgd),
    "0 gives sparse gradients": (sparse, sgd),
    "the parameter 0.weight is torch.complex64: optimizers view complex numbers as pairs of real ones, which "
    f"torch does wrongly for the slices that FSDP holds: {STAGE_1}": (
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False, dtype=torch.complex64)),
        torch.optim.AdamW,
    ),
    "the parameter 1.weight has a hook of its gradient, which FSDP never calls, as it puts another parameter "
    f"in place of this one: {STAGE_1}": (lambda: hooked("register_hook"), sgd),
    "the parameter 1.weight has a hook of its gradient, which FSDP never calls": (
        lambda: hooked("register_post_accumulate_grad_hook"),
        sgd,
    ),
}


def refused():
    colossalai.launch_from_torch({"zero": {"stage": 3}}, verbose=False)
    told = []
    for build_model, build_optimizer in CASES.values():
        for door in ("booster", "engine"):
            model = build_model()
            optimizer = build_optimizer(model.parameters())
            try:
                if door == "booster":
                    Booster(plugin=TorchFSDPPlugin()).boost(model, optimizer)
                else:
                    colossalai.initialize(model, optimizer, verbose=False)
                told.append("nothing")
            except ValueError as error:
                told.append(str(error))
    gpc.destroy()
    return told


def test_what_it_cannot_take_is_refused_by_both_doors():
    for told in run_ranks(refused, 2):
        for number, words in enumerate(CASES):
            assert words in told[2 * number]
            assert told[2 * number] == told[2 * number + 1]


def weights_after_training(fraction, folder):
    model = blocks_of()
    options = {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder} if fraction else {}
    booster = Booster(plugin=TorchFSDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=0.1, **options))
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + gpc.get_global_rank()))
        booster.backward(boosted(x).square().mean(), optimizer)
        optimizer.step()
    return torch.cat([param.full_tensor().flatten() for param in model.parameters()])


def on_disk():
    colossalai.launch_from_torch({}, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        weights = [weights_after_training(fraction, folder) for fraction in (0.0, 1.0)]
    gpc.destroy()
    return torch.equal(*weights)


def test_states_on_disk_give_the_same_bits_as_in_memory():
    assert run_ranks(on_disk, 2) == [True, True]


def used_by_hand():
    """Return what torch's own calls on a model under FSDP give: differences, messages, numbers of calls."""
    colossalai.launch_from_torch({}, verbose=False)
    model, twin = blocks_of().double(), blocks_of().double()
    boosted, optimizer, *_ = Booster(plugin=TorchFSDPPlugin()).boost(model, sgd(model.parameters()))
    ours = sgd(twin.parameters())
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    heard = []
    for _ in range(2):  # the second after refusals
        boosted.load_state_dict(twin.state_dict())
        for param in boosted.parameters():
            with pytest.raises(
                ValueError, match=r"register_hook of the parameter .*post_accumulate_grad_hook, which"
            ):
                param.register_hook(lambda _: None)
        with pytest.raises(
            ValueError, match=rf"create_graph=True through a model that FSDP .* {STAGE_1[:22]}"
        ):
            torch.autograd.grad(boosted(x).sum(), x, create_graph=True)
        handles = [each.register_post_accumulate_grad_hook(heard.append) for each in boosted.parameters()]
        (slope,) = torch.autograd.grad(boosted(x).sum(), x)
        torch.testing.assert_close(torch.func.grad(lambda y: boosted(y).sum())(x.detach()), slope)
        heard.clear()
        (boosted(x).square().mean() + (slope * boosted(x)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        (twin(x).square().mean() + (slope * twin(x)).sum()).backward()
        ours.step()
        ours.zero_grad()
    pairs = zip(boosted.parameters(), twin.parameters(), strict=True)
    difference = max((param.full_tensor() - expected).abs().max().item() for param, expected in pairs)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.bias"):
        boosted.load_state_dict({**twin.state_dict(), "1.bias": torch.zeros(5)})
    num_missed = len(set(boosted.parameters()) - set(heard))
    gpc.destroy()
    return difference, num_missed


def test_calls_of_torch_give_what_they_give_in_one_process_or_are_refused():
    for difference, num_missed in run_ranks(used_by_hand, 2):
        assert difference < 1e-14
        assert num_missed == 0
