"""Experts of transformers: the bias of a router keeps its type, and what cannot be cut is refused.

Their training: in tests/parity/experts/table.py.
"""

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.shardformer import shard_experts
from colossalai.tensor import spec_of
from tests.ranks import run_ranks
from tests.shardformer.models import VOCAB, deepseek_v3, language_loss, mixtral_of_eight, planned

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist


def in_sixteen_bits() -> list[float]:
    """Train a DeepSeek-V3 in bfloat16 with masters; its bias takes part in the choice of experts."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(ep_size=2, precision="bf16_master"))
    torch.manual_seed(0)
    plain = deepseek_v3()
    bias = plain.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(0.3 + 0.001 * torch.arange(8))  # steps that bfloat16 does not have there
    model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    kept = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert kept.dtype == torch.float32
    assert torch.equal(kept, 0.3 + 0.001 * torch.arange(8))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(gpc.get_global_rank()))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = language_loss(model(ids), ids)
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    gpc.destroy()
    return losses


def test_the_bias_of_a_router_keeps_float32() -> None:
    for losses in run_ranks(in_sixteen_bits, 2):
        assert losses[-1] < losses[0]


@pytest.mark.unit
def test_what_cannot_be_cut_is_refused_before_anything_is_changed() -> None:
    import transformers

    mesh = Mesh({"edp": 1, "ep": 3, "pp": 1, "tp": 2}, rank=0, views={"dp": ("edp", "ep")})
    model = mixtral_of_eight()
    with pytest.raises(ValueError, match=r"has 8 experts, which 6 ranks do not divide.*\[2, 4, 8\]"):
        shard_experts(model, mesh)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 1}
    config = transformers.Llama4TextConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    other = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.feed_forward\.experts', a Llama4TextExperts"):
        shard_experts(other, mesh)
    assert all(spec_of(param) is None for each in (model, other) for param in each.parameters())
    # Without expert parallelism nobody asked for it, and each tensor-parallel rank computes them all.
    assert shard_experts(other, Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 2}, rank=0)) == 0


@pytest.mark.unit
def test_tensor_parallel_ranks_share_experts_where_they_divide_them() -> None:
    mesh = Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 2}, rank=1)
    model = mixtral_of_eight()
    assert shard_experts(model, mesh) == 2
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 4
    assert shard_experts(planned("Mixtral", num_local_experts=3), mesh) == 0
    assert shard_experts(mixtral_of_eight(), Mesh({"edp": 2, "ep": 1, "pp": 1, "tp": 1}, rank=1)) == 0
