"""Modules whose rules only fit together: one gives parts of the features, another one takes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel import make_plan
from colossalai.auto_parallel.cuts._find import find_strategies
from colossalai.auto_parallel.cuts._strategies import Strategies
from colossalai.auto_parallel.trace._trace import ModelTrace, trace_model
from tests.auto_parallel.plan.models import llama, slow_machine
from tests.shardformer.models import bert, t5, wide_opt

pytestmark = pytest.mark.unit


def strategies_of(
    build: Callable[[], nn.Module], *names: str, num_ranks: int
) -> tuple[ModelTrace, Strategies, list[set[str]]]:
    """Return the trace of a model, its strategies, and the ends of the names of what is cut together."""
    model, ids = build(), torch.zeros(2, 4, dtype=torch.long)
    trace = trace_model(model, dict.fromkeys(names or ("input_ids",), ids))
    strategies = find_strategies(trace, model, num_ranks)
    sites = strategies.sites
    return trace, strategies, [{sites[first].name, sites[second].name} for first, second in strategies.ties]


def test_layers_that_hand_parts_to_each_other_are_cut_together() -> None:
    trace, strategies, together = strategies_of(bert, num_ranks=2)
    layer = "bert.encoder.layer.0"
    assert {f"{layer}.intermediate", f"{layer}.output"} in together
    assert {f"{layer}.attention.self", f"{layer}.attention.output"} in together
    # Each rank adds, drops and normalizes what the ranks have summed up.
    shared = {
        trace.operations[trace.places[name]].target
        for site in strategies.sites
        if site.name.endswith("output")
        for name in site.operations
    }
    assert shared == {"aten.linear.default"}


def test_a_layer_whose_part_no_module_makes_is_cut_by_itself() -> None:
    """Three heads are not shared by two ranks, so that the layer behind them finds whole features."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=16
    )
    _, strategies, _ = strategies_of(lambda: transformers.BertModel(config), num_ranks=2)
    rules = {site.name: site.rule for site in strategies.sites if ".attention." in site.name}
    layer = "encoder.layer.0.attention"
    assert rules == dict.fromkeys(
        (*(f"{layer}.self.{name}" for name in ("query", "key", "value")), f"{layer}.output.dense")
    )


def test_weights_of_adapted_layers_are_cut_with_them() -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        targets = ["q_proj", "v_proj", "down_proj"]
        adapted: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=targets))
        return adapted

    trace, strategies, _ = strategies_of(build, num_ranks=2)
    cut = {
        trace.params[tensor].rpartition("layers.0.")[2] for site in strategies.sites for tensor in site.params
    }
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        assert f"{name}.base_layer.weight" in cut
    assert {"self_attn.k_proj.weight", "mlp.up_proj.weight"} <= cut


def test_attentions_that_share_a_bias_by_heads_are_cut_together() -> None:
    names = "input_ids", "decoder_input_ids"
    _, strategies, together = strategies_of(lambda: t5().model, *names, num_ranks=2)
    biased = [site.name for site in strategies.sites if site.name.endswith("SelfAttention")]
    assert len(biased) > 2
    for stack in ("encoder", "decoder"):
        first, *others = (name for name in biased if name.startswith(stack))
        assert all({first, other} in together for other in others)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_bert_of_transformers_has_a_plan(world_size: int) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    plan = make_plan(bert(), {"input_ids": ids}, world_size=world_size, profile=slow_machine())
    assert str(plan.setting).startswith(f"dp 1, tp {world_size}")


def test_a_bias_that_another_module_has_too_is_not_cut() -> None:
    """BERT's head has the bias of the module around it; tensor parallelism refuses to cut one of them."""
    _, strategies, _ = strategies_of(bert, num_ranks=2)
    ways = {site.name: [each.field for each in site.strategies] for site in strategies.sites}
    assert ways["cls.predictions.decoder"] == [None, "splits"]
    _, strategies, _ = strategies_of(lambda: t5().model, "input_ids", "decoder_input_ids", num_ranks=2)
    assert "vocab" in {each.cut for site in strategies.sites for each in site.strategies}


def test_an_opt_of_transformers_has_a_plan() -> None:
    """Its blocks have a rule, and end with a residual sum that each rank computes."""
    ids = torch.zeros(1, 6, dtype=torch.long)
    plan = make_plan(wide_opt(), {"input_ids": ids}, world_size=2, profile=slow_machine())
    assert str(plan.setting).startswith("dp 1, tp 2")


class UsesWeights(nn.Module):
    """Takes the weights of two of its layers itself: in its head, and in a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.narrow(self.wide(self.embedding(ids)).relu())
        return nn.functional.linear(hidden, self.embedding.weight) + self.wide.weight.square().mean()


def test_a_weight_that_the_model_takes_itself_is_not_cut() -> None:
    """And the layer behind finds whole features then."""
    _, strategies, _ = strategies_of(UsesWeights, "ids", num_ranks=2)
    ways = {site.name: [each.field for each in site.strategies] for site in strategies.sites}
    assert ways == {"narrow": [None, "heads", "splits"]}


class HasALayerTwice(nn.Module):
    """Has a layer under two names, beside one that runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.layers.append(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def test_a_layer_that_a_model_has_twice_is_whole() -> None:
    """Its names would be those of two layers: rules name modules by the first one."""
    model = HasALayerTwice()
    strategies = find_strategies(trace_model(model, {"x": torch.zeros(2, 8)}), model, 2)
    assert [site.name for site in strategies.sites] == ["layers.1"]
