"""Cuts by the names of modules: plain models train as on one process, and what does not fit is refused."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from colossalai.context import Layout, Mesh
from colossalai.core import global_context as gpc
from colossalai.model_zoo.bert import Bert, BertConfig
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.model_zoo.vit import ViT, ViTConfig
from colossalai.nn.parallel import Bucketed
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.shardformer import NamedRules, Rule, check_shards, register_rule, shard_model
from colossalai.tensor import spec_of
from tests.parity.training import Run, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.shardformer.by_plan import build_plain, run_by_plan
from tests.tiers import further

TP = Layout(tensor=2, mode="1d")
DP_TP = Layout(data=2, tensor=2, mode="1d")
PP_TP = Layout(pipeline=2, tensor=2, mode="1d")
VOCAB = 25  # which two ranks do not divide

# What the modules of the model zoo need, where they are built of plain layers.
ATTENTION = Rule(columns=("qkv",), rows=("projection",), draws=True)
MLP = Rule(columns=("expansion",), rows=("projection",))


def blocks(num_blocks: int) -> dict[str, Rule]:
    kinds = {"attention": ATTENTION, "mlp": MLP}
    return {f"blocks.{number}.{name}": rule for number in range(num_blocks) for name, rule in kinds.items()}


BLOCKS = blocks(2)
GPT_CUTS = {**BLOCKS, "embedding": Rule(embeddings=("tokens",)), "": Rule(heads=("head",))}
DEEP_CUTS = {**GPT_CUTS, **blocks(4)}
BERT_CUTS = {
    **BLOCKS,
    "embedding": Rule(embeddings=("tokens", "segments")),
    "head": Rule(heads=("transform", "decoder")),
}
VIT_CUTS = {**BLOCKS, "head": Rule(heads=("classifier",))}
GPT2_CUTS = {
    "transformer.h.0.attn": Rule(
        columns=("c_attn",),
        rows=("c_proj",),
        counts=("num_heads", "split_size"),
        part="split_size",
        divisible=("num_attention_heads",),
    ),
    "transformer.h.1.attn": Rule(heads=("c_attn",), splits=("c_proj",)),
    "transformer.h.0.mlp": Rule(columns=("c_fc",), rows=("c_proj",)),
    "transformer.h.1.mlp": Rule(heads=("c_fc",), splits=("c_proj",)),
    "transformer": Rule(embeddings=("wte",)),
    "": Rule(heads=("lm_head",)),
}
SIZES = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 4}
RATES = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)


def gpt(**options) -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=6, **{**SIZES, **RATES, **options}))


def deep_gpt() -> nn.Module:
    return gpt(num_layers=4)


def bert() -> nn.Module:
    return Bert(BertConfig(vocab_size=VOCAB, max_position_embeddings=6, **SIZES, **RATES))


def vit() -> nn.Module:
    return ViT(ViTConfig(image_size=8, patch_size=4, num_classes=5, **SIZES, **RATES))


def gpt2() -> nn.Module:
    """Return a GPT-2 of transformers, whose attention counts heads and features."""
    from tests.shardformer import models

    return models.gpt2()


def next_token_loss(output, labels):
    return masked_loss(output.logits, labels)


def masked_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def zoo_loss(logits, labels):
    """The loss of the zoo is built for the mode that is in force: after the launch, and for none."""
    return GPTLMLoss()(logits, labels)


def ids():
    tokens = torch.randint(VOCAB, (3, 8, 6), generator=torch.Generator().manual_seed(1))
    return [(part, part) for part in tokens]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 7), nn.Tanh()), nn.Linear(7, 5))


PERCEPTRON_CUTS = {"1": Rule(heads=("0",)), "": Rule(heads=("2",))}
IN_STAGES = {"pipeline": PipelineOptions(num_microbatches=2, partition="balanced"), "data": Bucketed()}
IN_CHUNKS = {
    "pipeline": PipelineOptions(num_microbatches=2, partition="balanced", schedule="zb-v"),
    "data": Bucketed(),
}


def of_tokens(build, cuts, *uncut, layout=TP, criterion=zoo_loss, **options) -> Run:
    """Return a run of a language model whose modules are cut by name."""
    plan = Plan(layout=layout, cuts=cuts, **options)
    return run_by_plan(build, plan, *uncut, criterion=criterion, batches=ids)


RUNS = [
    run_by_plan(perceptron, Plan(layout=TP, cuts=PERCEPTRON_CUTS)),
    run_by_plan(vit, Plan(layout=TP, cuts=VIT_CUTS), "embedding"),
    of_tokens(gpt, GPT_CUTS, "positions"),
    further(of_tokens(bert, BERT_CUTS, "positions", criterion=masked_loss)),
    further(
        of_tokens(
            gpt, {"blocks.1.mlp": MLP}, "embedding", "blocks.0", "attention", layout=DP_TP, recompute=True
        )
    ),
    of_tokens(gpt, GPT_CUTS, "positions", layout=PP_TP, **IN_STAGES),
    further(of_tokens(gpt, GPT_CUTS, "positions", layout=Layout(tensor=4, mode="1d"))),
    further(of_tokens(deep_gpt, DEEP_CUTS, "positions", layout=PP_TP, **IN_CHUNKS)),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_runs_are_one_process(num_ranks, runs):
    check_runs(num_ranks, runs)


@pytest.mark.dist
def test_a_model_of_transformers_is_one_process():
    pytest.importorskip("transformers")
    check_runs(2, [(of_tokens(gpt2, GPT2_CUTS, "wpe", criterion=next_token_loss),)])


def with_dropout():
    """Return the masks of the heads, and what comes behind the row layers, which all ranks drop alike."""
    model = build_plain(partial(gpt, attention_dropout=0.5, dropout=0.5), TP)
    plan = Plan(layout=TP, cuts=BLOCKS)
    wrapped, _ = assemble(plan, model, mesh=gpc.mesh, device=torch.device("cpu"))
    drawn = []
    attention = model.blocks[0].attention
    attention.projection.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(3).tolist()))
    logits = wrapped(torch.arange(6).repeat(3, 1))
    return drawn, logits.tolist()


@pytest.mark.dist
def test_each_rank_draws_masks_for_its_heads():
    (drawn, logits), (others, other_logits) = run_ranks(with_dropout, 2)
    assert drawn != others
    assert logits == other_logits


def refused_in_a_pipeline():
    """Return the error of a name that no stage has, and of a layer that one stage lacks, on every rank."""
    messages = []
    for cuts in ({"blocks.7.mlp": MLP}, {"blocks.1.mlp": Rule(columns=("up",))}):
        model = build_plain(gpt, PP_TP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = list(map(id, optimizer.param_groups[0]["params"]))
        plan = Plan(layout=PP_TP, cuts=cuts, **IN_STAGES)
        try:
            assemble(plan, model, optimizer, mesh=gpc.mesh, device=torch.device("cpu"))
        except ValueError as error:
            messages.append(str(error))
        assert list(map(id, optimizer.param_groups[0]["params"])) == before, "it was refused after a change"
        gpc.destroy()
    stage = build_plain(partial(nn.Linear, 4, 4), PP_TP)  # a stage of one's own
    options = {"pipeline": PipelineOptions(num_microbatches=2), "data": Bucketed()}
    try:
        assemble(
            Plan(layout=PP_TP, cuts={"up": MLP}, **options), stage, mesh=gpc.mesh, device=torch.device("cpu")
        )
    except ValueError as error:
        messages.append(str(error))
    return messages


@pytest.mark.dist
def test_all_stages_hear_of_a_mistake():
    for unknown, lacking, of_stage in run_ranks(refused_in_a_pipeline, 4):
        assert "cuts names 'blocks.7.mlp', which is not a module of this model" in unknown
        assert "'blocks.1.mlp', 'blocks.0.mlp'" in unknown
        assert (
            "names 'up' in columns, a layer that it lacks; its layers are 'expansion', 'projection'"
            in lacking
        )
        assert "cuts names 'up', which is not a module" in of_stage


MESH = Mesh({"tp": 2}, rank=0)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (
            {"blocks.0.mpl": MLP},
            r"cuts names 'blocks.0.mpl', which is not a module .* such as 'blocks.0.mlp', ",
        ),
        (
            {"blocks.0.mlp": Rule(rows=("expansion", "out"))},
            "names 'out' in rows, a layer that it lacks; its",
        ),
        (
            {"blocks.0.mlp": Rule(columns=("activation",))},
            "names 'activation' in columns, a layer that it lacks",
        ),
        ({"blocks.0.mlp": Rule(head_params=("sinks",))}, "names 'sinks' in head_params, a parameter that it"),
        (
            {"blocks.0.mlp": Rule(counts=("num_heads",))},
            "names 'num_heads' in counts, an attribute that it lacks",
        ),
        (
            {"blocks.0.mlp": Rule(divisible=("n",), draws=True)},
            "names 'n' in divisible, an attribute of its config",
        ),
        (
            {"blocks.0.mlp": Rule(head_inputs=("alibi",))},
            "names 'alibi' in head_inputs, an argument of its forward",
        ),
        ({"blocks.0.mlp": Rule(head_inputs=("hidden",))}, "has head_inputs, and no `counts`"),
        (
            {"blocks.0.mlp": Rule(rows=("projection",), packed=("expansion",))},
            "'expansion' in packed, and not in",
        ),
        ({"blocks.0.mlp": Rule(columns=("expansion",), heads=("expansion",))}, "names 'expansion' twice"),
        (
            {"blocks.0.mlp": Rule(experts=("weight",))},
            "names experts, which expert parallelism finds by their class",
        ),
        (
            {"": Rule(heads=("head",), loss_head="head")},
            "has loss_head='head', which fused_loss reads from the rule",
        ),
        (
            {"": Rule(heads=("head",))},
            "takes a part of head.weight along dimension 0, which is also embedding.tokens",
        ),
        (
            {"": Rule(heads=("head",)), "embedding": Rule(feature_embeddings=("tokens",))},
            "takes a part of head.weight along dimension 0, which is also embedding.tokens.weight, and that",
        ),
    ],
)
def test_what_a_model_lacks_is_refused_before_anything_changes(cuts, message):
    model = gpt()
    with pytest.raises(ValueError, match=message):
        shard_model(model, MESH, cuts)
    assert not any(spec_of(param) for param in model.parameters())


@pytest.mark.unit
def test_names_are_all_that_counts():
    class Ruled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    rule = Rule(columns=("up",), rows=("down",))
    register_rule(Ruled, rule)  # stays, and nobody else is called so
    model = nn.Sequential(Ruled(), Ruled())
    assert [name for name, _, _ in check_shards(model, 2)] == ["0", "1"]
    assert check_shards(model, 2, {}) == []
    assert [name for name, _, _ in check_shards(model, 2, {"1": rule})] == ["1"]
    assert check_shards(model, 2, {"1": Rule()}) == []
    with pytest.raises(
        ValueError, match="its number of output features of up is 6, which they do not divide"
    ):
        check_shards(model, 4, {"1": rule})
    assert shard_model(model, MESH, {"1": rule}) == 1
    assert spec_of(model[0].up.weight) is None
    assert tuple(model[1].up.weight.shape) == (3, 4)


@pytest.mark.unit
def test_a_plan_with_cuts_is_a_value():
    given = {"mlp": MLP, "attention": ATTENTION}
    plan = Plan(layout=TP, cuts=given)
    assert plan == Plan(layout=TP, cuts=dict(reversed(given.items())))
    assert plan.cuts == given
    assert hash(plan.cuts) == hash(NamedRules(dict(reversed(given.items()))))
    assert plan != Plan(layout=TP, cuts={"mlp": MLP})
    assert plan != Plan(layout=TP)
    assert str(plan).endswith("cuts=2 modules by name")
    assert "expansion" in repr(plan)
    given["more"] = MLP
    assert len(plan.cuts) == 2
    assert copy.deepcopy(plan) == plan
    with pytest.raises(TypeError):
        plan.cuts["more"] = MLP


@pytest.mark.unit
@pytest.mark.parametrize(
    ("layout", "cuts", "message"),
    [
        (
            None,
            {"mlp": MLP},
            "cuts names 1 modules .* the layout has tensor=1, mode=None: give it tensor=2 or",
        ),
        (Layout(data=2), {"mlp": MLP}, "the layout has tensor=1"),
        (Layout(tensor=4, mode="2d"), {"mlp": MLP}, "the layout has tensor=4, mode='2d'"),
        (TP, ("mlp",), "cuts is a tuple; it must map names of modules to rules"),
        (TP, {"mlp": "columns"}, "cuts has 'mlp': 'columns'; it must map names of modules to rules"),
    ],
)
def test_a_plan_refuses_cuts_without_effect(layout, cuts, message):
    with pytest.raises(ValueError, match=message):
        Plan(layout=layout, cuts=cuts)
    assert Plan(layout=None, cuts={}).cuts == {}


def stepped():
    model = build_plain(gpt, TP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(6)[None]).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps already, but this plan cuts the layers"):
        assemble(Plan(layout=TP, cuts=GPT_CUTS), model, optimizer, mesh=gpc.mesh, device=torch.device("cpu"))
    # Where nothing is cut by name, layers that were built for no mode are still taken.
    assemble(Plan(layout=TP, cuts={}), model, optimizer, mesh=gpc.mesh, device=torch.device("cpu"))
    assert not any(spec_of(param) for param in model.parameters())


@pytest.mark.dist
def test_an_optimizer_that_has_made_steps_is_refused():
    run_ranks(stepped, 2)
