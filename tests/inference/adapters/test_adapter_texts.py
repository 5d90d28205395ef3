"""Texts with adapters are those of `generate` of the merged models, whatever else happens to a request."""

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.inference import LLM, RequestRefused, SamplingParams
from tests.inference.adapters.made import LLAMA, POOL, in_codes, logits_of, merged
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.test_quantized import TIES, assert_same_but_ties
from tests.tiers import further

pytest.importorskip("peft")
pytestmark = pytest.mark.unit
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
ASKED = [(None, "one", "two")[number % 3] for number in range(len(MIXED))]


class Adapted:
    """A model in a folder, two adapters in folders, and the models that they make."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        self.base = folder / "base"
        tiny("Llama", **sizes).save_pretrained(self.base)
        self.folders = {"one": folder / "one", "two": folder / "two"}
        self.models: dict[str | None, nn.Module] = {
            None: tiny("Llama", **sizes),
            "one": merged(self.folders["one"], "Llama", 1, sizes=sizes, **LLAMA["all"]),
            "two": merged(self.folders["two"], "Llama", 2, sizes=sizes, **LLAMA["patterns"]),
        }

    def llm(self, **options: Any) -> LLM:
        return LLM(self.base, adapters=self.folders, **{"kv_memory": POOL, **options})

    @cached_property
    def texts(self) -> list[tuple[int, ...]]:
        """What `generate` answers to each of the prompts under its adapter."""
        return [
            greedy(self.models[name], prompt, NUM_TOKENS)
            for name, prompt in zip(ASKED, prompts(*MIXED), strict=True)
        ]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def texts_of(llm: LLM, lengths: tuple[int, ...] = MIXED) -> list[tuple[int, ...]]:
    asked = ASKED[: len(lengths)]
    return [output.token_ids for output in llm.generate(prompts(*lengths), GREEDY, adapter=asked)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        further({"max_tokens_per_step": 16, "max_running": 5}),
        further({"has_prefix_cache": False, "block_size": 4}),
        {"is_batch_invariant": True},
    ],
    ids=["all_at_once", "in_chunks", "small_blocks", "batch_invariant"],
)
def test_a_mixed_batch(adapted: Adapted, options: dict[str, Any]) -> None:
    assert texts_of(adapted.llm(**options)) == adapted.texts


def test_a_preempted_answer_keeps_its_adapter(adapted: Adapted) -> None:
    one_token = adapted.llm(block_size=1).engine.executor.runner.bytes_per_block
    llm = adapted.llm(kv_memory=one_token * 140, max_length=132, block_size=2)
    assert texts_of(llm) == adapted.texts
    assert llm.engine.scheduler.num_preemptions > 0


def test_one_prompt_under_two_adapters_and_none_with_the_prefix_cache_on(adapted: Adapted) -> None:
    llm = adapted.llm()
    (prompt,) = prompts(64)
    expected = [greedy(adapted.models[name], prompt, NUM_TOKENS) for name in adapted.models]
    assert len(set(expected)) == 3
    for number in range(2):  # the second time each finds the blocks of its own first time
        for name, text in zip(adapted.models, expected, strict=True):
            (output,) = llm.generate(prompt, GREEDY, adapter=name)
            assert output.token_ids == text
            assert output.usage.cached_tokens == (48 if number else 0)
    together = llm.generate([prompt] * 3, GREEDY, adapter=list(adapted.models))
    assert [output.token_ids for output in together] == expected


@pytest.mark.long  # `make test` has several answers to one prompt without adapters: engine/test_texts.py
def test_all_answers_to_a_prompt_are_the_adapters(adapted: Adapted) -> None:
    llm = adapted.llm()
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.5, seed=3, n=3)
    for name in adapted.models:
        folder = adapted.base.parent / f"merged-{name}"
        adapted.models[name].save_pretrained(folder)
        (expected,) = LLM(folder, kv_memory=POOL).generate(prompts(30), drawn)
        among = llm.generate([prompts(30)[0], *prompts(9, 20)], drawn, adapter=[name, "one", "two"])
        assert [each.token_ids for each in among[0].outputs] == [each.token_ids for each in expected.outputs]


@pytest.mark.parametrize("way", [further("int8-weights"), "int8", further("int4:32")])
def test_quantized_layers_with_adapters_in_float(way: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    adapted = Adapted(tmp_path, **sizes)
    lengths = MIXED[:9]
    found = texts_of(adapted.llm(quantize=way), lengths)
    for name in adapted.models:
        reference = in_codes(adapted.base, way, tiny("Llama", **sizes), adapted.models[name])
        for asked, prompt, text in zip(ASKED[:9], prompts(*lengths), found, strict=True):
            if asked == name:
                expected = greedy(reference, prompt, NUM_TOKENS)
                assert_same_but_ties(reference, prompt, text, expected, TIES[way])


@pytest.mark.long  # `make test` has bytes in the cache and adapters one by one
def test_keys_and_values_in_8_bits(adapted: Adapted) -> None:
    found = adapted.llm(kv_dtype="int8").generate(prompts(*MIXED), GREEDY, adapter=ASKED)
    for name in adapted.models:
        folder = adapted.base.parent / f"bytes-{name}"
        adapted.models[name].save_pretrained(folder)
        expected = LLM(folder, kv_memory=POOL, kv_dtype="int8").generate(prompts(*MIXED), GREEDY)
        assert [output.token_ids for output, asked in zip(found, ASKED, strict=True) if asked == name] == [
            output.token_ids for output, asked in zip(expected, ASKED, strict=True) if asked == name
        ]


def test_what_is_asked_for_must_be_there(adapted: Adapted) -> None:
    llm = adapted.llm()
    with pytest.raises(RequestRefused, match=r"no adapter 'poet'; there are 'one', 'two'"):
        llm.generate([1, 2], GREEDY, adapter="poet")
    with pytest.raises(ValueError, match="2 adapters for 1 prompts"):
        llm.generate([[1, 2]], GREEDY, adapter=["one", "two"])


def test_halves_err_beside_a_layer_no_more_than_within_it(adapted: Adapted) -> None:
    llm = adapted.llm(dtype="bfloat16")
    given = torch.tensor(prompts(40))
    for number, model in enumerate(adapted.models.values()):
        with torch.no_grad():
            expected = model(given).logits[0]
            within = copy.deepcopy(model).to(torch.bfloat16)(given).logits[0].float()
        beside = logits_of(llm, [(given[0].tolist(), number)]).float()
        assert (beside - expected).norm() < 1.5 * (within - expected).norm() < 0.5 * expected.norm()
