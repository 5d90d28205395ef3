"""A plan says the mesh, a plugin lays it out when a Booster gets it, and what comes too early is refused."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import colossalai
from colossalai import nn as col_nn
from colossalai.amp import BF16Autocast, FullPrecision
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.context import Config, ConfigException, Layout, Mesh
from colossalai.core import global_context as gpc
from colossalai.runtime import Plan, WatchedLoader, assemble
from colossalai.runtime._compatibility import METHODS
from colossalai.utils import get_dataloader
from tests.model_zoo.tiny import VOCAB, build, criterion_of
from tests.ranks import run_ranks

BOTH = r"Booster\(plugin=\.\.\.\).*plugin\.configure\(\)"


@pytest.mark.unit
def test_a_plugin_needs_no_job_and_its_plan_says_all_of_it() -> None:
    plugin = HybridParallelPlugin(tp_size=4, tp_mode="2d", pp_size=2, num_microbatches=4, zero_stage=1)
    plan = plugin.plan(FullPrecision())
    assert plan.layout == Layout(pipeline=2, tensor=4, mode="2d")
    assert plan.method_names == ["tensor 2d", "pipeline", "ZeRO 1"]
    ulysses = HybridParallelPlugin(sp_size=2, sequence_attention="ulysses", recompute=True).plan(
        BF16Autocast()
    )
    assert ulysses.layout == Layout(sequence=2, attention="ulysses")
    assert ulysses.method_names == ["sequence ulysses", "mixed precision", "recompute"]
    assert str(plan).startswith("tp 4 (2d) x pp 2, ZeRO 1, ")
    assert str(ulysses).startswith("sp 2 (ulysses), DDP, bf16 autocast, recompute=True")
    assert TorchDDPPlugin().plan(FullPrecision()).layout is None  # as the job was launched
    for options, message in [
        ({"tp_size": 3, "tp_mode": "2d"}, "mode '2d' needs a square"),
        ({"tp_size": 2, "tp_mode": "4d"}, "mode is '4d'"),
        ({"tp_size": 0}, "must be an integer of at least 1"),
        ({"sp_size": 2, "sequence_attention": "none"}, "must be one of 'ring', 'ulysses'"),
    ]:
        with pytest.raises(ConfigException, match=message):
            HybridParallelPlugin(**options)


@pytest.mark.unit
def test_a_config_says_the_layout() -> None:
    parallel = {"data": 2, "tensor": {"size": 8, "mode": "2.5d", "depth": 2}}
    plan = Plan.from_config(Config(parallel=parallel, fp16={"mode": "bf16"}, recompute=True))
    assert plan.layout == Layout(data=2, tensor=8, mode="2.5d", depth=2)
    assert plan.method_names == ["data parallelism", "tensor 2.5d", "mixed precision", "recompute"]
    experts = HybridParallelPlugin(ep_size=2, tp_size=2).plan(FullPrecision())
    assert experts.layout == Layout(tensor=2, mode="1d", expert=2)
    assert experts.method_names == ["tensor 1d", "experts"]
    sequence = Plan.from_config(Config(parallel={"tensor": {"size": 2, "mode": "sequence"}}))
    assert sequence.layout == Layout(sequence=2, attention="ring")
    assert sequence.method_names == ["sequence ring"]
    assert {*plan.method_names, *sequence.method_names} <= {*METHODS}
    assert plan.layout.over(16) is plan.layout
    assert sequence.layout is not None
    assert sequence.layout.over(6).data == 3
    with pytest.raises(ConfigException, match="8 processes, but data 2 x pipeline 1 x tensor 8 = 16"):
        plan.layout.over(8)
    for layout in (plan.layout, sequence.layout, Layout()):
        assert Plan.from_config(Config(parallel=layout.written())).layout == layout


@pytest.mark.unit
def test_the_mesh_is_that_of_the_plan() -> None:
    mesh = Mesh(Layout(tensor=2, mode="1d", data=1).axes(), rank=0, views={"dp": ("edp", "ep")})
    plan = Plan(layout=Layout(tensor=4, mode="2d"))
    with pytest.raises(ValueError, match=r"the plan lays 2 ranks out|2 processes, but"):
        assemble(plan, nn.Linear(2, 2), mesh=mesh, device=torch.device("cpu"))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("layout", "replicas", "observers", "alike"),
    [
        (Layout(data=1), ("dp",), ("dp",), None),
        (Layout(data=1, tensor=2, mode="1d"), ("dp",), ("dp",), "tp"),
        (Layout(data=1, tensor=4, mode="2d", pipeline=2), ("dp",), ("dp", "pp"), None),
        (Layout(data=1, sequence=2, attention="ring"), ("dp", "sp"), ("dp", "sp"), None),
        (Layout(data=1, sequence=2, pipeline=2), ("dp", "sp"), ("dp", "sp", "pp"), None),
    ],
)
def test_who_holds_what_follows_from_layout_and_mesh(layout, replicas, observers, alike) -> None:
    mesh = Mesh(layout.axes(), rank=0, views={"dp": ("edp", "ep")})
    assert (mesh.batch_axes, mesh.observer_axes, layout.alike_axis) == (replicas, observers, alike)


def too_early() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    mesh, plugin = gpc.mesh, HybridParallelPlugin(tp_size=2)
    assert gpc.mesh is mesh
    assert gpc.tensor_mode is None
    data = TensorDataset(torch.zeros(4))
    with pytest.raises(ValueError, match=BOTH):
        plugin.prepare_dataloader(data, 2)
    with pytest.raises(ValueError, match=BOTH):
        col_nn.Linear1D(4, 4)
    early = {
        "GPT": build("gpt"),
        "ViT": build("vit"),
        "Sequential": nn.Sequential(nn.Linear(4, 4), col_nn.Linear(4, 4)),
        "LayerNorm": col_nn.LayerNorm(4),
        "Embedding": col_nn.Embedding(4, 4),
        "VanillaClassifier": col_nn.Classifier(4, 4),
    }
    loss, plain = criterion_of("gpt"), nn.Linear(4, 4)
    booster = Booster(plugin=plugin)
    assert gpc.tensor_mode == "1d"
    assert booster.plan.layout == Layout(data=1, tensor=2, mode="1d")
    for name, model in early.items():
        with pytest.raises(ValueError, match=rf"{name}.* built .*{BOTH}"):
            booster.boost(model)
    with pytest.raises(ValueError, match=BOTH):
        booster.boost(build("gpt"), criterion=loss)
    booster.boost(plain)
    assert len(plugin.prepare_dataloader(data, 2)) == 2
    ids = torch.randint(VOCAB, (2, 6))
    model, _, criterion, *_ = booster.boost(build("gpt"), criterion=criterion_of("gpt"))
    criterion(model(ids), ids)
    gpc.destroy()


def too_early_for_sequences() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(sp_size=2)
    model, loss = build("gpt"), criterion_of("gpt")
    with pytest.raises(ValueError, match=BOTH):
        col_nn.TransformerSelfAttentionRing(8, 2, 0.0, lambda scores, mask: scores, 1)
    booster = Booster(plugin=plugin)
    with pytest.raises(ValueError, match=rf"GPT: .*SelfAttention, was built for sequence 1, .*{BOTH}"):
        booster.boost(model)
    with pytest.raises(ValueError, match=BOTH):
        booster.boost(build("gpt"), criterion=loss)
    assert booster.plan.layout == Layout(data=1, sequence=2, attention="ring")
    gpc.destroy()


def configured() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(tp_size=2)
    plugin.configure()
    assert gpc.tensor_mode == "1d"
    mesh, model = gpc.mesh, build("gpt")
    booster = Booster(plugin=plugin)
    assert booster.mesh is gpc.mesh is mesh
    booster.boost(model)
    with pytest.raises(ConfigException, match=r"launched with parallel=.* the plugin has"):
        HybridParallelPlugin(tp_size=1).configure()
    gpc.destroy()


def stages_of_an_early_model() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = build("gpt", num_layers=2)  # in a pipeline alone no layer needs the mesh
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2))
    boosted, *_ = booster.boost(model)
    ids = torch.randint(VOCAB, (4, 6))
    loss = booster.execute_pipeline(iter([(ids, ids)]), boosted, criterion_of("gpt"))["loss"]
    assert loss.isfinite()
    gpc.destroy()


def laid_out_anew() -> None:
    """A student after a tensor-parallel teacher, with a loader from before."""
    colossalai.launch_from_torch({}, verbose=False)
    data = TensorDataset(torch.arange(8.0).view(-1, 1))
    first = Booster()
    loader = first.plugin.prepare_dataloader(data, 2)  # over two ranks
    earlier, *_ = first.boost(nn.Linear(1, 1))
    Booster(plugin=HybridParallelPlugin(tp_size=2))
    student, model = Booster(), nn.Linear(1, 1)
    for given in (loader, WatchedLoader(loader), DataLoader(data, sampler=DistributedSampler(data))):
        with pytest.raises(ValueError, match=r"among 2 ranks, and the model has 1 .*prepare_dataloader"):
            student.boost(model, dataloader=given)
    batch = next(iter(loader))[0]
    with pytest.raises(ValueError, match="among 2 ranks, and this booster gathers from 1"):
        student.gather_for_metrics(batch, loader)
    assert len(first.gather_for_metrics(earlier(batch), loader)) == 4, "the earlier model has its ranks"
    own = student.plugin.prepare_dataloader(data, 2)
    *_, given, _ = student.boost(model, dataloader=own)
    assert len(given) == 4
    assert student.gather_for_metrics(next(iter(given))[0]).tolist() == [[0], [1]]
    first.boost(nn.Linear(1, 1), dataloader=loader)  # on the mesh that it was made on
    gpc.destroy()
    list(loader)


@pytest.mark.dist
def test_a_loader_of_an_earlier_mesh_is_refused_or_warned_of() -> None:
    said = run_ranks(warned_of_a_new_mesh, 2)
    assert said == [[0, 1], [0, 0]]
    run_ranks(laid_out_anew, 2)


def warned_of_a_new_mesh() -> list[int]:
    """How many warnings come before and after the mesh is laid out anew."""
    colossalai.launch_from_torch({}, verbose=False)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("colossalai").addHandler(handler)
    counts = []
    loader = get_dataloader(TensorDataset(torch.zeros(4)), batch_size=1)
    for plugin in (TorchDDPPlugin(), HybridParallelPlugin(tp_size=2)):
        Booster(plugin=plugin)
        said.clear()
        list(loader), list(loader)
        counts.append(sum("laid out anew since, with 1 data-parallel" in text for text in said))
    logging.getLogger("colossalai").removeHandler(handler)
    gpc.destroy()
    return counts


@pytest.mark.dist
def test_what_is_built_before_the_mesh_is_refused() -> None:
    run_ranks(too_early, 2)
    run_ranks(too_early_for_sequences, 2)


@pytest.mark.dist
def test_a_plugin_lays_the_mesh_out_when_told_to() -> None:
    run_ranks(configured, 2)
    run_ranks(stages_of_an_early_model, 2)
