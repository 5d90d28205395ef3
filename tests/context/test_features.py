"""Every feature key is checked, and every error says what would be right."""

import dataclasses
import enum
from functools import partial

import pytest

from colossalai.amp import AMP_TYPE, FullPrecision, NaiveFP16
from colossalai.context import (
    INITIALIZER_MAPPING,
    Config,
    ConfigException,
    ParallelContext,
    ParallelMode,
    ProcessGroupInitializer,
)
from colossalai.context._features import FEATURE_KEYS, FEATURES, OTHER_NAMES, check_config, plan_fields
from colossalai.logging import get_dist_logger
from colossalai.registry import DIST_GROUP_INITIALIZER
from colossalai.runtime import Plan

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("world_size", "parallel", "sizes"),
    [
        (4, None, (4, 1, 1, 1)),
        (4, {}, (4, 1, 1, 1)),
        (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, (1, 2, 1, 4)),
        (8, {"pipeline": {"size": 2}}, (4, 2, 1, 1)),
        (8, {"data": 2, "tensor": {"size": 4, "mode": "1d"}}, (2, 1, 1, 4)),
        (8, {"data": {"size": 8}, "tensor": 1}, (8, 1, 1, 1)),
        (16, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, (2, 1, 1, 8)),
        (8, {"tensor": {"size": 8, "mode": "3d"}}, (1, 1, 1, 8)),
        (4, {"tensor": {"size": 4, "mode": "sequence"}}, (1, 1, 4, 1)),
        (4, {"sequence": 4}, (1, 1, 4, 1)),
        (8, {"sequence": {"size": 2}, "tensor": {"size": 4, "mode": "2d"}}, (1, 1, 2, 4)),
        (
            16,
            {
                "sequence": {"size": 2, "attention": "ulysses"},
                "pipeline": 2,
                "tensor": {"size": 2, "mode": "1d"},
            },
            (2, 2, 2, 2),
        ),
    ],
)
def test_what_is_right_passes(world_size, parallel, sizes):
    layout = check_config(Config(parallel=parallel), world_size)
    assert (layout.data, layout.pipeline, layout.sequence, layout.tensor) == sizes


@pytest.mark.parametrize(
    ("world_size", "parallel", "message"),
    [
        (4, {"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}},
         "4 processes, but data 1 x pipeline 2 x tensor 4 = 8: start 8 processes"),
        (4, {"data": 3}, "4 processes, but data 3 x pipeline 1 x tensor 1 = 3"),
        (4, {"tensor": 4}, "a size without a mode: write tensor=dict\\(size=4, mode='1d'\\)"),
        (4, {"tensor": {"size": 4}}, "size is 4, without a mode: set parallel.tensor.mode to"),
        (4, {"tensor": {"mode": "1d"}}, "no size"),
        (8, {"tensor": {"size": 8, "mode": "2d"}}, "8, but mode '2d' needs a square .* 4 and 9"),
        (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 3}}, "depth times a square 3\\*q\\*q"),
        (4, {"tensor": {"size": 4, "mode": "3d"}}, "a cube .* 1 and 8"),
        (4, {"tensor": {"size": 4, "mode": "1d", "depth": 2}}, "only mode '2.5d' has a depth"),
        (4, {"tensor": {"size": 4, "mode": "sequence", "depth": 2}}, "only mode '2.5d' has a depth"),
        (4, {"sequence": 2, "tensor": {"size": 4, "mode": "sequence"}},
         "sequence.size is 2, and parallel.tensor.size is 4 with parallel.tensor.mode 'sequence', which is"),
        (4, {"sequence": {"attention": "ulysses"}}, "with no size: add size"),
        (4, {"sequence": {"size": 4, "attention": "star"}}, "is 'star'; it must be one of 'ring', 'ulysses'"),
        (4, {"sequence": {"size": 4, "attention": ["ring"]}}, "is \\['ring'\\]; it must be one of"),
        (4, {"sequence": {"size": 0}}, "sequence.size is 0; it must be an integer of at least 1"),
        (4, {"sequence": {"size": 4, "mode": "ring"}}, "parallel.sequence has no key 'mode'"),
        (6, {"sequence": 4}, "6 processes, but data 1 x pipeline 1 x sequence 4 = 4"),
        (6, {"sequence": 2, "tensor": {"size": 2, "mode": "1d"}},
         "6 processes, but data 1 x pipeline 1 x sequence 2 x tensor 2 = 4"),
        (4, {"tensor": {"size": 4, "mode": "4d"}}, "mode is '4d'; it must be one of '1d'"),
        (4, {"tensor": {"size": 4, "mode": ["1d"]}}, "mode is \\['1d'\\]"),
        (4, {"tensor": {"sise": 4, "mode": "1d"}}, "no key 'sise': did you mean 'size'"),
        (4, {"pipelines": 2}, "no key 'pipelines': did you mean 'pipeline'"),
        (4, {"pipeline": {"sizes": 2}}, "no key 'sizes': did you mean 'size'"),
        (4, {"pipeline": 0}, "parallel.pipeline is 0; it must be an integer of at least 1"),
        (4, {"pipeline": True}, "parallel.pipeline is True"),
        (4, {"pipeline": 2.0}, "parallel.pipeline is 2.0"),
        (4, [2, 2], "parallel is \\[2, 2\\]; it must be a dict"),
        (4, {"moe": 3}, "parallel.moe is 3, which does not divide the data-parallel size 4"),
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


MISSPELT = {
    "gradient_acumulation": (4, "gradient_accumulation"),
    "paralel": ({"pipeline": 1}, "parallel"),
    "Zero": ({"stage": 1}, "zero"),
    "FP16": ({"mode": AMP_TYPE.TORCH}, "fp16"),
    "Num_Chunks": (2, "NUM_CHUNKS"),
    "watch_dog": (False, "watchdog"),
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_misspelt_feature_with_a_value_of_the_feature_is_an_error(key):
    value, feature = MISSPELT[key]
    check_config(Config({feature: value}), 1)
    with pytest.raises(
        ConfigException, match=f"config key '{key}' is not a feature .* did you mean '{feature}'"
    ):
        check_config(Config({key: value}), 1)
    check_config(Config({key: None}), 1)


def test_a_misspelt_feature_with_another_value_is_a_warning_since_it_can_be_the_users_own(capfd):
    check_config(Config(gradient_acumulation="linear", BATCH_SIZE=8), 1)
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
    context.init_own_groups()
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
    context.init_parallel_groups(rank=3, world_size=8)
    with pytest.raises(ConfigException, match=message):
        context.init_own_groups()


class DocumentedInitializer(ProcessGroupInitializer):
    """As the documents write it: arguments of its own behind the six, and groups made in the method."""

    returns = None

    def __init__(self, rank, world_size, config, data_parallel_size, pipeline_parallel_size,
                 tensor_parallel_size, arg1, arg2):  # fmt: skip
        super().__init__(rank, world_size, config)
        self.arg1, self.arg2 = arg1, arg2

    def init_parallel_groups(self):
        return self.returns


@pytest.fixture
def documented(monkeypatch):
    monkeypatch.setitem(INITIALIZER_MAPPING, "new_mode", "DocumentedInitializer")
    DIST_GROUP_INITIALIZER.register_module(DocumentedInitializer)
    context = ParallelContext()
    tensor = {"size": 4, "mode": "new_mode", "arg1": 1, "arg2": 2}
    context.load_config({"parallel": {"pipeline": {"size": 1}, "tensor": tensor}})
    context.init_parallel_groups(rank=3, world_size=4)
    yield context, partial(monkeypatch.setattr, DocumentedInitializer, "returns")
    DIST_GROUP_INITIALIZER.remove_module("DocumentedInitializer")


def test_the_documented_initializer_returns_nothing(documented):
    context, returns = documented
    returns(None)
    context.init_own_groups()
    assert context.tensor_mode == "new_mode"
    assert context.get_world_size(ParallelMode.TENSOR) == 4
    assert not context.is_initialized("new_mode")
    with pytest.raises(ValueError, match="new_mode is not part of this job"):
        context.get_ranks_in_group("new_mode")


@pytest.mark.parametrize(
    "rows",
    [
        (1, 2, None, None, [1, 3], "new_mode"),
        [(1, 2, None, [1, 3], "new_mode"), (3, 4, None, None, [0, 1, 2, 3], "all")],
        [("new_mode", [[0, 2], [1, 3]])],
    ],
)
def test_the_documented_initializer_returns_tuples(documented, rows):
    context, returns = documented
    returns(rows)
    context.init_own_groups()
    assert context.get_ranks_in_group("new_mode") == [1, 3]
    assert context.get_local_rank("new_mode") == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("new_mode", r"init_parallel_groups\(\) returns 'new_mode'; it must be a dict from each mode"),
        (7, "returns 7; it must be a dict"),
        ([(1, 2)] * 2 + [3], "it must be a dict"),
        ([(1, 2, 3)], "it must be a dict"),
        ((), "it must be a dict"),
        ({"new_mode": 3}, "exactly one"),
        (
            (0, 2, None, [1, 3], "new_mode"),
            "rank 3 is number 0 of the 2 ranks of 'new_mode', whose ranks are",
        ),
        ((0, 2, None, [0, 1], "new_mode"), "it must be among them"),
    ],
)
def test_what_else_an_initializer_returns_is_said(documented, rows, message):
    context, returns = documented
    returns(rows)
    with pytest.raises(ConfigException, match=message):
        context.init_own_groups()


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("clip_grad", "clip_grad_norm=1.0"),
        ("gradient_clipping", "clip_grad_norm=1.0"),
        ("grad_clip_norm", "clip_grad_norm=1.0"),
        ("gradient_clip_val", "clip_grad_norm=1.0"),
        ("max_grad_norm", "clip_grad_norm=1.0"),
        ("gradient_accumulation_steps", "gradient_accumulation=4"),
        ("accumulate_grad_batches", "gradient_accumulation=4"),
        ("mixed_precision", "fp16=dict(mode=AMP_TYPE.TORCH)"),
        ("zero_optimization", "zero=dict(stage=1)"),
        ("gradient_checkpointing", "recompute=True"),
        ("num_microbatches", "NUM_MICRO_BATCHES=8"),
        ("pipeline", "parallel=dict(pipeline=2)"),
        ("tensor_model_parallel_size", "parallel=dict(tensor="),
    ],
)
def test_what_others_call_a_feature_is_a_warning_with_our_key(key, right, capfd, monkeypatch):
    monkeypatch.setattr(get_dist_logger(), "_once", set())
    check_config(Config({key: None}), 1)
    check_config(Config({key: False}), 1)
    assert capfd.readouterr().err == ""
    check_config(Config({key: 1.0}), 1)
    text = capfd.readouterr().err
    assert f"config key {key!r} is not a feature and has no effect here: write {right}" in text
    assert text.count("\n") == 1


def test_the_users_own_keys_are_left_alone(capfd):
    own = ("BATCH_SIZE", "NUM_EPOCHS", "LEARNING_RATE", "optimizer", "model", "seed", "logging", "batch_size")
    own += ("hidden_size", "dropout", "scheduler", "num_epochs", "lr", "weight_decay", "SEQ_LENGTH", "depth")
    check_config(Config(dict.fromkeys(own, 1.0)), 1)
    assert capfd.readouterr().err == ""


def test_the_rows_of_others_are_features_of_ours():
    assert not set(OTHER_NAMES) & set(FEATURE_KEYS)
    assert {text.partition("=")[0] for text in OTHER_NAMES.values()} <= set(FEATURE_KEYS)


def test_each_key_of_a_plan_is_a_field_of_it():
    fields = {field.name for field in dataclasses.fields(Plan)}
    assert {feature.plan_field for feature in FEATURES.values()} <= {"", *fields}
    config = Config(gradient_handlers=[{"type": "A"}], compile=True, recompute=["a"], NUM_CHUNKS=2, lr=0.1)
    assert plan_fields(config) == {
        "gradient_handlers": ({"type": "A"},),
        "compile": True,
        "recompute": ["a"],
    }


def test_gemini_takes_the_norm_along():
    plan = Plan.from_config(Config(gemini={"max_norm": 2.0, "norm_type": 1.0}))
    assert (plan.clip_grad_norm, plan.clip_norm_type) == (2.0, 1.0)
    with pytest.raises(ConfigException, match=r"clip_grad_norm is 1.0, and gemini.max_norm 2.0: the grad"):
        check_config(Config(clip_grad_norm=1.0, gemini={"max_norm": 2.0}), 1)
    check_config(Config(clip_grad_norm=2.0, gemini={"max_norm": 2.0}), 1)


@pytest.mark.parametrize(
    ("gemini", "message"),
    [
        (True, "gemini is True; it must be a dict, such as"),
        ({"placement": "cpu"}, "gemini has no key 'placement': did you mean 'placement_policy'"),
        ({"precision": "fp8"}, "gemini.precision is 'fp8'; it must be one of fp16"),
        ({"hidden_dim": 0}, "gemini.hidden_dim is 0"),
    ],
)
def test_what_is_wrong_in_gemini_is_found_at_launch(gemini, message):
    with pytest.raises(ConfigException, match=message):
        check_config(Config(gemini=gemini), 1)


def test_no_mode_of_precision_is_full_precision(capfd, monkeypatch):
    monkeypatch.setattr(get_dist_logger(), "_once", set())
    config = Config(fp16={"mode": None})
    check_config(config, 1)
    assert Plan.from_config(config).precision == FullPrecision()
    assert capfd.readouterr().err == ""
    check_config(Config(fp16={"mode": None, "verbose": True}), 1)
    assert "fp16.mode is None, which means no mixed precision: ['verbose'] of fp16" in capfd.readouterr().err


def test_naive_amp_takes_the_bound_of_the_gradients_along():
    config = Config(fp16={"mode": AMP_TYPE.NAIVE, "clip_grad_norm": 1.5})
    check_config(config, 1)
    plan = Plan.from_config(config)
    assert (plan.clip_grad_norm, plan.precision) == (1.5, NaiveFP16())
    check_config(Config(clip_grad_norm=1.5, **config), 1)
    with pytest.raises(ConfigException, match=r"clip_grad_norm is 1.0, and fp16.clip_grad_norm 1.5"):
        check_config(Config(clip_grad_norm=1.0, **config), 1)
    with pytest.raises(ConfigException, match=r"fp16.clip_grad_norm is -1"):
        check_config(Config(fp16={"mode": AMP_TYPE.NAIVE, "clip_grad_norm": -1}), 1)


def test_the_later_spelling_of_the_expert_parallel_size():
    context = ParallelContext()
    context.load_config({"max_ep_size": 2, "parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    assert check_config(context.config, 8).expert == 2
    context.load_config({"max_ep_size": 2, "parallel": {"moe": {"size": 2}}})
    assert check_config(context.config, 2).axes()["ep"] == 2
    with pytest.raises(
        ConfigException, match=r"max_ep_size is 2, and parallel\.moe \{'size': 4\}.*leave one"
    ):
        context.load_config({"max_ep_size": 2, "parallel": {"moe": {"size": 4}}})
    with pytest.raises(ConfigException, match=r"max_ep_size is 0; it must be an integer of at least 1"):
        context.load_config({"max_ep_size": 0})
