"""Drafts on several ranks, with several steps under way: the texts are those of one process."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.inference import LLM, SamplingParams
from colossalai.inference._build import build_engine, serve_rank
from colossalai.inference._llm import Collector
from colossalai.inference._load import EngineOptions, cut_for_ranks
from colossalai.inference._ranks import StepLink
from colossalai.inference._request import Request
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.speculation.makers import Oracle, still
from tests.ranks import run_ranks
from tests.tiers import of_soak
from tests.turns import run_each

pytestmark = pytest.mark.dist
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


@cache
def right_texts() -> list[tuple[int, ...]]:
    return [greedy(tiny("Llama"), prompt, NUM_TOKENS) for prompt in prompts(*MIXED)]


def drafted(tp: int, pp: int, known: list[list[int]], speculate: str) -> Any:
    """Return texts of an engine over ranks and how many tokens were guessed right, on rank 0."""
    parallel = {"pipeline": {"size": pp}, "tensor": {"size": tp, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh: Mesh = gpc.mesh
    model = cut_for_ranks(tiny("Llama"), mesh)
    link = StepLink(mesh, torch.device("cpu"))
    options = EngineOptions(kv_memory=2**22, is_owned=True, speculate=speculate)
    if mesh.rank:
        serve_rank(model, options, link=link)
        return None
    engine = build_engine(model, None, options, link=link)
    assert engine._speculator is not None
    engine._clock = engine._speculator._clock = still
    if known:
        engine._speculator.maker = Oracle(known, 0.7)
    collectors = [
        Collector(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=GREEDY))
        for number, prompt in enumerate(prompts(*MIXED))
    ]
    for collector in collectors:
        engine.submit(collector.request, collector.on_delta)
    while engine.has_work:
        engine.step()
    engine.executor.close()
    engine.scheduler.pool.check([])
    return [collector.output().token_ids for collector in collectors], engine.stats().accepted_draft_tokens


def known() -> list[list[int]]:
    return [[*prompt, *text] for prompt, text in zip(prompts(*MIXED), right_texts(), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_texts_are_those_of_generate(tp: int, pp: int) -> None:
    (found, num_accepted), *others = run_ranks(drafted, tp * pp, tp, pp, known(), "ngram:4")
    assert found == right_texts()
    assert num_accepted > 20
    assert others == [None] * (tp * pp - 1)


def test_two_stages_and_a_small_model_on_the_first_of_two_ranks(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    cases = [(1, 2, known(), "ngram:4"), (2, 1, [], f"{tmp_path}:3")]
    for (found, num_accepted), other in run_each(2, drafted, cases):
        assert found == right_texts()
        assert num_accepted > 20
        assert other is None


@of_soak  # tests/inference/adapters/test_adapter_ranks.py gives it beside adapters
def test_ranks_of_their_own_take_the_option(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    with LLM(tmp_path, tp_size=2, kv_memory=2**22, speculate="ngram:4") as llm:
        assert [each.token_ids for each in llm.generate(prompts(*MIXED), GREEDY)] == right_texts()
