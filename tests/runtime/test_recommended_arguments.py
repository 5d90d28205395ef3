"""Errors that both `Booster.boost` and `colossalai.initialize` raise recommend arguments that the caller has.

A row of a table is a mistake, made once by a plugin and once by a config. What the error recommends is read
from its text: each setting must be one of the plugin (of the config), or an argument of a function that the
text names, and of calls one must be the caller's.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import colossalai
from colossalai import checkpoint_io
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colossalai.context import Config, LayoutNames
from colossalai.context._features import FEATURE_KEYS, check_config
from colossalai.context._layout import _PARALLEL_KEYS
from colossalai.nn.layer.moe import Experts
from colossalai.pipeline import cut_model
from colossalai.pipeline.stages import _placeholders, _split_model
from colossalai.runtime import Plan
from colossalai.zero.gemini import GeminiOptions
from tests.ranks import run_ranks

CONFIG_SETTINGS = {*FEATURE_KEYS, *vars(GeminiOptions()), *vars(LayoutNames()).values()}
CONFIG_SETTINGS |= {f"parallel.{key}" for key in _PARALLEL_KEYS}
NAMED: Mapping[str, Callable[..., Any]] = {  # that anyone can call
    "colossalai.pipeline.cut_model": cut_model,
    "save_model of colossalai.checkpoint_io": checkpoint_io.save_model,
    "save_pretrained": PreTrainedModel.save_pretrained,
    "torch.utils.checkpoint": checkpoint,
}
CALLS = {"boost": r"\b[Bb]ooster\b", "initialize": r"colossalai\.initialize|\b[Ee]ngine\b"}
SETTING = re.compile(
    r"parallel(?:\.\w+)+|\bNUM_\w+|\b[a-z]\w*(?==)|(?<=`)\w+(?=`)|\b(?:tp|pp|sp|ep)_\w+|\bnum_\w*chunks|"
    r"\bhidden_dim|\bsequence_attention|\bregister_forward_method"
)


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def assert_recommends(message: str, plugin: type | None) -> None:
    """Assert that a user of a plugin, or of a config if it is None, has what a text recommends."""
    own = CONFIG_SETTINGS if plugin is None else {*parameters(plugin), *parameters(Booster)}
    own |= {"register_forward_method"}  # a method of the model that both return
    for words, function in NAMED.items():
        own |= parameters(function) if words in message else set()
    also = CONFIG_SETTINGS if "in a config" in message else set()
    also |= parameters(HybridParallelPlugin) if "of HybridParallelPlugin" in message else set()
    found = set(SETTING.findall(message))
    calls = {call for call, pattern in CALLS.items() if re.search(pattern, message)}
    own_call = "initialize" if plugin is None else "boost"
    assert own_call in calls if calls else found & own, message
    assert found <= own | also, (found - own - also, message)


INTERLEAVED: dict[str, Any] = {"pipeline": {"size": 2, "schedule": "interleaved"}}
MISTAKES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "a size does not divide the ranks": (
        HybridParallelPlugin,
        {"tp_size": 3},
        {"parallel": {"tensor": {"size": 3, "mode": "1d"}}},
    ),
    "experts do not divide the replicas": (HybridParallelPlugin, {"ep_size": 3}, {"parallel": {"moe": 3}}),
    "a size does not fit its mode": (
        HybridParallelPlugin,
        {"tp_size": 3, "tp_mode": "2d"},
        {"parallel": {"tensor": {"size": 3, "mode": "2d"}}},
    ),
    "a mode has no depth": (
        HybridParallelPlugin,
        {"tp_size": 4, "tp_depth": 2},
        {"parallel": {"tensor": {"size": 4, "mode": "1d", "depth": 2}}},
    ),
    "an unknown mode": (
        HybridParallelPlugin,
        {"tp_size": 4, "tp_mode": "4d"},
        {"parallel": {"tensor": {"size": 4, "mode": "4d"}}},
    ),
    "a size without a mode": (
        HybridParallelPlugin,
        {"tp_size": 4, "tp_mode": None},
        {"parallel": {"tensor": {"size": 4}}},
    ),
    "sequence parallelism twice": (
        HybridParallelPlugin,
        {"tp_size": 4, "tp_mode": "sequence", "sp_size": 2},
        {"parallel": {"tensor": {"size": 4, "mode": "sequence"}, "sequence": {"size": 2}}},
    ),
    "an unknown attention": (
        HybridParallelPlugin,
        {"sp_size": 2, "sequence_attention": "flash"},
        {"parallel": {"sequence": {"size": 2, "attention": "flash"}}},
    ),
    "no pipeline ranks": (HybridParallelPlugin, {"pp_size": 0}, {"parallel": {"pipeline": 0}}),
    "a size that is text": (HybridParallelPlugin, {"pp_size": "2"}, {"parallel": {"pipeline": "2"}}),
    "too few chunks": (
        HybridParallelPlugin,
        {"pp_size": 2, "num_microbatches": 4, "schedule": "interleaved", "num_model_chunks": 1},
        {"parallel": INTERLEAVED, "NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 1},
    ),
    "no step between sizes of chunks": (GeminiPlugin, {"hidden_dim": 0}, {"gemini": {"hidden_dim": 0}}),
}


@pytest.mark.unit
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plugin_names_its_arguments(mistake: str) -> None:
    plugin, options, _ = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - of the text, below
        plugin(**options).options.layout.over(4)
    assert_recommends(str(error.value), plugin)


@pytest.mark.unit
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_config_names_its_keys(mistake: str) -> None:
    *_, config = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:  # noqa: PT011, PT012
        check_config(Config(config), 4)
        Plan.from_config(Config(config))
    assert_recommends(str(error.value), None)


class Alone(nn.Module):
    """A model without a stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


Enter = Callable[[nn.Module, bool], nn.Module]
"""Takes a model, and whether it gets an optimizer, and returns what `boost` or `initialize` returns."""


def cut_a_model_without_blocks(enter: Enter) -> None:
    enter(Alone(), True)


def cut_a_model_of_unknown_data(enter: Enter) -> None:
    """Raise what is logged, which is no error."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.forward = lambda whatever: whatever  # type: ignore[method-assign]
    logged: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_split_model, "get_dist_logger", lambda: Recorder(logged))
        enter(model, True)
    raise ValueError("".join(logged))


class Recorder:
    """A logger that keeps what it is given."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def log_once(self, text: str, **options: Any) -> None:
        self.texts.append(text)


def train_without_an_optimizer(enter: Enter) -> None:
    model = enter(Alone(), False)
    model(torch.ones(2, 4)).sum().backward()


def give_a_gradient_too_late(enter: Enter) -> None:
    model = enter(Alone(), True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def build_experts_under_sequence_parallelism(enter: Enter) -> None:
    enter(Experts(nn.Linear(4, 4), 2), True)


def call_a_method_under_fsdp(enter: Enter) -> None:
    model = enter(Alone(), True)
    model.unwrap().encode(torch.ones(2, 4))


def save_a_part_by_transformers(enter: Enter) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = enter(LlamaForCausalLM(config), True)
    model.unwrap().save_pretrained("folder")


PIPELINE = {"pp_size": 2, "num_microbatches": 2}
IN_PIPELINE = {"parallel": {"pipeline": {"size": 2, "partition": "balanced"}}, "NUM_MICRO_BATCHES": 2}
ON_RANKS: Mapping[Callable[[Enter], None], tuple[Any, dict[str, Any], dict[str, Any]]] = {
    cut_a_model_without_blocks: (HybridParallelPlugin, PIPELINE, IN_PIPELINE),
    cut_a_model_of_unknown_data: (HybridParallelPlugin, PIPELINE, IN_PIPELINE),
    train_without_an_optimizer: (LowLevelZeroPlugin, {"precision": "fp32"}, {"zero": {"stage": 1}}),
    give_a_gradient_too_late: (HybridParallelPlugin, {"zero_stage": 1}, {"zero": {"stage": 1}}),
    build_experts_under_sequence_parallelism: (
        HybridParallelPlugin,
        {"sp_size": 2},
        {"parallel": {"sequence": {"size": 2}}},
    ),
    call_a_method_under_fsdp: (TorchFSDPPlugin, {}, {"zero": {"stage": 3}}),
    save_a_part_by_transformers: (
        HybridParallelPlugin,
        {"tp_size": 2},
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    ),
}


def run_a_mistake(mistake: Callable[[Enter], None], plugin: type | None, options: dict[str, Any]) -> str:
    colossalai.launch_from_torch({} if plugin else options, verbose=False)
    booster = Booster(plugin=plugin(**options)) if plugin else None

    def enter(model: nn.Module, has_optimizer: bool) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if has_optimizer else None
        if booster is not None:
            return booster.boost(model, optimizer)[0]
        engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
        return engine.model

    with pytest.raises(ValueError) as error:  # noqa: PT011
        mistake(enter)
    return str(error.value)


@pytest.mark.dist
@pytest.mark.every_cell
@pytest.mark.parametrize("by_plugin", [True, False], ids=["boost", "initialize"])
@pytest.mark.parametrize("mistake", ON_RANKS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_on_ranks_is_said_in_own_words(mistake: Callable[[Enter], None], by_plugin: bool) -> None:
    plugin, options, config = ON_RANKS[mistake]
    given = (plugin, options) if by_plugin else (None, config)
    for message in run_ranks(run_a_mistake, 2, mistake, *given):
        if message:  # rank 0 logs
            assert_recommends(message, given[0])


@pytest.mark.unit
@pytest.mark.parametrize("option", ["first", "last", "everywhere"])
def test_a_stage_that_is_cut_wrongly_names_the_function(option: str) -> None:
    text = _placeholders._cut_with(option, "head")
    assert "colossalai.pipeline.cut_model" in text
    assert option in parameters(cut_model)
