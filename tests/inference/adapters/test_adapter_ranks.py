"""Adapters over ranks: A and B are cut as their layers are, and texts are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.inference import LLM
from colossalai.inference._build import _make_runner, engine_of_ranks
from colossalai.inference._llm import Collector
from colossalai.inference._load import EngineOptions, load_model
from colossalai.inference._ranks import StepLink
from colossalai.inference._request import Request, SamplingParams
from colossalai.inference.adapters import load_adapters
from colossalai.inference.paging import random_like
from tests.inference.adapters.made import LLAMA, OTHERS, in_codes, merged
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.test_quantized import TIES, assert_same_but_ties
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import run_each

pytest.importorskip("peft")
pytestmark = pytest.mark.dist
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
ASKED = [(None, "one", "two")[number % 3] for number in range(len(MIXED))]
# The vocabulary, and so what is added to the head, is padded.
SIZES: dict[str, dict[str, int]] = {"Llama": {"vocab_size": 203}}
CONFIGS = {"Llama": (LLAMA["all"], LLAMA["patterns"])}


def launched(tp: int, pp: int) -> Mesh:
    parallel = {"pipeline": {"size": pp}, "tensor": {"size": tp, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh: Mesh = gpc.mesh
    return mesh


def answers(folder: str, tp: int, pp: int, options: dict[str, Any]) -> Any:
    """Return the texts on rank 0, of a batch of both adapters and none."""
    settings = EngineOptions(kv_memory=2**22, adapters=folders(folder), **options)
    engine = engine_of_ranks(f"{folder}/base", settings, mesh=launched(tp, pp))
    if engine is None:
        return None
    collectors = [
        Collector(
            Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=GREEDY, adapter=name)
        )
        for number, (prompt, name) in enumerate(zip(prompts(*MIXED), ASKED, strict=True))
    ]
    texts = []
    for group in (collectors[:1], collectors[1:]):  # one alone, then the others together
        for collector in group:
            engine.submit(collector.request, collector.on_delta)
        while engine.has_work:
            engine.step()
    engine.executor.close()
    texts += [collector.output().outputs[0].token_ids for collector in collectors]
    return texts


def folders(folder: str) -> dict[str, str]:
    return {name: f"{folder}/{name}" for name in ("one", "two")}


def saved(folder: Path, family: str, **more: int) -> dict[str | None, Any]:
    """Save a model and two adapters; return what they make of it."""
    sizes = {**SIZES.get(family, {}), **more}
    tiny(family, **sizes).save_pretrained(folder / "base")
    first, second = CONFIGS.get(family) or (OTHERS[family], OTHERS[family])
    return {
        None: tiny(family, **sizes),
        "one": merged(folder / "one", family, 1, sizes=sizes, **first),
        "two": merged(folder / "two", family, 2, sizes=sizes, **second),
    }


CELLS = [
    ("Llama", 2, 2, {}),
    in_soak("Llama", 2, 1, {}),
    further("Llama", 2, 1, {"is_batch_invariant": True}),
    in_soak("GPT2", 2, 1, {}),
    in_soak("Bloom", 1, 2, {}),
    further("Llama", 1, 2, {}),
    in_soak("OPT", 2, 1, {}),
    further("Bloom", 2, 2, {}),
]


@pytest.mark.parametrize(("family", "tp", "pp", "options"), CELLS)
def test_texts_are_those_of_generate(
    family: str, tp: int, pp: int, options: dict[str, Any], tmp_path: Path
) -> None:
    models = saved(tmp_path, family, num_hidden_layers=2)
    found, *others = run_ranks(answers, tp * pp, str(tmp_path), tp, pp, options)
    assert others == [None] * (tp * pp - 1)
    assert found == [
        greedy(models[name], prompt, NUM_TOKENS) for name, prompt in zip(ASKED, prompts(*MIXED), strict=True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("way", ["int8-weights"])
def test_quantized_and_cut_with_adapters_in_float(way: str, tmp_path: Path) -> None:
    models = saved(tmp_path, "Llama", hidden_size=64, intermediate_size=64)
    found, _ = run_ranks(answers, 2, str(tmp_path), 2, 1, {"quantize": way})
    references = {
        name: in_codes(tmp_path / "base", way, models[None], model) for name, model in models.items()
    }
    for name, prompt, text in zip(ASKED, prompts(*MIXED), found, strict=True):
        expected = greedy(references[name], prompt, NUM_TOKENS)
        assert_same_but_ties(references[name], prompt, text, expected, TIES[way])


def slices(folder: str, tp: int, pp: int) -> dict[str, Any]:
    """Return by layer and adapter what this rank holds of A and B, and what is added to which rows."""
    mesh = launched(tp, pp) if tp * pp > 1 else None
    settings = EngineOptions(kv_memory=2**22)
    model = load_model(f"{folder}/base", settings, mesh)
    link = None if mesh is None else StepLink(mesh, torch.device("cpu"))
    runner, *_ = _make_runner(model, settings, link)
    received = None if mesh is None or mesh.axis("pp").rank == 0 else random_like(torch.zeros(1, 3, 32), 3)
    deltas = load_adapters(runner, folders(folder), received)
    names = {part: name for name, part in model.named_modules()}
    return {
        f"{names[layer]} {number}": pair
        for layer, delta in deltas.items()
        for number, pair in delta.pairs.items()
    }


def test_each_rank_holds_its_slices_of_its_own_layers(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", num_hidden_layers=2)
    whole = slices(str(tmp_path), 1, 1)
    cut, stages = run_each(2, slices, [(str(tmp_path), 2, 1), (str(tmp_path), 1, 2)])
    for key, (first, second) in whole.items():
        parts = [rank[key] for rank in cut]
        if key.startswith("lm_head"):
            assert torch.equal(torch.cat([b for _, b in parts])[:203], second)
            assert all(len(b) == 102 for _, b in parts)
        elif any(name in key for name in ("o_proj", "down_proj")):
            assert torch.equal(torch.cat([a for a, _ in parts], 1), first)
            assert all(torch.equal(b, second) for _, b in parts)
        else:
            assert torch.equal(torch.cat([b for _, b in parts]), second)
            assert all(torch.equal(a, first) for a, _ in parts)
    assert not stages[0].keys() & stages[1].keys()
    assert stages[0].keys() | stages[1].keys() == whole.keys()


@pytest.mark.long
def test_llm_with_ranks_of_its_own(tmp_path: Path) -> None:
    models = saved(tmp_path, "Llama")
    given = prompts(5, 30, 12)
    names = list(models)
    options = {"adapters": folders(str(tmp_path)), "speculate": "ngram:4", "kv_memory": 2**22}
    with LLM(str(tmp_path / "base"), tp_size=2, **options) as llm:
        found = [output.token_ids for output in llm.generate(given, GREEDY, adapter=names)]
        with pytest.raises(ValueError, match="there is no adapter 'poet'"):
            llm.generate(given, GREEDY, adapter="poet")
    assert found == [
        greedy(models[name], prompt, NUM_TOKENS) for name, prompt in zip(names, given, strict=True)
    ]
