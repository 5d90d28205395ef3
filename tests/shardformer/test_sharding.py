"""What is cut and what is not: slices, random masks, rules, what is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import colossalai
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.shardformer import (
    Rule,
    can_shard,
    experts_to_cut,
    params_to_cut,
    register_rule,
    rule_of,
    shard_experts,
    shard_model,
    sharded_classes,
)
from colossalai.shardformer._layers import TakesOwnHeads
from colossalai.shardformer._registry import RuleRegistry
from colossalai.tensor import spec_of
from tests.launched import on_ranks
from tests.ranks import run_ranks
from tests.shardformer.models import VOCAB, bloom, cohere, doge_with_experts, gpt2, llama, mixtral_with_lora

pytest.importorskip("transformers")


def mesh(rank: int = 0, size: int = 2) -> Mesh:
    return Mesh({"tp": size}, rank=rank)


@pytest.mark.unit
def test_each_rank_keeps_its_heads_of_query_key_and_value():
    model = gpt2()
    fused = model.transformer.h[0].attn.c_attn
    whole, bias = fused.weight.detach().clone(), fused.bias.detach().normal_().clone()
    kept = fused.weight
    assert shard_model(model, mesh(rank=1)) == 6  # attention and MLP of two blocks, embedding, head
    attention = model.transformer.h[0].attn
    assert attention.c_attn.weight is kept
    columns = [*range(4, 8), *range(12, 16), *range(20, 24)]
    assert torch.equal(attention.c_attn.weight, whole[:, columns])
    assert torch.equal(attention.c_attn.bias, bias[columns])
    assert (attention.num_heads, attention.split_size) == (1, 4)
    assert spec_of(kept).whole_shape == (8, 24)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert tuple(model.lm_head.weight.shape) == (13, 8)
    assert spec_of(model.lm_head.weight).whole_shape == (VOCAB, 8)


def llama_with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear"))


@pytest.mark.unit
@pytest.mark.parametrize(
    "build",
    [gpt2, partial(cohere, use_qk_norm=False), cohere, doge_with_experts, mixtral_with_lora, llama_with_lora],
)
def test_parameters_to_cut_are_those_that_are_cut(build):
    model, of_rank = build(), mesh()
    expected = params_to_cut(model) | experts_to_cut(model, of_rank)
    shard_model(model, of_rank)
    shard_experts(model, of_rank)
    assert expected == {param: name for name, param in model.named_parameters() if spec_of(param)}


@pytest.mark.unit
def test_each_rank_of_a_bloom_is_given_the_slopes_of_its_heads():
    model, of_rank = bloom(), mesh(rank=2, size=4)
    shard_model(model, of_rank)
    (takes,) = copy.deepcopy(model).transformer.h[0].self_attention._forward_pre_hooks.values()
    assert takes == TakesOwnHeads({"alibi": 2}, 12, of_rank)
    slopes = 0.5 ** torch.arange(1, 13)
    alibi = slopes[:, None, None] * torch.arange(5)
    for args, kwargs in (((1, 2, alibi.repeat(3, 1, 1)), {}), ((1, 2), {"alibi": alibi.repeat(3, 1, 1)})):
        given, named = takes(None, args, kwargs)
        assert torch.equal([*given, *named.values()][2], alibi[6:9].repeat(3, 1, 1))
    assert takes(None, (1, 2, None), {"mask": 3}) == ((1, 2, None), {"mask": 3})


@pytest.mark.unit
def test_a_forward_that_multiplies_by_itself_is_refused():
    model = bloom(slow_but_exact=True, pretraining_tp=2)
    with pytest.raises(ValueError, match=r"its slow_but_exact is True, with which its forward .* to False"):
        shard_model(model, mesh())
    assert spec_of(model.lm_head.weight) is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (
            gpt2,
            3,
            r"'transformer.h.0.attn' cannot be shared by 3 tensor-parallel ranks: its num_heads is 2, which",
        ),
        (llama, 4, "its config.num_key_value_heads is 2, which they do not divide; choose a tensor size"),
    ],
)
def test_what_the_ranks_do_not_divide_is_refused_before_anything_changes(model, size, message):
    model = model()
    before = {name: tuple(param.shape) for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        shard_model(model, mesh(size=size))
    assert before == {name: tuple(param.shape) for name, param in model.named_parameters()}


@pytest.mark.unit
def test_layers_that_cannot_be_cut_are_refused():
    model = gpt2()
    model.transformer.h[1].mlp.c_fc = nn.Sequential(model.transformer.h[1].mlp.c_fc)
    with pytest.raises(ValueError, match=r"its c_fc is a torch\.nn\.\S+\.Sequential, and only torch"):
        shard_model(model, mesh())
    assert spec_of(model.transformer.h[0].attn.c_attn.weight) is None
    shard_model(again := gpt2(), mesh())
    with pytest.raises(ValueError, match=r"its lm_head is a colossalai\.\S+\.HeadShard"):
        shard_model(again, mesh())


class Scaled(nn.Linear):
    """A linear layer that does more."""

    def forward(self, x):
        return 2 * super().forward(x)


class Gained(nn.Linear):
    """A linear layer with one more parameter, which a hook may use."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(()))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scaled(6, 4), r"its down is a \S+\.Scaled, a linear layer with a forward of its own"),
        (lambda: Gained(6, 4), r"its down is a \S+\.Gained that has gain beside weight and bias"),
        (
            lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
            "its down computes its weight from other parameters",
        ),
    ],
)
def test_a_linear_layer_that_would_lose_what_it_does_is_refused(make, message):
    model = nn.Sequential(Wide())
    model[0].down = make()
    with pytest.raises(ValueError, match=message):
        shard_model(model, mesh(), {"0": WIDE})
    assert spec_of(model[0].up.weight) is None


@pytest.mark.unit
def test_hooks_of_layers_that_are_cut_stay_and_can_be_removed():
    model = llama()
    model.enable_input_require_grads()  # as transformers does for adapters whose blocks are recomputed
    handles = [
        model.lm_head.register_forward_pre_hook(lambda *_: None),
        model.model.layers[0].mlp.down_proj.register_full_backward_hook(lambda *_: None),
    ]
    shard_model(model, mesh())
    row = model.model.layers[0].mlp.down_proj
    hooks = [model.model.embed_tokens._forward_hooks, model.lm_head._forward_pre_hooks, row._backward_hooks]
    assert [len(each) for each in hooks] == [1, 1, 1]
    assert row._is_full_backward_hook
    for handle in handles:
        handle.remove()
    model.disable_input_require_grads()
    assert not any(hooks)


@pytest.mark.unit
def test_an_embedding_whose_weight_is_made_of_others_is_refused():
    model = nn.ModuleDict({"words": parametrizations.weight_norm(nn.Embedding(8, 4))})
    with pytest.raises(ValueError, match="its words computes its weight from other parameters"):
        shard_model(model, mesh(), {"": Rule(embeddings=("words",))})


@pytest.mark.unit
def test_an_embedding_whose_options_would_be_lost_is_refused():
    model = gpt2()
    model.transformer.wte = nn.Embedding(VOCAB, 8, max_norm=1.0)
    with pytest.raises(ValueError, match="its wte is Embedding"):
        shard_model(model, mesh())
    assert spec_of(model.lm_head.weight) is None


class Wide(nn.Module):
    """A block of one's own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Wider(Wide):
    """A subclass of it."""


WIDE = Rule(columns=("up",), rows=("down",))


@pytest.mark.unit
def test_rules_of_ones_own():
    register_rule(Wide, WIDE)  # stays, and nobody else is called so
    assert f"{__name__}.Wide" in sharded_classes()
    assert rule_of(Wider()) is rule_of(Wide())
    assert can_shard(nn.Sequential(Wider()))
    model = Wider()
    assert shard_model(model, mesh()) == 1
    assert tuple(model.up.weight.shape) == (3, 4)
    assert tuple(model.down.weight.shape) == (4, 3)
    assert "in features cut" in repr(model.down)


class GPT2MLP(nn.Module):
    """A user's class with a name that transformers uses, too."""

    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(4, 6), nn.Linear(6, 4)


@pytest.mark.unit
def test_a_rule_belongs_to_one_class():
    assert rule_of(GPT2MLP()) is None
    registry = RuleRegistry()
    registry.register(Wide, WIDE)
    registry.register(f"{__name__}.Wide", WIDE)  # a cell of a notebook that runs again
    other = Rule(columns=("up",), rows=())
    with pytest.raises(ValueError, match=r"test_sharding.Wide has another rule already, .*replace=True"):
        registry.register(Wide, other)
    registry.register(Wide, other, replace=True)
    assert registry.find(Wider()) is other
    with pytest.raises(ValueError, match="another rule"):
        RuleRegistry(({"a.B": WIDE}, {"a.B": other}))
    with pytest.raises(ValueError, match="'Wide' is not a class; pass the class itself, or its full name"):
        register_rule("Wide", WIDE)
    with pytest.raises(ValueError, match="the rule is a dict"):
        register_rule(Wide, {"columns": ("up",)})


@pytest.mark.unit
def test_a_model_without_rules_is_left_alone():
    model = nn.Linear(3, 3)
    assert not can_shard(model)
    assert shard_model(model, mesh()) == 0
    assert spec_of(model.weight) is None


@pytest.mark.unit
def test_a_sharded_module_cannot_be_mistaken_for_a_plain_one():
    model = gpt2(dropout=0.5)
    shard_model(model, mesh())
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(model)


def bytes_of_a_step():
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    engine, *_ = colossalai.initialize(gpt2(), verbose=False)
    with ledger() as book:
        engine(torch.arange(6).repeat(3, 1)).logits.sum().backward()
    return book.num_bytes("all_reduce"), book.num_bytes("all_gather"), len(book.entries)


@pytest.mark.dist
def test_bytes_are_those_of_the_formula():
    activations = 3 * 6 * 8 * 8  # batch, seq, hidden, bytes; an all-reduce over two ranks sends as many
    logits = 3 * 6 * 13 * 8  # a slice, with padding
    expected = ((4 * 2 + 1 + 1) * activations, logits, 11)
    assert run_ranks(bytes_of_a_step, 2) == [expected, expected]


@on_ranks(2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
def test_an_optimizer_that_has_made_steps_is_refused():
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6)[None]).logits.sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps already, but this plan cuts the layers"):
        colossalai.initialize(model, optimizer, verbose=False)
    assert spec_of(model.lm_head.weight) is None


@on_ranks(2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
def test_an_optimizer_that_needs_whole_parameters_is_refused():
    model = gpt2()
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match=r"Adafactor holds transformer\.\S+, of which tensor or expert"):
        colossalai.initialize(model, optimizer, verbose=False)
    assert spec_of(model.lm_head.weight) is None
