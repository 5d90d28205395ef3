"""`state_dict` and `load_state_dict` of a boosted model: of the whole model, whatever a rank holds of it."""

from pathlib import Path

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

PLANS = {
    "tp": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"),
    "pp": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32"),
    "tp with ZeRO 1": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="bf16"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "fsdp": TorchFSDPPlugin,
}
IN_PARTS = ("tp", "pp", "tp with ZeRO 1")
NUM_RANKS = {"tp with ZeRO 1": 4}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=15, n_positions=8, **options))


def value(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def states(plan, folder):
    colossalai.launch_from_torch({}, verbose=False)
    model = gpt2()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {name: tensor + torch.rand(tensor.shape) for name, tensor in first.items()}
    for tied in ("lm_head.weight", "transformer.wte.weight"):
        other[tied] = other["lm_head.weight"]
    booster = Booster(plugin=PLANS[plan]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    tolerance = {"rtol": 0.02, "atol": 0.02} if "ZeRO" in plan else {"rtol": 0, "atol": 0}

    def is_held(expected):
        state = boosted.state_dict()
        assert list(state) == list(expected)
        for name, tensor in state.items():
            torch.testing.assert_close(value(tensor).to(expected[name]), expected[name], **tolerance)

    is_held(first)
    found = boosted.load_state_dict(other)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    is_held(other)
    if plan in IN_PARTS:
        prefixed = boosted.state_dict(prefix="of.")
        assert list(prefixed) == [f"of.{name}" for name in other]
        if plan != "pp":  # whose stages have tensors of their own
            assert prefixed["of.lm_head.weight"] is prefixed["of.transformer.wte.weight"]
        with pytest.raises(ValueError, match=r"transformer\.ln_f\.bias"):
            boosted.load_state_dict({name: other[name] for name in other if name != "transformer.ln_f.bias"})
        found = boosted.load_state_dict({**first, "head": torch.ones(1)}, strict=False)
        assert found.unexpected_keys == ["head"]
        boosted.load_state_dict({name: tensor.double() for name, tensor in first.items()})  # as torch does
        is_held(first)
        with pytest.raises(ValueError, match=r"another shape.*: lm_head\.weight"):
            boosted.load_state_dict({**first, "lm_head.weight": torch.ones(1)}, strict=False)
        is_held(first)
        with pytest.raises(ValueError, match="assign=True"):
            boosted.load_state_dict(other, assign=True)
        boosted.load_state_dict(other)
    if plan == "tp with ZeRO 1":  # a step writes masters into parameters
        booster.backward(boosted(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum(), optimizer)
        optimizer.step()
        is_held(other)
    with pytest.raises(
        ValueError, match=r"save_pretrained: .* let every rank call booster\.save_model\(model, folder, s"
    ):
        boosted.save_pretrained(folder)
    is_writer = gpc.mesh.rank == 0
    if is_writer:
        boosted.save_pretrained(folder / "given", state_dict=first)
    booster.save_model(boosted, folder, shard=True, use_safetensors=True)
    gpc.destroy()
    for name, tensor in type(gpt2()).from_pretrained(folder, dtype=torch.float32).state_dict().items():
        torch.testing.assert_close(tensor, other[name], **tolerance)
    if is_writer:
        given = type(gpt2()).from_pretrained(folder / "given").state_dict()
        assert all(torch.equal(given[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("plan", ["tp", "pp", *map(further, ("tp with ZeRO 1", "gemini", "fsdp"))])
def test_states_are_of_the_whole_model(plan, tmp_path: Path):
    run_ranks(states, NUM_RANKS.get(plan, 2), plan, tmp_path)
