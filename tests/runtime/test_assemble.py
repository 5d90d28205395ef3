"""Assembling: what a door returns looks like what it was given; what does not fit is said."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import ApexPrecision
from colossalai.context import Config, ConfigException, Mesh
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import Bucketed, FullySharded, Replicated, Unsynchronized
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble, pairs_table, refuse_pairs
from colossalai.runtime._compatibility import REFUSED
from colossalai.zero import ZeroReplicas
from tests.parity.experts.tasks import Block, CutExperts
from tests.ranks import ROOT, run_ranks

pytestmark = pytest.mark.dist
PIPELINE = PipelineOptions(num_microbatches=2)


def run(plan, mesh, model, optimizer=None):
    return assemble(plan, model, optimizer, mesh=mesh, device=torch.device("cpu"))


def test_the_wrapper_looks_like_the_model(mesh):
    model = nn.Sequential(nn.Linear(2, 3))
    model.config = {"hidden": 3}
    wrapped, optimizer = run(Plan(), mesh, model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert list(wrapped.state_dict()) == ["0.weight", "0.bias"]
    assert [name for name, _ in wrapped.named_parameters()] == ["0.weight", "0.bias"]
    assert wrapped.config == {"hidden": 3}
    assert wrapped.unwrap() is model
    wrapped.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert model[0].weight.abs().sum() == 0
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapped.absent
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)  # takes the wrapper
    optimizer.step()
    scheduler.step()
    assert optimizer.unwrap().param_groups[0]["lr"] == pytest.approx(0.05)
    wrapped.eval()
    assert not model.training


def test_what_does_not_fit_is_said(mesh):
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    with pytest.raises(ValueError, match="a parameter of shape \\(3, 3\\) that the model does not have"):
        run(Plan(), mesh, model, torch.optim.SGD(other.parameters(), lr=1))
    wrapped, optimizer = run(Plan(), mesh, model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ValueError, match="was boosted or initialized before"):
        run(Plan(), mesh, wrapped)
    with pytest.raises(ValueError, match="was boosted or initialized before"):
        run(Plan(), mesh, model, optimizer)
    with pytest.raises(ValueError, match="the model is a int"):
        run(Plan(), mesh, 3)
    with pytest.raises(ValueError, match="the optimizer is a float"):
        run(Plan(), mesh, model, 0.1)


def test_fsdp_after_a_step_is_refused(mesh):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="made steps already"):
        run(Plan(data=FullySharded()), mesh, model, optimizer)


def test_fsdp_knows_optimizers_of_other_libraries_by_name():
    class Adafactor(torch.optim.SGD):
        __module__ = "trans" + "formers.optimization"  # the whole word would have the ranks import it
        __qualname__ = "Adafactor"

    model = nn.Linear(2, 2)
    optimizers, replicas = [Adafactor(model.parameters(), lr=0.1)], Mesh({"dp": 1}, rank=0).axis("dp")
    with pytest.raises(ValueError, match="Adafactor cannot update the slices of parameters that FSDP holds"):
        FullySharded().check(model, optimizers, blocks=[], replicas=replicas)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("data", "pipeline", "where"),
    [(Bucketed(), None, "only in a pipeline"), (Replicated(), PIPELINE, "only without a pipeline")],
)
def test_a_data_method_that_would_not_synchronize_is_refused(data, pipeline, where):
    with pytest.raises(ValueError, match=f"synchronizes gradients {where}"):
        Plan(data=data, pipeline=pipeline)


def test_plans_from_configs():
    assert Plan.from_config(Config()) == Plan()
    plan = Plan.from_config(Config(gradient_accumulation=4, clip_grad_norm=1, zero={"stage": 3}))
    assert (plan.accumulation_steps, plan.clip_grad_norm, plan.data) == (4, 1, FullySharded())
    assert isinstance(Plan.from_config(Config(gradient_handler=[{"type": "X"}])).data, Unsynchronized)
    assert isinstance(Plan.from_config(Config(gradient_handlers=[])).data, Replicated)
    for stage in (1, 2):
        assert Plan.from_config(Config(zero={"stage": stage})).data == ZeroReplicas(stage=stage)
    assert Plan.from_config(Config(fp16={"mode": "apex"})).precision == ApexPrecision()


def test_plans_of_pipelines():
    parallel = {"pipeline": {"size": 2, "schedule": "zb-v", "partition": "uniform"}}
    plan = Plan.from_config(Config(parallel=parallel, NUM_MICRO_BATCHES=3, TENSOR_SHAPE=(1, 2)))
    assert plan.pipeline == PipelineOptions(
        num_microbatches=3, schedule="zb-v", partition="uniform", tensor_shape=(1, 2)
    )
    assert isinstance(plan.data, Bucketed)
    shared = [{"type": "PipelineSharedModuleGradientHandler"}]
    config = Config(parallel=parallel, NUM_MICRO_BATCHES=3, gradient_handler=shared)
    assert isinstance(Plan.from_config(config).data, Bucketed)
    mistakes = {
        r"add NUM_MICRO_BATCHES .* 8, keeps": {"parallel": parallel},
        r"pipeline and ZeRO 2 cannot be combined: .* use stage 1": {"zero": {"stage": 2}},
        r"pipeline and ZeRO 3 cannot be combined": {"zero": {"stage": 3}},
        r"no schedule '2f2b': choose one of gpipe": {
            "parallel": {"pipeline": {"size": 2, "schedule": "2f2b"}}
        },
        r"partition is 'best'": {"parallel": {"pipeline": {"size": 2, "partition": "best"}}},
        r"'1f1b' has one chunk on a rank, not 2": {
            "NUM_CHUNKS": 2,
            "parallel": {"pipeline": {"size": 2, "schedule": "1f1b"}},
        },
        r"'zb-v' with 3 stages on a rank: it needs exactly 2": {"NUM_CHUNKS": 3},
    }
    for message, wrong in mistakes.items():
        enough = {} if "add NUM" in message else {"NUM_MICRO_BATCHES": 4}
        with pytest.raises(ConfigException, match=message):
            Plan.from_config(Config(**({"parallel": parallel} | enough | wrong)))


def test_the_table_of_pairs_is_the_one_that_refuses():
    table = (ROOT / "docs/features/pipeline.md").read_text()
    assert "\n".join(pairs_table()) in table
    for pair in REFUSED:
        with pytest.raises(ValueError, match="cannot be combined"):
            refuse_pairs(pair)


def test_a_key_without_effect_is_said_once(capfd):
    for _ in range(2):
        Plan.from_config(Config(NUM_MICRO_BATCHES=4))
    assert capfd.readouterr().err.count("NUM_MICRO_BATCHES has no effect") == 1


def test_tensor_parallelism_that_cuts_nothing_is_logged(capfd):
    """Experts are cut over their own ranks."""
    run_ranks(uncut, 4)
    written = capfd.readouterr().out
    for name in ("Linear", "Block"):
        assert f"cuts nothing of {name}: 2 ranks each compute all of it" in written


def uncut():
    parallel = {"tensor": {"size": 2, "mode": "1d"}, "moe": {"size": 2}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    for model in (nn.Linear(2, 2), Block(CutExperts(gpc.mesh))):
        colossalai.initialize(model, verbose=False)
    gpc.destroy()
