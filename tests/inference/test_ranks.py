"""Engines on several ranks: the texts are those of one process."""

from typing import Any

import pytest
import torch

import colossalai
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.inference import LLM, RequestFailed, SamplingParams
from colossalai.inference._build import build_engine, serve_rank
from colossalai.inference._llm import Collector
from colossalai.inference._load import EngineOptions, cut_for_ranks
from colossalai.inference._ranks import StepLink
from colossalai.inference._request import Request
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import in_turn

pytestmark = pytest.mark.dist
NUM_TOKENS = 12


def answers(
    family: str, tp: int, pp: int, params: SamplingParams, lengths: tuple[int, ...], **options: Any
) -> Any:
    """Return the answers of an engine on this rank's job, on rank 0; None elsewhere."""
    parallel = {"pipeline": {"size": pp}, "tensor": {"size": tp, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh: Mesh = gpc.mesh
    model = cut_for_ranks(tiny(family), mesh)
    link = StepLink(mesh, torch.device("cpu"))
    settings = EngineOptions(kv_memory=2**22, **options)
    if mesh.rank:
        serve_rank(model, settings, link=link)
        return None
    engine = build_engine(model, None, settings, link=link)
    collectors = [
        Collector(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
        for number, prompt in enumerate(prompts(*lengths))
    ]
    for collector in collectors:
        engine.submit(collector.request, collector.on_delta)
    while engine.has_work:
        engine.step()
    engine.executor.keep_alive()
    engine.executor.close()
    engine.scheduler.pool.check([])
    return [[each.token_ids for each in collector.output().outputs] for collector in collectors]


def greedy_texts(family: str, tp: int, pp: int, is_owned: bool) -> Any:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    found = answers(family, tp, pp, params, MIXED, is_owned=is_owned)
    return found and [texts[0] for texts in found]


# A Llama goes on training, is in stages with drafts, and with adapters on four ranks.
FIRST_CELLS = {("Bloom", 2, 1)}


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        (family, tp, pp)
        if (family, tp, pp) in FIRST_CELLS
        else (in_soak if tp * pp == 4 and family not in ("Llama", "Bloom") else further)(family, tp, pp)
        for family in ("Llama", "GPT2", "OPT", "Qwen3", "Bloom")
        for tp, pp in ((2, 1), (1, 2), (2, 2))
    ],
)
def test_greedy_texts_are_those_of_generate(family: str, tp: int, pp: int) -> None:
    found, *others = run_ranks(greedy_texts, tp * pp, family, tp, pp, True)
    model = tiny(family)
    assert found == [greedy(model, prompt, NUM_TOKENS) for prompt in prompts(*MIXED)]
    assert others == [None] * (tp * pp - 1)


@pytest.mark.long
def test_a_model_that_goes_on_training_is_served_as_it_is_in_four_parts() -> None:
    found, *_ = run_ranks(greedy_texts, 4, "Llama", 2, 2, False)
    assert found == [greedy(tiny("Llama"), prompt, NUM_TOKENS) for prompt in prompts(*MIXED)]


INVARIANT = SamplingParams(max_tokens=NUM_TOKENS, seed=1)


def invariant_texts() -> Any:
    return answers("Llama", 1, 2, INVARIANT, MIXED, is_batch_invariant=True)


@pytest.fixture(scope="module")
def found_on_two_ranks() -> dict[str, Any]:
    """Return what three engines, one after the other on the same two ranks, give on the first."""
    calls = {
        "training": (greedy_texts, "Llama", 2, 1, False),
        "invariant": (invariant_texts,),
        "failing": (failing_alone,),
    }
    found, _ = run_ranks(in_turn, 2, list(calls.values()))
    return dict(zip(calls, found, strict=True))


def test_a_model_that_goes_on_training_is_served_as_it_is(found_on_two_ranks: dict[str, Any]) -> None:
    expected = [greedy(tiny("Llama"), prompt, NUM_TOKENS) for prompt in prompts(*MIXED)]
    assert found_on_two_ranks["training"] == expected


def test_stages_hand_on_tiles_of_one_size_where_company_must_not_matter(
    found_on_two_ranks: dict[str, Any],
) -> None:
    llm = LLM(tiny("Llama"), kv_memory=2**22, is_batch_invariant=True)
    alone = llm.generate(prompts(*MIXED), INVARIANT)
    expected = [[each.token_ids for each in output.outputs] for output in alone]
    assert found_on_two_ranks["invariant"] == expected


def failing_alone() -> Any:
    """Ask for one answer whose logits are NaN, and two others; return what became of them on rank 0."""
    parallel = {"pipeline": {"size": 2}, "tensor": {"size": 1, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    model = cut_for_ranks(tiny("Llama"), gpc.mesh)
    link = StepLink(gpc.mesh, torch.device("cpu"))
    settings = EngineOptions(kv_memory=2**22)
    if gpc.mesh.rank:
        serve_rank(model, settings, link=link)
        return None
    engine = build_engine(model, None, settings, link=link)
    table = next(part for part in model.modules() if isinstance(part, torch.nn.Embedding))
    table.weight.data[3] = torch.nan
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    collectors = []
    for number, prompt in enumerate(([5, 7, 9], [5, 3, 9], [11] * 20)):
        request = Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params)
        collectors.append(Collector(request))
        engine.submit(request, collectors[-1].on_delta)
    while engine.has_work:
        engine.step()
    engine.executor.close()
    engine.scheduler.pool.check([])
    good = [collectors[number].output().token_ids for number in (0, 2)]
    with pytest.raises(RequestFailed, match="have a NaN"):
        collectors[1].output()
    return good


def test_a_request_whose_logits_are_nan_fails_alone_on_several_ranks(
    found_on_two_ranks: dict[str, Any],
) -> None:
    assert found_on_two_ranks["failing"] == [
        greedy(tiny("Llama"), prompt, NUM_TOKENS) for prompt in ([5, 7, 9], [11] * 20)
    ]
