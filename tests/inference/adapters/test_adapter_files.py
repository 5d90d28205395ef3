"""Files of adapters: what does not fit a model, or is not computed, is refused by name, all of it at once."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from colossalai.inference import LLM, EngineOptions, check_ranks
from colossalai.inference.adapters._config import AdapterConfig
from tests.inference.adapters.made import LLAMA, POOL, save_adapter
from tests.inference.models import tiny

pytest.importorskip("peft")
pytestmark = pytest.mark.unit
DOWN = "model.layers.2.mlp.down_proj"
TENSORS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    tiny("Llama").save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_adapter(tmp_path / "adapter", tiny("Llama"), 1, **LLAMA["patterns"])
    return tmp_path / "adapter"


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


def refusal(base: Path, **adapters: Path) -> str:
    """Return why adapters are refused: before a rank is started, and in a process alone in the same words."""
    with pytest.raises(ValueError, match="adapter") as found:
        LLM(base, adapters=adapters, kv_memory=POOL)
    options = EngineOptions(adapters={name: str(folder) for name, folder in adapters.items()})
    with pytest.raises(ValueError, match="adapter") as before:
        check_ranks(str(base), options, tp=2, pp=1)
    assert str(before.value) == str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=[3]"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"use_of_tomorrow": 7}, "use_of_tomorrow=7"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"r": 0}, "r=0"),
        ({"target_modules": None}, "target_modules=None"),
    ],
)
def test_features_that_are_not_served(base: Path, adapter: Path, fields: Any, reason: str) -> None:
    change_config(adapter, **fields)
    found = refusal(base, one=adapter)
    assert "adapter 'one'" in found
    assert reason in found


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "use_dora=True"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias=True"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A: LoRA of an embedding is not served"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules_to_save=['norm']"),
    ],
)
def test_what_peft_saves_of_them(base: Path, tmp_path: Path, config: Any, reason: str) -> None:
    save_adapter(tmp_path, tiny("Llama"), 1, **config)
    assert reason in refusal(base, one=tmp_path)


def test_all_that_does_not_fit_is_said_at_once(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_adapter(other, tiny("Llama", hidden_size=64), 1, **LLAMA["attention"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        start = f"base_model.model.{DOWN}"
        tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 32)
        tensors["base_model.model.model.layers.9.mlp.up_proj.lora_B.weight"] = torch.zeros(48, 4)
        tensors["base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"] = torch.zeros(4, 32)
        tensors["base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight"] = torch.zeros(48, 4)
        tensors["something.else"] = torch.zeros(1)
        tensors[f"{start}.lora_magnitude_vector"] = torch.zeros(32)
        tensors[f"{start}.lora_B.weight"] = torch.zeros(31, 2)
        del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
        for side in "AB":
            del tensors[f"base_model.model.model.layers.3.mlp.down_proj.lora_{side}.weight"]

    change_tensors(adapter, change)
    lines = refusal(base, one=adapter, two=other, three=tmp_path / "nowhere").splitlines()
    for reason in (
        "adapter 'one': model.layers.9.mlp.up_proj: the model has no such layer",
        "adapter 'one': model.layers.0.mlp.gate_proj: the config does not name it",
        "adapter 'one': something.else: it is none of LoRA",
        f"adapter 'one': base_model.model.{DOWN}.lora_magnitude_vector: DoRA is not served",
        f"adapter 'one': {DOWN}.lora_B.weight: (31, 2), and the model and rank 2 take (32, 2)",
        "adapter 'one': model.layers.1.mlp.down_proj: it has no lora_B.weight",
        "adapter 'one': model.layers.3.mlp.down_proj: the config names it, and it has no tensors",
        "adapter 'two': model.layers.0.self_attn.q_proj.lora_A.weight: (4, 64), and the model and rank 4",
        "adapter 'three': ",
    ):
        assert sum(line.startswith(reason) for line in lines) == 1, reason


def test_a_head_that_is_not_the_models(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["all"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.lm_head.base_layer.weight"][3] += 1

    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=r"lm_head.base_layer.weight: the model has other values"):
        LLM(base, adapters={"one": tmp_path}, kv_memory=POOL)


def test_layers_that_are_no_linear_ones(tmp_path: Path) -> None:
    """The tensors of a norm, and the experts of a model, which other rows go through than tokens."""
    save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["attention"])
    change_config(tmp_path, target_modules=["q_proj", "v_proj", "norm"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.model.norm.lora_A.weight"] = torch.zeros(4, 32)
        tensors["base_model.model.model.norm.lora_B.weight"] = torch.zeros(32, 4)

    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=r"model\.norm: only linear layers are adapted"):
        LLM(tiny("Llama"), adapters={"one": tmp_path}, kv_memory=POOL)


def test_a_layer_that_other_rows_go_through_is_refused(tmp_path: Path) -> None:
    model: Any = tiny("Llama")
    save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["attention"])
    layer = model.model.layers[1].self_attn.q_proj
    plain = type(layer).forward
    layer.register_forward_pre_hook(lambda _, args: (args[0],))
    model.model.layers[1].self_attn.q_proj.forward = lambda x: plain(layer, x)
    assert LLM(model, adapters={"one": tmp_path}, kv_memory=POOL)  # each token once: that is well
    twice = model.model.layers[2].mlp
    inner, other = type(twice).forward, model.model.layers[1].self_attn.v_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        other(x[:, :1])  # as experts are called, for some of the tokens
        return inner(twice, x)

    twice.forward = forward
    with pytest.raises(ValueError, match=r"for each token of a step.*layers\.1\.self_attn\.v_proj$"):
        LLM(model, adapters={"one": tmp_path}, kv_memory=POOL)


def test_files_that_are_none(base: Path, adapter: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (adapter / TENSORS).unlink()
    assert f"{str(adapter)!r} has none of adapter_model.safetensors" in refusal(base, one=adapter)
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    assert "adapter 'one'" in refusal(base, one=adapter)
    assert not (tmp_path / "ran").exists()
    (adapter / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not JSON" in refusal(base, one=adapter)
    (adapter / "adapter_config.json").unlink()
    assert "an adapter is a folder as peft saves it" in refusal(base, one=adapter)
    with pytest.raises(ValueError, match="an adapter without a name"):
        LLM(base, adapters={"": adapter}, kv_memory=POOL)


NAMES = [name for name, _ in tiny("Llama").named_modules() if name]
ENDS = st.sampled_from(["q_proj", "mlp.up_proj", "1.mlp.up_proj", "lm_head", "layers.2.mlp.gate_proj", "roj"])
PATTERNS = st.sampled_from([r".*\.(q_proj|up_proj)", r"lm_head", r".*layers\.[12]\..*_proj", r"q_proj"])


ADAPTED = {
    "targets": st.one_of(st.lists(ENDS, min_size=1, max_size=3, unique=True), PATTERNS),
    "excluded": st.one_of(st.none(), st.lists(ENDS, max_size=2, unique=True), PATTERNS),
    "blocks": st.one_of(st.none(), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2)),
    "block_patterns": st.one_of(st.none(), st.just("layers"), st.just(["h", "layers"]), st.just("blocks")),
    "ranks": st.dictionaries(st.sampled_from(["q_proj", r"1\.mlp\.up_proj", r".*head"]), st.integers(1, 9)),
    "alphas": st.dictionaries(st.sampled_from(["up_proj", r"layers\.2\..*", "lm_head"]), st.integers(1, 9)),
    "use_rslora": st.booleans(),
}


@settings(max_examples=40)
@given(**ADAPTED)
def test_the_config_names_the_layers_that_peft_adapts(**fields: Any) -> None:
    check_names(**fields)


@pytest.mark.long
@settings(max_examples=300)
@given(**ADAPTED)
def test_any_of_many_configs_names_the_layers_that_peft_adapts(**fields: Any) -> None:
    check_names(**fields)


def check_names(
    targets: Any, excluded: Any, blocks: Any, block_patterns: Any, ranks: Any, alphas: Any, use_rslora: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    # peft takes blocks and their patterns with a list of names only.
    more = {} if isinstance(targets, str) else {"layers_to_transform": blocks}
    if more and blocks not in (None, []):
        more["layers_pattern"] = block_patterns
    fields = {"r": 4, "lora_alpha": 6, "target_modules": targets, "exclude_modules": excluded, **more}
    fields |= {"rank_pattern": ranks, "alpha_pattern": alphas, "use_rslora": use_rslora}
    ours = AdapterConfig._of(fields)
    found = {name for name in NAMES if ours.adapts(name)}
    try:
        model = get_peft_model(tiny("Llama"), LoraConfig(task_type="CAUSAL_LM", **fields))
    except ValueError:  # it names no layer, or one that is no linear layer
        linear = {name for name in NAMES if name.endswith(("_proj", "lm_head"))}
        assert not found or not found <= linear
        return
    adapted = {
        name.removeprefix("base_model.model."): part
        for name, part in model.named_modules()
        if hasattr(part, "lora_A")
    }
    assert found == set(adapted)
    for name, part in adapted.items():
        assert ours.rank_of(name) == part.r["default"]
        assert ours.scale_of(name) == pytest.approx(part.scaling["default"], rel=1e-12)
