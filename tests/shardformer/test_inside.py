"""Parameters between column and row layers that no rule covers are refused, and none that a rule covers."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.shardformer import Rule, check_rule, check_shards, register_rule, rule_of, shard_model
from colossalai.shardformer._layers import SumsGradients
from colossalai.tensor import ShardingSpec, set_spec, spec_of
from tests.launched import on_ranks
from tests.shardformer.models import apertus, cohere, doge, opt

MESH = Mesh({"tp": 2}, rank=1)


class Scale(nn.Module):
    """A factor for each feature of a head, with a norm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.factor = nn.Parameter(torch.ones(4))


class Block(nn.Module):
    """A norm, an attention of eight features, a norm behind it, and a block of the same kind inside."""

    def __init__(self, *, is_inner: bool = False) -> None:
        super().__init__()
        self.before, self.behind, self.scale = nn.LayerNorm(8), nn.LayerNorm(8), Scale()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.arange(8.0))
        self.inner = nn.Identity() if is_inner else Block(is_inner=True)


HALF = Rule(columns=("up",), rows=("down",), head_params=("sinks",))
OUTSIDE = ("before", "behind")
COVERED = replace(HALF, head_params=("sinks", "scale.factor"), head_norms=("scale",), outside=OUTSIDE)


@pytest.mark.unit
def test_parameters_that_no_rule_covers_are_named_before_anything_changes():
    model = nn.Sequential(Block())
    rules = {"0": HALF, "0.inner": COVERED}
    with pytest.raises(
        ValueError, match=r"Block '0' cannot be cut by up \(columns\) and down \(rows\): "
    ) as caught:
        shard_model(model, MESH, rules)
    listed = "before.weight, before.bias, behind.weight, behind.bias, scale.factor, scale.norm.weight, "
    assert f"its parameters {listed}scale.norm.bias. Between" in str(caught.value)
    for word in ("register_rule", "Plan.cuts", "`head_norms`", "`head_params`", "`outside`"):
        assert word in str(caught.value)
    assert not any(spec_of(param) for param in model.parameters())
    with pytest.raises(ValueError, match=r"Block '0' .*, inner\.before\.weight"):  # which has no rule then
        check_shards(model, 2, {"0": HALF})


@pytest.mark.unit
def test_a_rule_covers_them_one_by_one_or_all():
    for outside in (("before", "behind", "scale.norm", "inner"), ("*",)):
        rule = replace(HALF, head_params=("sinks", "scale.factor"), outside=outside)
        model = nn.Sequential(Block())
        shard_model(model, MESH, {"0": rule})
        assert model[0].sinks.tolist() == [4, 5, 6, 7]
        assert tuple(model[0].scale.factor.shape) == (2,)
        assert spec_of(model[0].scale.factor).whole_shape == (4,)
        assert not any(spec_of(param) for param in model[0].inner.parameters())
    with pytest.raises(ValueError, match="names 'beside' in outside, a layer or parameter that it lacks"):
        check_shards(model, 2, {"0": replace(HALF, outside=("beside",))})


@pytest.mark.unit
def test_modules_with_column_layers_alone_have_no_region():
    for rule in (Rule(columns=("up",)), Rule(heads=("up",), splits=("down",)), Rule(rows=("down",))):
        check_shards(nn.Sequential(Block()), 2, {"0": rule})


@pytest.mark.unit
def test_rules_of_classes_and_plans_are_asked_alike():
    class Ruled(Block):
        pass

    register_rule(Ruled, HALF)  # stays, and nobody else is called so
    with pytest.raises(ValueError, match=r"no rule covers its parameters before\.weight"):
        check_shards(nn.Sequential(Ruled()), 2)
    with pytest.raises(ValueError, match=r"no rule covers its parameters before\.weight"):
        check_rule("0", Ruled(), HALF, 2)
    planned_block = nn.ModuleDict({"block": Block(is_inner=True)})
    planned_block.tp_plan = {"block.up": "colwise", "block.down": "rowwise"}
    with pytest.raises(ValueError, match=r"Block 'block' .* its parameters sinks, before\.weight"):
        shard_model(planned_block, MESH)
    assert tuple(planned_block["block"].up.weight.shape) == (8, 8)


@pytest.mark.unit
def test_a_child_whose_class_has_a_rule_is_covered_if_it_stays_whole():
    pytest.importorskip("transformers")
    model = opt()
    rule = rule_of(model.model.decoder.layers[0])  # its attention has a rule of its own
    assert len(check_shards(model, 2, {"model.decoder.layers.0": rule})) == 1


@pytest.mark.unit
def test_what_lies_between_the_layers_of_these_families_is_cut_or_summed():
    pytest.importorskip("transformers")
    model = cohere(num_hidden_layers=1)
    norm = model.model.layers[0].self_attn.q_norm
    whole = norm.weight.detach().clone()
    shard_model(model, MESH)
    assert torch.equal(norm.weight, whole[4:])
    check_shards(cohere(use_qk_norm=False), 2)
    with pytest.raises(ValueError, match=r"config\.num_key_value_heads is 4, which they do not divide"):
        check_shards(cohere(), 8)
    model = doge(num_hidden_layers=1)
    shard_model(model, MESH)
    attention = model.model.layers[0].self_attn
    assert tuple(attention.A.shape) == (2,)
    assert tuple(attention.dt_proj.weight.shape) == (4, 16)
    model = apertus(num_hidden_layers=1)
    shard_model(model, MESH)
    assert isinstance(model.model.layers[0].mlp.act_fn, SumsGradients)


class Nested(nn.Module):
    """Layers in a child, and a norm behind the child."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner, self.norm, self.down = nn.Linear(8, 8), inner, nn.LayerNorm(8), nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)


class OfClass(Nested):
    """Has a rule of its class."""


UP, DOWN = Rule(columns=("up",)), Rule(rows=("down",))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("cuts", "named"),
    [
        ({"": UP, "inner": DOWN}, "down.weight"),
        ({"": DOWN, "inner": UP}, "up.weight"),
        ({"": Rule(feature_embeddings=("table",), rows=("down",))}, "norm.weight"),
        ({"": Rule(columns=("up",), inner_rows=("down",))}, "norm.weight"),
        ({"": Rule(columns=("up",), rows=("down",)), "inner": Rule(head_norms=("scale",))}, "inner.sinks"),
    ],
)
def test_regions_that_other_layers_or_children_begin_and_end_are_looked_at(cuts: dict[str, Rule], named: str):
    model = Nested(Block(is_inner=True))
    with pytest.raises(ValueError, match=rf"no rule covers its parameters (.*, )?{named}"):
        check_shards(model, 2, cuts)
    check_shards(model, 2, {**cuts, "": replace(cuts[""], outside=("*",))})


@pytest.mark.unit
def test_regions_that_begin_and_end_in_a_child_are_its_own():
    model = Nested(Nested(nn.Identity()))
    check_shards(model, 2, {"": UP, "inner": replace(UP, rows=("down",), outside=("*",))})
    check_shards(nn.Sequential(model, Block(is_inner=True)), 2, {"0": UP, "1": DOWN})
    register_rule(OfClass, DOWN)  # stays, and nobody else is called so
    check_shards(Nested(OfClass(nn.Identity())), 2, {"": UP})  # the child stays whole


@pytest.mark.unit
def test_a_spec_over_other_axes_covers_nothing():
    model = Block(is_inner=True)
    set_spec(model.sinks, ShardingSpec((16,), (("dp",),), Mesh({"dp": 2}, rank=0)))
    with pytest.raises(ValueError, match="no rule covers its parameters sinks"):
        check_shards(
            model, 2, {"": Rule(columns=("up",), rows=("down",), outside=("before", "behind", "scale"))}
        )


@pytest.mark.unit
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_layers_whose_weights_are_computed_are_refused_by_name(norm: Callable[[nn.Module], nn.Module]):
    model = Block(is_inner=True)
    norm(model.up)
    with pytest.raises(ValueError, match="its up computes its weight from other parameters"):
        check_shards(model, 2, {"": UP})
    nested = Nested(nn.Identity())
    norm(nested.table)
    with pytest.raises(ValueError, match="its table computes its weight"):
        check_shards(nested, 2, {"": Rule(embeddings=("table",))})


class Heads(nn.Module):
    """A norm of single heads, of four features each, and a factor for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(4))
        self.factor = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x.unflatten(-1, (-1, 4))) * self.factor[:, None]).flatten(-2)


@on_ranks(2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
def test_gradients_of_parameters_below_head_norms_are_summed_and_of_cut_ones_are_not():
    torch.manual_seed(0)
    twin = nn.Sequential()
    for name, layer in (("up", nn.Linear(8, 8)), ("heads", Heads()), ("down", nn.Linear(8, 8))):
        twin.add_module(name, layer.double())
    model = copy.deepcopy(twin)
    rule = replace(HALF, head_params=("heads.factor",), head_norms=("heads",))
    shard_model(model, gpc.mesh, {"": rule})
    x, weights = torch.randn(2, 3, 8, dtype=torch.float64)
    for each in (twin, model):
        (each(x) * weights).sum().backward()
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    found = {
        name: param.grad if (spec := specs[name]) is None else spec.whole(param.grad)
        for name, param in model.named_parameters()
    }
    expected = {name: param.grad for name, param in twin.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
