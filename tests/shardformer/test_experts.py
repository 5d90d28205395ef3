"""Models of transformers with experts train under expert parallelism as on one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.shardformer import Rule, register_rule, shard_experts
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.subjects import pipeline, zero
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks
from tests.shardformer.models import (
    VOCAB,
    InDouble,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    language_loss,
    mixtral_of_eight,
    mixtral_with_lora,
    planned,
    qwen2_moe,
    qwen3_moe,
    qwen3_omni_moe,
    qwen3_vl_moe,
)
from tests.tiers import further, in_soak
from tests.turns import each_in_turn, grouped
from tests.zero.gemini.test_parity import subject_of as subject_of_chunks

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist


def train(build: Callable[[], nn.Module], config: dict[str, Any], ep_size: int) -> list[float]:
    """Train for three steps; all experts must be cut."""
    parallel = {"moe": {"size": ep_size}, **config.get("parallel", {})}
    config = {"clip_grad_norm": 0.5, **config, "parallel": parallel}
    colossalai.launch_from_torch(config, verbose=False)
    ids = torch.randint(VOCAB, (3, 8, 6), generator=torch.Generator().manual_seed(1))
    case = ParityCase(
        build_model=build,
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: language_loss(model(batch[0]), batch[1]),
        batches=[(part, part.roll(-1, dims=1)) for part in ids],
        max_norm=0.5,
    )

    def apply(model: nn.Module) -> Subject:
        through = (
            zero.through_engine if config.get("zero", {}).get("stage") in (1, 2) else pipeline.through_engine
        )
        if config.get("zero") and "pipeline" in parallel:
            through = zero.through_pipeline
        if "gemini" in config:
            through = partial(zero.through_engine, make_subject=subject_of_chunks)
        subject = through(case, model, language_loss)
        for name, param in model.named_parameters():
            spec = spec_of(param)
            assert (
                ".experts." not in name or "pipeline" in parallel or (spec is not None and "ep" in spec.axes)
            ), name
        return subject

    with nullcontext() if config.get("recompute") else InDouble():
        losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


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


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
PIPELINE = {"parallel": {"pipeline": {"size": 2, "partition": "uniform"}}, "NUM_MICRO_BATCHES": 2}
CELLS: list[Any] = [
    (mixtral_with_lora, 2, 2, {}),
    further(qwen3_moe, 2, 2, {"gradient_accumulation": 2}),
    (deepseek_v3, 2, 2, {"zero": {"stage": 2}}),
    further(gpt_oss, 2, 2, {"recompute": True}),
    (gpt_oss, 4, 2, {"parallel": TENSOR}),
    (glm4_moe, 4, 2, {"parallel": TENSOR}),
    further(qwen3_vl_moe, 4, 2, {"parallel": TENSOR}),
    further(qwen3_omni_moe, 4, 2, {"parallel": TENSOR}),
    further(mixtral_of_eight, 4, 2, {**PIPELINE, "zero": {"stage": 1}}),  # as in tests/parity/experts
    # Mixtral beside each other method, Gemini and ZeRO 3 among them: in tests/parity/test_pairs.py.
    further(mixtral_of_eight, 4, 4, {"zero": {"stage": 1}}),
    further(mixtral_of_eight, 4, 2, {"parallel": TENSOR}),
    further(mixtral_of_eight, 4, 2, PIPELINE),
    further(mixtral_with_lora, 4, 2, {"zero": {"stage": 1}}),
    further(qwen3_moe, 4, 2, {"zero": {"stage": 3}}),
    further(deepseek_v3, 4, 2, {"zero": {"stage": 2}}),
    further(mixtral_of_eight, 4, 2, {"gemini": {"precision": "fp32", "min_chunk_size_mb": 0.002}}),
    further(gpt_oss, 4, 2, {**PIPELINE, "zero": {"stage": 1}}),
    further(mixtral_of_eight, 8, 2, {**PIPELINE, "parallel": {**PIPELINE["parallel"], **TENSOR}}),
    *(
        further(build, 4, 4, {})  # by two: in tests/verdicts
        for build in (mixtral_of_eight, qwen2_moe, qwen3_moe, deepseek_v3, gpt_oss)
    ),
    further(deepseek_v3, 4, 2, {"parallel": TENSOR}),
    further(qwen2_moe, 8, 2, {"parallel": TENSOR, "zero": {"stage": 1}}),
    in_soak(gpt_oss, 8, 2, {"parallel": TENSOR, "zero": {"stage": 3}}),
    further(mixtral_with_lora, 4, 2, {"zero": {"stage": 3}}),
    further(mixtral_with_lora, 4, 2, {"parallel": TENSOR}),
    further(
        qwen3_moe,
        4,
        2,
        {**PIPELINE, "parallel": {"pipeline": {"size": 2, "partition": "uniform", "schedule": "zb-h1"}}},
    ),
    further(qwen3_moe, 4, 2, {"parallel": TENSOR}),
]


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, lambda build, num_ranks, *_: num_ranks))
def test_three_steps(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    cells = [(build, config, ep_size) for build, _, ep_size, config in cells]
    for losses in run_ranks(each_in_turn, num_ranks, train, cells)[0]:
        assert len(set(losses)) == 3


class Towers(nn.Module):
    """Experts of a user's own, called as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 6, 6))
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, choice = torch.where(experts == number)
            if len(token):
                found = torch.tanh(hidden[token] @ self.weight[number] + self.bias[number])
                result = result.index_add(0, token, found * weights[token, choice, None])
        return result


class Tower(nn.Module):
    """A net that sends its tokens to experts, all of them to one of the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.towers, self.after = nn.Linear(5, 6), Towers(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        weights, experts = hidden[:, :2].softmax(-1).topk(1)
        return self.after(self.towers(hidden, experts, weights))


def own_experts() -> list[float]:
    """Train through the plugin door; the second rank has experts that nobody chooses."""
    register_rule(Towers, Rule(experts=("weight", "bias")))
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(ep_size=2, zero_stage=1, max_norm=0.5)
    batches = [
        (torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator))
        for generator in [torch.Generator().manual_seed(4)]
        for _ in range(3)
    ]
    case = ParityCase(
        build_model=Tower,
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        max_norm=0.5,
    )
    losses = check_parity(case, partial(zero.through_booster, case, plugin, 2))
    gpc.destroy()
    return losses


def test_a_rule_for_experts_of_a_users_own() -> None:
    losses = run_ranks(own_experts, 2)
    assert len(set(losses[0])) == 3


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
