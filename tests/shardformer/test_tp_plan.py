"""Models that are cut by their own `tp_plan`: what becomes of its entries, what is refused, what is asked."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.shardformer import Rule, can_shard, register_rule, shard_model
from colossalai.shardformer._tp_plan import rules_of_plans
from colossalai.tensor import spec_of
from tests.launched import on_ranks
from tests.ranks import run_ranks
from tests.shardformer.models import (
    VOCAB,
    InDouble,
    Translator,
    bloom,
    gemma,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    olmo2,
    phi,
    phi3,
    planned,
    qwen3,
    wide_opt,
)
from tests.tiers import further

pytest.importorskip("transformers")

TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


def mesh(size: int = 2) -> Mesh:
    return Mesh({"tp": size}, rank=0)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def rules(model: nn.Module) -> dict[str, Rule]:
    return {name: rule for name, _, rule in rules_of_plans(model, ruled=set())}


@pytest.mark.unit
def test_a_plan_becomes_a_rule_for_each_module_that_has_layers():
    found = rules(qwen3(num_hidden_layers=1))
    heads = ("num_attention_heads", "num_key_value_heads")
    assert found == {
        "": Rule(heads=("lm_head",)),
        "model": Rule(embeddings=("embed_tokens",)),
        "model.layers.0.self_attn": Rule(
            columns=("q_proj", "k_proj", "v_proj"),
            rows=("o_proj",),
            head_norms=("q_norm", "k_norm"),
            divisible=heads,
            draws=True,
            attentions=True,
        ),
        "model.layers.0.mlp": Rule(columns=("gate_proj", "up_proj"), rows=("down_proj",), draws=True),
    }
    found = rules(phi3(num_hidden_layers=1))  # all heads are on all ranks, so any number of heads will do
    assert found["model.layers.0.self_attn"] == Rule(heads=("qkv_proj",), splits=("o_proj",))
    assert found["model.layers.0.mlp"] == Rule(heads=("gate_up_proj",), splits=("down_proj",))


@pytest.mark.unit
def test_a_rule_of_a_class_goes_before_the_plan():
    model = planned("Llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    found = rules_of_plans(model, ruled={attention})
    assert sorted(name for name, *_ in found) == ["", "model", "model.layers.0.mlp"]


class VaryingConfig:
    """A config of layers that differ in their heads."""

    per_layer_attributes = ("num_attention_heads",)
    num_key_value_heads = 4

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("which layer's?")


@pytest.mark.unit
def test_what_layers_differ_in_is_not_asked_of_the_whole_config():
    model = qwen3(num_hidden_layers=1)
    model.model.layers[0].self_attn.config = VaryingConfig()
    assert rules(model)["model.layers.0.self_attn"].divisible == ("num_key_value_heads",)


@pytest.mark.unit
def test_experts_stay_whole():
    model = planned("Mixtral", num_local_experts=2, num_hidden_layers=1)
    before = shapes(model)
    assert shard_model(model, mesh()) == 3  # attention, embedding, head
    after = shapes(model)
    changed = {name.rpartition("layers.0.")[2] for name in before if before[name] != after[name]}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert changed == attention | {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.unit
def test_an_embedding_tied_to_a_head_is_cut_where_the_plan_leaves_it_out():
    model = gemma()
    del model.tp_plan["model.embed_tokens"]
    shard_model(model, mesh())
    embedding = model.get_input_embeddings()
    assert embedding.weight is model.lm_head.weight
    assert tuple(embedding.weight.shape) == (13, 64)
    assert embedding.vocab_axes == ("tp",)
    untied = gemma(tie_word_embeddings=False)
    del untied.tp_plan["model.embed_tokens"]
    shard_model(untied, mesh())
    assert tuple(untied.get_input_embeddings().weight.shape) == (VOCAB, 64)
    assert tuple(untied.lm_head.weight.shape) == (13, 64)


@pytest.mark.unit
def test_an_embedding_that_scales_stays_of_its_class():
    model = gemma3()
    kind = type(model.get_input_embeddings())
    shard_model(model, mesh())
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, kind)
    assert type(embedding) is not kind
    again = copy.deepcopy(model).to(torch.float32).get_input_embeddings()
    assert again.mesh is embedding.mesh
    assert spec_of(again.weight).whole_shape == (VOCAB, 64)


class CountsHeads(nn.Module):
    """An attention whose shapes come from a count of heads."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x).unflatten(-1, (self.num_heads, -1)).softmax(-1).flatten(-2))


class Model(nn.Module):
    """Something with a plan."""

    def __init__(self, plan: dict[str, str], **parts: nn.Module) -> None:
        super().__init__()
        self.tp_plan = plan
        self.parts = nn.ModuleDict(parts)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = x + part(x)
        return x * self.scale.sum()


@pytest.mark.unit
def test_all_that_cannot_be_translated_is_named_before_anything_changes():
    plan = {
        "parts.attn.q": "colwise",
        "parts.attn.o": "rowwise",
        "parts.conv": "colwise",
        "parts.table": "embedding_rowwise",
        "parts.linear": "mla_kv_a_proj",
        "parts.experts": "moe_tp_experts",
        "parts.nowhere": "no_such_style",
        "scale": "colwise",
    }
    parts = {"attn": CountsHeads(), "conv": nn.Conv1d(1, 1, 1), "table": nn.Linear(2, 2)}
    model = Model(plan, **parts, linear=nn.Linear(2, 2), experts=nn.Linear(2, 2))
    before = shapes(model)
    with pytest.raises(ValueError, match="of Model by its tp_plan: 5 of its entries") as caught:
        shard_model(model, mesh())
    for part in (
        "parts.attn: the forward of CountsHeads reads num_heads",
        "parts.conv: 'colwise' of a Conv1d, which is no torch.nn.Linear",
        "parts.table: 'embedding_rowwise' of a Linear, which is no torch.nn.Embedding",
        "parts.linear: 'mla_kv_a_proj' is no style that is known",
        "scale: 'colwise' of a parameter, not of a layer",
        "styles that are translated: colwise, packed_colwise",
    ):
        assert part in str(caught.value)
    assert "experts" not in str(caught.value)
    assert shapes(model) == before
    with pytest.raises(ValueError, match="cannot be translated"):
        can_shard(model)


@pytest.mark.unit
def test_a_rule_settles_what_a_plan_does_not_say():
    model = Model({"parts.attn.q": "colwise", "parts.attn.o": "rowwise"}, attn=CountsHeads())
    register_rule(CountsHeads, Rule(columns=("q",), rows=("o",), counts=("num_heads",)), replace=True)
    try:
        assert shard_model(model, mesh()) == 1
        assert model.parts["attn"].num_heads == 2
    finally:
        register_rule(CountsHeads, Rule(), replace=True)  # which cuts nothing: the plan counts again


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "size", "message"),
    [
        (
            qwen3,
            8,
            r"Qwen3Attention 'model\.layers\.0\.self_attn' .* its config\.num_key_value_heads is 4, wh",
        ),
        (gemma, 3, r"its config\.num_attention_heads is 8, which they do not divide; choose a tensor size"),
        (phi3, 3, r"'model.layers.0.self_attn' .* its number of input features of o_proj is 64, which"),
    ],
)
def test_heads_that_the_ranks_do_not_divide_are_refused_before_anything_changes(
    build: Callable[[], nn.Module], size: int, message: str
) -> None:
    model = build()
    before = shapes(model)
    with pytest.raises(ValueError, match=message):
        shard_model(model, mesh(size))
    assert shapes(model) == before


class Fused(nn.Module):
    """A query wider than key and value, in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.width = nn.Linear(8, 20), nn.Linear(8, 8), 8


@pytest.mark.unit
def test_parts_of_several_sizes_are_refused():
    register_rule(Fused, Rule(columns=("qkv",), rows=("out",), part="width"))
    with pytest.raises(
        ValueError, match="the 20 output features of its qkv are not a whole number of parts of"
    ):
        shard_model(Fused(), mesh())


class Halves(nn.Module):
    """Gate and up in one weight, and a layer of two halves of features."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)
        self.left, self.right, self.both = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = x + self.down(gate.sigmoid() * up)
        return self.both(torch.cat([self.left(x), self.right(x).tanh()], dim=-1))


@on_ranks(2, TENSOR)
def test_a_layer_of_two_halves_is_cut_by_halves():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    columns = {f"parts.mlp.{name}": "colwise" for name in ("left", "right")}
    packed = {"parts.mlp.gate_up": "packed_colwise", "parts.mlp.both": "packed_rowwise"}
    model = Model({**columns, **packed, "parts.mlp.down": "rowwise"}, mlp=Halves())
    twin = copy.deepcopy(model)
    engine, *_ = colossalai.initialize(model, verbose=False)
    x = torch.randn(3, 8)
    found, wanted = engine(x), twin(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for (name, param), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        spec = spec_of(param)
        whole = param.grad if spec is None else spec.whole(param.grad)
        torch.testing.assert_close(whole, theirs.grad, rtol=0, atol=1e-10, msg=name)
    assert tuple(model.parts["mlp"].both.weight.shape) == (8, 12)


@pytest.mark.unit
def test_halves_that_the_ranks_do_not_divide_are_refused():
    model = Model({"parts.mlp.gate_up": "packed_colwise"}, mlp=Halves())
    with pytest.raises(
        ValueError, match="number of features of each half of gate_up is 12, which they do not"
    ):
        shard_model(model, mesh(8))


def through_booster(build: Callable[..., nn.Module], num_tensor_ranks: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    with InDouble():
        _through_booster(build, num_tensor_ranks, folder)


def _through_booster(build: Callable[..., nn.Module], num_tensor_ranks: int, folder: str) -> None:
    """Train a step, generate, ask for attention weights, save; the folder opens in one process."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    options = {} if build is wide_opt else {"attn_implementation": "eager"}
    model = build(**options)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)  # tokens that differ
    twin = copy.deepcopy(model)
    ids = torch.randint(1, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    booster = Booster(plugin=HybridParallelPlugin(tp_size=num_tensor_ranks))
    rank, num_parts = gpc.mesh.axis_rank("dp"), gpc.data_parallel_size
    optimizer, twins = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin))
    model, optimizer, *_ = booster.boost(model, optimizer)
    part = ids.chunk(num_parts)[rank]
    booster.backward(model(part, labels=part).loss, optimizer)
    optimizer.step()
    twin(ids, labels=ids).loss.backward()
    twins.step()
    model.eval()
    twin.eval()
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.unwrap().generate(ids, **given)
    assert torch.equal(tokens, twin.generate(ids, **given))
    assert tokens.shape == (4, 12)
    assert len(set(tokens[:, 6:].flatten().tolist())) > 2
    if "attn_implementation" in options:
        wanted, found = (each(ids, output_attentions=True).attentions for each in (twin, model))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    booster.save_model(model, folder, shard=True, use_safetensors=True)
    opened, info = type(twin).from_pretrained(
        folder, config=twin.config, dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for (name, param), theirs in zip(opened.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(param, theirs[1], rtol=0, atol=1e-10, msg=name)
    torch.distributed.barrier()
    torch.testing.assert_close(opened.eval()(ids).logits, model(ids).logits, rtol=0, atol=1e-10)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("build", "num_ranks", "num_tensor_ranks"),
    [
        (phi3, 2, 2),
        further(phi3, 4, 4),
        (olmo2, 2, 2),
        further(gemma3, 4, 2),
        further(qwen3, 2, 2),
        further(bloom, 4, 4),
        further(gpt_neox, 2, 2),
        further(phi, 2, 2),
        further(glm4, 2, 2),
        further(wide_opt, 4, 4),
        further(gemma, 2, 2),
    ],
)
def test_through_booster_tokens_attentions_and_a_checkpoint_for_one_process(
    build: Callable[..., nn.Module], num_ranks: int, num_tensor_ranks: int, tmp_path: Path
) -> None:
    run_ranks(through_booster, num_ranks, build, num_tensor_ranks, str(tmp_path / "saved"))


Pairs = list[tuple[nn.Module, str]]


def starcoder2() -> tuple[nn.Module, Pairs]:
    """Return a Starcoder2, which drops out weights, and by functions behind its row layers."""
    rates = {"attention_dropout": 0.4, "residual_dropout": 0.3, "embedding_dropout": 0.2}
    model = planned("Starcoder2", attn_implementation="eager", **rates)
    attentions = [(layer.self_attn, "o_proj") for layer in model.model.layers]
    return model, attentions + [(layer.mlp, "c_proj") for layer in model.model.layers]


def bloom_with_dropout() -> tuple[nn.Module, Pairs]:
    """Return a BLOOM that drops out, and its modules that draw between their layers."""
    model = bloom(attention_dropout=0.4, hidden_dropout=0.3)
    return model, [(block.self_attention, "dense") for block in model.transformer.h]


def gpt2_with_dropout() -> tuple[nn.Module, Pairs]:
    """Return a GPT-2, which drops out by layers behind its row layers."""
    model: Any = gpt2(dropout=0.3, attn_implementation="eager")
    return model, [(block.attn, "c_proj") for block in model.transformer.h]


def with_dropout(build: Callable[[], tuple[nn.Module, Pairs]]) -> tuple[list[Any], list[Any]]:
    colossalai.launch_from_torch(TENSOR, verbose=False)
    torch.manual_seed(0)
    model, pairs = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
    engine.train()
    inside, outside = [], []
    for module, row in pairs:
        module.get_submodule(row).register_forward_pre_hook(lambda *_: inside.append(torch.rand(2).tolist()))
        module.register_forward_hook(lambda *_: outside.append(torch.rand(2).tolist()))
    hidden = engine(torch.arange(6)[None], output_hidden_states=True).hidden_states
    outside += [state.tolist() for state in hidden]
    return inside, outside


def by_a_rule() -> list[Any]:
    colossalai.launch_from_torch(TENSOR, verbose=False)
    torch.manual_seed(0)
    model = Translator(dropout_rate=0.3)
    inside: list[Any] = []
    dense = model.model.encoder.block[0].layer[1].DenseReluDense
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
    engine.train()
    dense.dropout.register_forward_hook(lambda *_: inside.append(torch.rand(2).tolist()))
    logits = engine(torch.arange(6)[None]).logits.tolist()
    return [inside, logits]


@pytest.mark.dist
def test_the_ranks_of_a_t5_draw_apart_in_its_wide_layers() -> None:
    (inside, logits), (other_inside, other_logits) = run_ranks(by_a_rule, 2)
    assert logits == other_logits
    assert inside != other_inside


@pytest.mark.dist
@pytest.mark.parametrize("build", [starcoder2, bloom_with_dropout, gpt2_with_dropout])
def test_ranks_draw_apart_up_to_the_row_layer_and_alike_behind_it(
    build: Callable[[], tuple[nn.Module, Pairs]],
) -> None:
    (inside, outside), (other_inside, other_outside) = run_ranks(with_dropout, 2, build)
    assert outside == other_outside
    assert len(inside) == len(build()[1])
    for mine, theirs in zip(inside, other_inside, strict=True):
        assert mine != theirs
