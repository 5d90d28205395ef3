"""Every feature key is checked, and every error says what would be right."""

import enum

import pytest

from colossalai.amp import AMP_TYPE
from colossalai.context import (
    INITIALIZER_MAPPING,
    Config,
    ConfigException,
    ParallelContext,
    ProcessGroupInitializer,
)
from colossalai.context._features import check_config
from colossalai.registry import DIST_GROUP_INITIALIZER

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("world_size", "parallel", "sizes"),
    [
        (4, None, (4, 1, 1)),
        (4, {}, (4, 1, 1)),
        (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, (1, 2, 4)),
        (8, {"pipeline": {"size": 2}}, (4, 2, 1)),
        (8, {"data": 2, "tensor": {"size": 4, "mode": "1d"}}, (2, 1, 4)),
        (8, {"data": {"size": 8}, "tensor": 1}, (8, 1, 1)),
        (16, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, (2, 1, 8)),
        (8, {"tensor": {"size": 8, "mode": "3d"}}, (1, 1, 8)),
        (4, {"tensor": {"size": 4, "mode": "sequence"}}, (1, 1, 4)),
    ],
)
def test_what_is_right_passes(world_size, parallel, sizes):
    layout = check_config(Config(parallel=parallel), world_size)
    assert (layout.data, layout.pipeline, layout.tensor) == sizes


@pytest.mark.parametrize(
    ("world_size", "parallel", "message"),
    [
        (4, {"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}},
         "4 processes, but data 1 x pipeline 2 x tensor 4 = 8: start 8 processes"),
        (4, {"data": 3}, "4 processes, but data 3 x pipeline 1 x tensor 1 = 3"),
        (4, {"tensor": 4}, "a size without a mode: write tensor=dict\\(size=4, mode='1d'\\)"),
        (4, {"tensor": {"size": 4}}, "size 4 without a mode"),
        (4, {"tensor": {"mode": "1d"}}, "no size"),
        (8, {"tensor": {"size": 8, "mode": "2d"}}, "8, but mode '2d' needs a square .* 4 and 9"),
        (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 3}}, "depth times a square 3\\*q\\*q"),
        (4, {"tensor": {"size": 4, "mode": "3d"}}, "a cube .* 1 and 8"),
        (4, {"tensor": {"size": 4, "mode": "1d", "depth": 2}}, "only mode '2.5d' has a depth"),
        (4, {"tensor": {"size": 4, "mode": "4d"}}, "mode is '4d'; it must be one of '1d'"),
        (4, {"tensor": {"size": 4, "mode": ["1d"]}}, "mode is \\['1d'\\]"),
        (4, {"tensor": {"sise": 4, "mode": "1d"}}, "no key 'sise': did you mean 'size'"),
        (4, {"pipelines": 2}, "no key 'pipelines': did you mean 'pipeline'"),
        (4, {"pipeline": {"sizes": 2}}, "no key 'sizes': did you mean 'size'"),
        (4, {"pipeline": 0}, "parallel.pipeline is 0; it must be an integer of at least 1"),
        (4, {"pipeline": True}, "parallel.pipeline is True"),
        (4, {"pipeline": 2.0}, "parallel.pipeline is 2.0"),
        (4, [2, 2], "parallel is \\[2, 2\\]; it must be a dict"),
        (4, {"moe": 3}, "moe size 3 does not divide the data-parallel size 4"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_parallel_is_said(world_size, parallel, message):
    with pytest.raises(ConfigException, match=message):
        check_config(Config(parallel=parallel), world_size)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"fp16": True}, "fp16 is True; it must be a dict"),
        ({"fp16": {}}, "fp16 has no mode"),
        ({"fp16": {"mode": "half"}}, "fp16.mode is 'half'; it must be one of AMP_TYPE.TORCH"),
        ({"fp16": {"mode": AMP_TYPE.TORCH, "initial_scale": 1}}, "did you mean 'init_scale'"),
        ({"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": -1}}, "a number above 0"),
        ({"fp16": {"mode": AMP_TYPE.TORCH, "backoff_factor": 2}}, "must be below 1"),
        ({"gradient_accumulation": 0}, "gradient_accumulation is 0"),
        ({"clip_grad_norm": -1}, "clip_grad_norm is -1; it must be a number of at least 0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is nan"),
        ({"gradient_handler": "MyHandler"}, "it must be a list, such as"),
        ({"gradient_handler": [{"name": "MyHandler"}]}, "each entry is a dict with a type"),
        ({"gradient_handler": [], "gradient_handlers": []}, "both gradient_handler and gradient_handlers"),
        ({"NUM_MICRO_BATCHES": 0}, "NUM_MICRO_BATCHES is 0"),
        ({"NUM_CHUNKS": "2"}, "NUM_CHUNKS is '2'"),
        ({"TENSOR_SHAPE": (2, 0)}, "a size in TENSOR_SHAPE is 0"),
        ({"TENSOR_SHAPE": 7}, "TENSOR_SHAPE is 7; it must be a tuple"),
        ({"zero": {"stage": 4}}, "zero.stage is 4; it must be 1, 2 or 3"),
        ({"zero": {"stages": 1}}, "did you mean 'stage'"),
        ({"recompute": 3}, "recompute is 3"),
    ],
)
def test_what_is_wrong_in_a_feature_is_said(feature, message):
    with pytest.raises(ConfigException, match=message):
        check_config(Config(feature), 1)


def test_a_misspelt_feature_is_a_warning_since_it_may_be_the_users_own(capfd):
    check_config(Config(gradient_acumulation=4, BATCH_SIZE=8), 1)
    text = capfd.readouterr().err
    assert "'gradient_acumulation' is not a feature; did you mean 'gradient_accumulation'?" in text
    assert "BATCH_SIZE" not in text


class RingMode(enum.Enum):
    EVEN_ODD = "even_odd"


class EvenOddInitializer(ProcessGroupInitializer):
    def __init__(self, rank, world_size, config, data_parallel_size, pipeline_parallel_size,
                 tensor_parallel_size, stride=2):  # fmt: skip
        super().__init__(rank, world_size, config)
        self.stride = stride

    def init_parallel_groups(self):
        return {RingMode.EVEN_ODD: [list(range(start, self.world_size, self.stride)) for start in range(2)]}


@pytest.fixture
def own_mode():
    DIST_GROUP_INITIALIZER.register_module(EvenOddInitializer)
    INITIALIZER_MAPPING["even_odd"] = "EvenOddInitializer"
    yield
    del INITIALIZER_MAPPING["even_odd"]
    DIST_GROUP_INITIALIZER.remove_module("EvenOddInitializer")


@pytest.mark.usefixtures("own_mode")
def test_a_mode_of_the_users_own():
    context = ParallelContext()
    context.load_config({"parallel": {"tensor": {"size": 4, "mode": "even_odd", "stride": 2}}})
    context.init_parallel_groups(rank=3, world_size=8)
    assert context.get_ranks_in_group(RingMode.EVEN_ODD) == [1, 3, 5, 7]
    assert context.get_local_rank(RingMode.EVEN_ODD) == 1
    assert context.tensor_parallel_size == 4


@pytest.mark.usefixtures("own_mode")
@pytest.mark.parametrize(
    ("extra", "message"), [({"strid": 2}, "does not fit EvenOddInitializer"), ({"stride": 3}, "exactly one")]
)
def test_a_wrong_mode_of_the_users_own(extra, message):
    context = ParallelContext()
    context.load_config({"parallel": {"tensor": {"size": 4, "mode": "even_odd", **extra}}})
    with pytest.raises(ConfigException, match=message):
        context.init_parallel_groups(rank=3, world_size=8)
