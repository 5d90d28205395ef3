"""What scripts import from `colossalai.utils` and beside it does what its name says."""

import gc
import json
import logging

import pytest
import torch
from torch import nn

import colossalai
from colossalai import utils
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.checkpoint_io import CheckpointIO, GeneralCheckpointIO
from colossalai.communication import all_reduce
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.global_variables import tensor_parallel_env
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.logging import get_dist_logger
from colossalai.nn import Linear1D_Col
from colossalai.testing import assert_equal_in_group, check_state_dict_equal
from colossalai.utils import common, memory
from colossalai.utils.profiler import CommProfiler, ProfilerContext, profile
from tests.ranks import run_ranks


@pytest.mark.unit
def test_print_rank_0_takes_a_logger(capfd):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("a script's own")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    utils.print_rank_0("to the script's", logger)
    utils.print_rank_0("to ours", get_dist_logger("another"))
    utils.print_rank_0("to the default")
    assert heard == ["to the script's"]
    errors = capfd.readouterr().err
    assert "rank 0 | to ours" in errors
    assert "rank 0 | to the default" in errors
    with pytest.raises(ValueError, match=r"logger is 'loud'; it must be a logger, such as get_dist_logger"):
        utils.print_rank_0("message", logger="loud")


@pytest.mark.unit
def test_print_rank_0_takes_what_print_takes(capfd):
    utils.print_rank_0("loss", 0.25, torch.tensor([1, 2]), sep="; ")
    utils.print_rank_0("step", 3, get_dist_logger("another"))
    utils.print_rank_0(7)
    errors = capfd.readouterr().err
    assert "rank 0 | loss; 0.25; tensor([1, 2])\n" in errors
    assert "rank 0 | step 3\n" in errors
    assert "rank 0 | 7\n" in errors


@pytest.mark.unit
def test_memory(capfd):
    gc.freeze()  # to collect what is there already takes a second
    memory.report_memory_usage("after the model", report_cpu=True)
    gc.unfreeze()
    assert "after the model: " in (errors := capfd.readouterr().err)
    assert "MB resident" in errors
    device = torch.device("cpu")
    assert 2**20 < memory.colo_device_memory_used(device) < memory.colo_device_memory_capacity(device)
    assert memory.colo_device_memory_capacity(device) == memory.colo_get_cpu_memory_capacity()
    assert (memory.bytes_to_MB(3 * 2**19), memory.bytes_to_GB(2**29)) == (1.5, 0.5)


@pytest.mark.unit
def test_small_things_of_common(tmp_path):
    common.ensure_path_exists(tmp_path / "a" / "b" / "file.pt")
    assert (tmp_path / "a" / "b").is_dir()
    for enable in (True, False):
        with common.conditional_context(torch.no_grad(), enable=enable):
            assert torch.is_grad_enabled() is not enable


@pytest.mark.unit
def test_profile_writes_a_trace_of_the_rank(tmp_path):
    with profile(tmp_path / "traces", activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8) @ torch.ones(8)
        profiler.step()
    (trace,) = (tmp_path / "traces").glob("rank_0_step_*.json")
    assert json.loads(trace.read_text())["traceEvents"]
    with pytest.raises(ValueError, match="a folder and on_trace_ready"):
        profile(tmp_path, on_trace_ready=print)
    assert isinstance(profile(), torch.profiler.profile)


def on_two_ranks(folder):
    assert tensor_parallel_env.mode is None
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    rank = gpc.get_global_rank()
    assert (tensor_parallel_env.mode, tensor_parallel_env.depth_3d) == ("1d", None)
    assert set(tensor_parallel_env.save()) >= {"mode", "summa_dim", "tesseract_dep", "input_group_3d"}
    with pytest.raises(AttributeError, match="mode cannot be set: choose the layout by parallel=dict"):
        tensor_parallel_env.mode = "2d"

    profiler = CommProfiler()
    with ProfilerContext([profiler]):
        all_reduce(torch.ones(2**18), ParallelMode.TENSOR)
    all_reduce(torch.ones(2**18), ParallelMode.TENSOR)
    header, row = profiler.result().splitlines()
    assert header.split() == ["operation", "axis", "number", "MiB", "ms"]
    assert row.split()[:4] == ["all_reduce", "tensor", "1", "1.000"]
    profiler.to_file(folder)
    assert len((folder / f"communication_rank_{rank}.txt").read_text().splitlines()) == 2
    with ProfilerContext([profiler], enable=False):
        assert profiler.ledger.count() == 1

    layer = Linear1D_Col(4, 6)
    assert common.is_model_parallel_parameter(layer.weight)
    assert not common.is_model_parallel_parameter(nn.Linear(2, 2).weight)
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.zeros_like(layer.bias)
    assert common.count_zeros_fp32(layer.parameters()) == 6, "over both ranks"

    assert_equal_in_group(torch.arange(3), gpc.get_group(ParallelMode.TENSOR))
    with pytest.raises(AssertionError, match=r"shape \(3,\) on ranks \[1\] differ from the first rank's"):
        assert_equal_in_group(torch.arange(3) + rank)
    with pytest.raises(AssertionError, match="have shapes and dtypes"):
        assert_equal_in_group(torch.arange(3 + rank))
    gpc.destroy()


@pytest.mark.dist
def test_on_two_ranks(tmp_path):
    run_ranks(on_two_ranks, 2, tmp_path)


def layout_of_3d():
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 8, "mode": "3d"}}}, verbose=False)
    env = tensor_parallel_env
    assert (env.mode, env.depth_3d, env.summa_dim) == ("3d", 2, None)
    assert env.input_group_3d is ParallelMode.PARALLEL_3D_INPUT
    assert len(gpc.get_ranks_in_group(env.output_x_weight_group_3d)) == 4
    gpc.destroy()


@pytest.mark.dist
def test_the_layout_by_its_old_name():
    run_ranks(layout_of_3d, 8)


def through_checkpoint_io(folder):
    """Saved from a boosted model under ZeRO, loaded into a plain one, and back."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(gpc.get_global_rank() + 1)

    def components():
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    plugin = LowLevelZeroPlugin(precision="fp32")
    model, optimizer, *_ = Booster(plugin=plugin).boost(*components())
    assert isinstance(model, ModelWrapper)
    assert isinstance(optimizer, OptimizerWrapper)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    net, raw = components()
    schedule = torch.optim.lr_scheduler.StepLR(raw, 1)
    boosted, plain = GeneralCheckpointIO(), GeneralCheckpointIO(net)
    assert isinstance(boosted, CheckpointIO)
    boosted.save_model(model, folder / "model.pt")
    boosted.save_optimizer(optimizer, folder / "optimizer.pt")
    boosted.save_lr_scheduler(schedule, folder / "schedule.pt")
    assert plain.load_model(net, folder / "model.pt") is net
    plain.load_optimizer(raw, folder / "optimizer.pt")
    boosted.load_lr_scheduler(schedule, folder / "schedule.pt")
    check_state_dict_equal(net.state_dict(), model.state_dict())
    assert raw.state[net[0].weight]["step"] == 1
    by_place = GeneralCheckpointIO()
    by_place.save_optimizer(raw, folder / "by_place.pt")
    _, other = components()
    by_place.load_optimizer(other, folder / "by_place.pt")
    check_state_dict_equal(other.state_dict()["state"], raw.state_dict()["state"])
    gpc.destroy()


@pytest.mark.dist
def test_a_checkpoint_io_saves_and_loads(tmp_path):
    run_ranks(through_checkpoint_io, 2, tmp_path)


@pytest.mark.unit
def test_an_optimizer_wrapper_of_ones_own():
    net = nn.Linear(2, 1)
    optimizer = OptimizerWrapper(torch.optim.SGD(net.parameters(), lr=1.0))
    optimizer.backward(net(torch.ones(1, 2)).sum())
    assert optimizer.clip_grad_norm(net, 0.5).item() == pytest.approx(3**0.5)
    before = net.weight.detach().clone()
    optimizer.step()
    assert (before - net.weight).norm().item() == pytest.approx(0.5 * (2 / 3) ** 0.5, rel=1e-4)
    with pytest.raises(ValueError, match="Linear, which has no parameter of this optimizer: pass the model"):
        optimizer.clip_grad_norm(nn.Linear(2, 1), 0.5)
