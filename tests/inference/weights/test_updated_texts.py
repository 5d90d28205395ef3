"""After an update of weights texts are those of an engine that was started with the new ones."""

import gc
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from colossalai.checkpoint_io import save_model
from colossalai.inference import LLM, EngineOptions, RequestFailed, SamplingParams, save_quantized
from colossalai.inference._load import load_model
from colossalai.inference.loading._served_weights import ServedWeights
from colossalai.inference.products import QuantizedWeight
from colossalai.inference.products._products import PackedProduct
from tests.inference.metaseq import write_metaseq
from tests.inference.models import MIXED, tiny
from tests.inference.weights.pairs import FULL, POOL, new_model, old_model, saved_pair, texts
from tests.tiers import further, in_soak

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit
WAYS = (None, "int8", "int8-weights", "int4:32")
FIRST_CELLS = {("Llama", "int4:32"), ("GPT2", "int8")}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        (family, way)
        if (family, way) in FIRST_CELLS
        else (further if (place + number) % 2 else in_soak)(family, way)  # every other way of each family
        for place, family in enumerate(("Llama", "GPT2", "OPT", "Qwen3", "Bloom"))
        for number, way in enumerate(WAYS)
    ],
)
def test_texts_are_those_of_an_engine_with_the_new_values(
    family: str, way: str | None, tmp_path: Path
) -> None:
    old, new = saved_pair(tmp_path, family)
    llm = LLM(old, kv_memory=POOL, quantize=way)
    given = () if (family, way) in FIRST_CELLS else (MIXED, FULL)
    before, expected = texts(llm, *given), texts(LLM(new, kv_memory=POOL, quantize=way), *given)
    assert before != expected
    model = new_model(family)
    for source, wanted in ((new, expected), (old, before), (model, expected)):
        llm.update_weights(source)
        assert texts(llm, *given) == wanted
    llm.update_weights(old_model(family).state_dict().items())
    assert texts(llm, *given) == before
    with torch.no_grad():  # nothing of a source is kept
        for param in model.parameters():
            param.fill_(torch.nan)
    assert texts(llm, *given) == before
    stats = llm.engine.stats()
    assert (stats.weight_updates, stats.weights_version) == (4, 4)


@pytest.mark.parametrize("dtype", [further(torch.float64), torch.bfloat16])
def test_other_dtypes_keep_nothing_of_a_source(dtype: torch.dtype, tmp_path: Path) -> None:
    old, new = saved_pair(tmp_path)
    name = str(dtype).removeprefix("torch.")
    llm = LLM(old, kv_memory=POOL, dtype=name)
    expected = texts(LLM(new, kv_memory=POOL, dtype=name))
    model = new_model("Llama").to(dtype)
    llm.update_weights(model)
    for param in model.parameters():
        param.data.fill_(torch.nan)
    assert texts(llm) == expected


def test_every_layout_of_a_checkpoint(tmp_path: Path) -> None:
    old, new = saved_pair(tmp_path, "OPT")
    llm = LLM(old, kv_memory=POOL)
    before, expected = texts(llm), texts(LLM(new, kv_memory=POOL))
    model = new_model("OPT")
    save_model(model, tmp_path / "ours", shard=True)
    save_model(model, tmp_path / "ours.pt")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    write_metaseq(model, tmp_path / "restored.pt")
    for name in ("ours", "ours.pt", "pytorch_model.bin", "restored.pt"):
        llm.update_weights(tmp_path / name)
        assert texts(llm) == expected, name
        llm.update_weights(old)
        assert texts(llm) == before


@pytest.mark.parametrize("is_tied", [further(False), True], ids=["own head", "tied head"])
def test_codes_that_were_saved_and_values_update_the_same_model(is_tied: bool, tmp_path: Path) -> None:
    old, new = saved_pair(tmp_path, tie_word_embeddings=is_tied)
    for name, folder in (("old", old), ("new", new)):
        model = load_model(folder, EngineOptions(quantize="int8"))
        save_quantized(model, tmp_path / f"{name} in codes", source=folder)
    llm = LLM(tmp_path / "old in codes", kv_memory=POOL)
    expected = texts(LLM(new, kv_memory=POOL, quantize="int8"))
    before = texts(llm)
    for source, wanted in ((new, expected), (old, before), (tmp_path / "new in codes", expected)):
        llm.update_weights(source)
        assert texts(llm) == wanted


def test_a_model_that_belongs_to_its_owner_is_filled_itself(tmp_path: Path) -> None:
    _, new = saved_pair(tmp_path)
    model = old_model("Llama")
    llm = LLM(model, kv_memory=POOL)
    assert texts(llm) != (expected := texts(LLM(new, kv_memory=POOL)))
    llm.update_weights(new)
    assert texts(llm) == expected
    made = model.state_dict()
    assert all(torch.equal(made[name], value) for name, value in new_model("Llama").state_dict().items())
    assert all(param.requires_grad for param in model.parameters())


def test_what_was_quantized_in_memory_is_quantized_anew(tmp_path: Path) -> None:
    _, new = saved_pair(tmp_path)
    llm = LLM(old_model("Llama"), quantize="int8", is_owned=True, kv_memory=POOL)
    llm.update_weights(new)
    assert texts(llm) == texts(LLM(new, kv_memory=POOL, quantize="int8"))


def test_parts_that_no_faster_one_agrees_with_are_filled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = saved_pair(tmp_path)
    monkeypatch.setattr("colossalai.inference.products._faster._agrees", lambda *given: False)
    for way in (None, "int8"):
        llm = LLM(old, kv_memory=POOL, quantize=way)
        llm.update_weights(new)
        assert texts(llm) == texts(LLM(new, kv_memory=POOL, quantize=way))


def test_prefixes_of_old_weights_are_not_found(tmp_path: Path) -> None:
    old, new = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL)
    texts(llm)
    texts(llm)
    assert llm.engine.stats().prefix_hit_tokens
    hits = llm.engine.stats().prefix_hit_tokens
    llm.update_weights(new)
    assert texts(llm) == texts(LLM(new, kv_memory=POOL))
    assert llm.engine.stats().prefix_hit_tokens == hits
    texts(llm)
    assert llm.engine.stats().prefix_hit_tokens > hits


def test_all_misfits_are_said_and_nothing_has_changed(tmp_path: Path) -> None:
    old, _ = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL)
    before = texts(llm)
    state = old_model("Llama").state_dict()
    misfits: dict[str, Any] = dict(state)
    del misfits["model.norm.weight"]
    misfits["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
    misfits["model.extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        llm.update_weights(misfits)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.extra"):
        assert name in str(refused.value)
    tiny("GPT2").save_pretrained(tmp_path / "other")
    whole = (Path(old) / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "code.pt")
    wrong: list[Any] = [tmp_path / name for name in ("other", "cut.safetensors", "code.pt", "not there")]
    wrong += [{"model.norm.weight": 3}, {name: value.to("meta") for name, value in state.items()}]
    for source in wrong:
        with pytest.raises((ValueError, OSError)):
            llm.update_weights(source)
    assert texts(llm) == before
    assert llm.engine.stats().weight_updates == 0


def test_an_update_that_fails_on_the_way_refuses_requests_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL)
    loaded: list[str] = []
    load_part = ServedWeights._load_part

    def failing(self: ServedWeights, *given: Any) -> None:
        if len(loaded) == 3:
            raise OSError("the disk is gone")
        loaded.append("part")
        load_part(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ServedWeights, "_load_part", failing)
        with pytest.raises(RequestFailed, match="the first 3 of 8 parts have new values: OSError: the disk"):
            llm.update_weights(new)
    with pytest.raises(RequestFailed, match="new weights in part"):
        texts(llm)
    with pytest.raises(RequestFailed, match="new weights in part"):
        llm.update_weights(tmp_path / "not there")
    llm.update_weights(new)
    assert texts(llm) == texts(LLM(new, kv_memory=POOL))


@pytest.mark.parametrize(("num_updates", "stride"), [(5, 4), further(50, 10)])
def test_updates_leave_nothing_behind_and_take_one_part_at_a_time(
    num_updates: int, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: WeakSet[PackedProduct] = WeakSet()
    most = 0
    init = PackedProduct.__init__

    def counting(self: PackedProduct, *given: Any) -> None:
        nonlocal most
        init(self, *given)
        alive.add(self)
        most = max(most, len(alive))

    def num_tensors() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    monkeypatch.setattr(PackedProduct, "__init__", counting)
    old, new = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL)
    model = new_model("Llama")
    llm.update_weights(model)
    gc.collect()
    products, tensors, most = len(alive), num_tensors(), 0
    assert products == 4 * 5 + 1
    for number in range(num_updates):
        llm.update_weights((old, new)[number // stride % 2] if number % stride == 0 else model)
    assert num_tensors() == tensors
    assert len(alive) == products
    assert most <= products + 2  # gate and up are there before their old ones go
    assert texts(llm) == texts(LLM(new, kv_memory=POOL))


@pytest.mark.long
def test_quantizing_anew_holds_one_plain_weight_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL, quantize="int8")
    seen: list[int] = []
    from colossalai.inference.loading import _quantized

    quantize = _quantized.quantize

    def counting(weight: torch.Tensor, *given: Any) -> QuantizedWeight:
        plain = {
            each.data_ptr(): each.nbytes
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor)  # what is a proxy may be one of nothing
            and id(each) not in before
            and each.layout == torch.strided  # the memory of packed ones is oneDNN's
            and each.dtype == torch.float32
            and each.dim() == 2
            and tuple(each.shape) == tuple(weight.shape)
            and each.device.type == "cpu"
        }
        seen.append(len(plain))
        return quantize(weight, *given)

    # Also of other tests; held, so that no new one has the id of one that is gone.
    before = {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
    with monkeypatch.context() as patch:
        patch.setattr(_quantized, "quantize", counting)
        llm.update_weights(new)
    assert len(seen) == 4 * 7 + 1
    # Beside what the file has of that shape, which is mapped, there is one.
    # The embedding of the file has the shape of the head.
    assert sorted(set(seen)) == [2 + 1, 4 + 1, 2 * 4 + 1]
    assert seen.count(2 + 1) == 1


def test_adapters_stay(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.inference.adapters.made import save_adapter

    old, new = saved_pair(tmp_path)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "gate_proj", "down_proj"]}
    save_adapter(tmp_path / "sql", old_model("Llama"), 1, **options)
    llm, other = (
        LLM(folder, kv_memory=POOL, adapters={"sql": str(tmp_path / "sql")}) for folder in (old, new)
    )
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=12, temperature=0)
    llm.update_weights(new)
    for adapter in ("sql", None):
        found, wanted = (each.generate(prompt, params, adapter=adapter)[0] for each in (llm, other))
        assert found.token_ids == wanted.token_ids


def test_a_renamed_file_of_safetensors(tmp_path: Path) -> None:
    old, new = saved_pair(tmp_path)
    llm = LLM(old, kv_memory=POOL)
    tensors = load_file(Path(new) / "model.safetensors")
    save_file({f"module.{name}": value for name, value in tensors.items()}, tmp_path / "wrapped.safetensors")
    llm.update_weights(tmp_path / "wrapped.safetensors")
    assert texts(llm) == texts(LLM(new, kv_memory=POOL))
