"""Logits with adapters are those of peft's own model, in whatever company."""

from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.inference import LLM
from tests.inference.adapters.made import LLAMA, OTHERS, POOL, logits_of, save_adapter
from tests.inference.models import VOCAB, prompts, tiny
from tests.tiers import further

pytest.importorskip("peft")
pytestmark = pytest.mark.unit
CASES = {
    **{f"Llama-{name}": ("Llama", config) for name, config in LLAMA.items()},
    **{family: (family, config) for family, config in OTHERS.items()},
}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
# Beside the faster parts of each, which are float32's.
FIRST_CELLS = (("Llama-all", False, torch.float64), ("GPT2", False, torch.float64))


@torch.no_grad()
def expected_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float | None = None) -> None:
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= (bound or BOUNDS[found.dtype]) * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "is_owned", "dtype"),
    [
        (name, is_owned, dtype)
        if (is_owned, dtype) == (True, torch.float32) or (name, is_owned, dtype) in FIRST_CELLS
        else further(name, is_owned, dtype)
        for name in CASES
        for is_owned in (True, False)
        for dtype in BOUNDS
    ],
)
def test_a_step_of_two_adapters_and_none(
    name: str, is_owned: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, config = CASES[name]
    folders = {name: tmp_path / name for name in ("one", "two")}
    models = [tiny(family, dtype)]
    models += [
        save_adapter(folder, tiny(family, dtype), seed, **config)
        for seed, folder in enumerate(folders.values())
    ]
    llm = LLM(tiny(family, dtype), adapters=folders, kv_memory=POOL, is_owned=is_owned)
    given = prompts(9, 1, 20, 3)
    numbers = [1, 2, 0, 1]
    expected = [
        expected_logits(models[number], prompt) for number, prompt in zip(numbers, given, strict=True)
    ]
    # transformers' own BLOOM takes its softmax in float32.
    bound = BOUNDS[torch.float32] if family == "Bloom" else BOUNDS[dtype]
    assert_close(logits_of(llm, list(zip(given, numbers, strict=True))), torch.cat(expected), bound)
    for number, prompt, alone in zip(numbers, given, expected, strict=True):
        assert_close(logits_of(llm, [(prompt, number)]), alone, bound)
    assert (expected_logits(models[0], given[0]) - expected[0]).abs().max() > 0.1  # adapters matter


@pytest.mark.parametrize("way", [".safetensors", ".bin"])
def test_both_files_of_peft(way: str, tmp_path: Path) -> None:
    made = save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["all"])
    if way == ".bin":
        made.save_pretrained(str(tmp_path), safe_serialization=False)
        (tmp_path / "adapter_model.safetensors").unlink()
    llm = LLM(tiny("Llama"), adapters={"one": tmp_path}, kv_memory=POOL)
    (prompt,) = prompts(12)
    assert_close(logits_of(llm, [(prompt, 1)]), expected_logits(made, prompt))


@pytest.mark.parametrize("name", ["all", "patterns"])
def test_bits_do_not_depend_on_company_where_it_must_not_matter(name: str, tmp_path: Path) -> None:
    folders = {str(seed): tmp_path / str(seed) for seed in (1, 2)}
    models = [tiny("Llama")]
    models += [
        save_adapter(folder, tiny("Llama"), seed, **LLAMA[name])
        for seed, folder in enumerate(folders.values())
    ]
    settings = {"adapters": folders, "kv_memory": POOL, "is_owned": True, "is_batch_invariant": True}
    llm = LLM(tiny("Llama"), **settings)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 24, (12,), generator=generator).tolist()
    chunks = [
        (torch.randint(0, VOCAB, (length,), generator=generator).tolist(), number % 3)
        for number, length in enumerate(lengths)
    ]
    alone = [logits_of(llm, [chunk]) for chunk in chunks]
    for (prompt, number), found in zip(chunks, alone, strict=True):
        assert_close(found, expected_logits(models[number], prompt))
    for _ in range(4):
        order = torch.randperm(len(chunks), generator=generator).tolist()
        together = logits_of(llm, [chunks[place] for place in order])
        parts = together.split([lengths[place] for place in order])
        for place, part in zip(order, parts, strict=True):
            assert torch.equal(part, alone[place])


def test_rows_without_an_adapter_keep_their_bits_beside_one(tmp_path: Path) -> None:
    """Of layers that add to a product: only those before an activation are computed in another way."""
    save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["attention"])
    llm = LLM(tiny("Llama"), adapters={"one": tmp_path}, kv_memory=POOL, is_owned=True)
    first, second = prompts(7, 7)
    beside_none = logits_of(llm, [(first, 0), (second, 0)])
    beside_one = logits_of(llm, [(first, 0), (second, 1)])
    assert torch.equal(beside_none[:7], beside_one[:7])
    assert not torch.equal(beside_none[7:], beside_one[7:])


def test_a_model_in_memory_stays_its_owners(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny("Llama"), 1, **LLAMA["all"])
    model = tiny("Llama")
    (prompt,) = prompts(12)
    before = expected_logits(model, prompt)
    llm = LLM(model, adapters={"one": tmp_path}, kv_memory=POOL)
    with_one = logits_of(llm, [(prompt, 1)])
    assert torch.equal(expected_logits(model, prompt), before)
    assert all("forward" not in vars(part) for part in model.modules())
    with torch.no_grad():  # a step of an optimizer is seen, under the adapter, too
        model.get_submodule("model.layers.0.mlp.down_proj").weight.mul_(2)
    assert not torch.allclose(logits_of(llm, [(prompt, 1)]), with_one)
    changed = tiny("Llama")
    with torch.no_grad():
        changed.get_submodule("model.layers.0.mlp.down_proj").weight.mul_(2)
    other = save_adapter(tmp_path / "again", changed, 1, **LLAMA["all"])
    assert_close(logits_of(llm, [(prompt, 1)]), expected_logits(other, prompt))
