"""Requests that the server's own description allows, and others, against the real engine: nobody is lost."""

from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving.conftest import wait_until
from tests.serving.real.conftest import RealSite
from tests.serving.test_description import CHECKS
from tests.tiers import soaked

pytestmark = pytest.mark.unit
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generation")


PROMPTS = st.one_of(
    st.text("the quick brown fox", min_size=1, max_size=20),
    st.lists(st.integers(2, 200), min_size=1, max_size=20),
)


def ask(site: RealSite, num_cases: int) -> dict[str, set[int]]:
    """Send requests to every route, and to those that generate some that fit and some that do not."""
    schema = schemathesis.openapi.from_url(f"{site.server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    seen: dict[str, set[int]] = {operation.label: set() for operation in operations}
    positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    cases = [each.as_strategy(generation_mode=mode) for each in operations for mode in (positive, negative)]
    send(st.one_of(*cases), num_cases // 2, seen)
    for each in operations:
        if each.path in GENERATING:
            share = num_cases // 4 // len(GENERATING)
            send(each.as_strategy(generation_mode=negative), share, seen)
            fitting = st.builds(
                make_answerable, each.as_strategy(generation_mode=positive), PROMPTS, st.integers(1, 4)
            )
            send(fitting, share, seen)
    return seen


def send(cases: st.SearchStrategy[schemathesis.Case], num_cases: int, seen: dict[str, set[int]]) -> None:
    """Send requests, check the answers, and note the statuses of each route."""

    @given(case=cases)
    @settings(max_examples=num_cases, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        answer = case.call()
        case.validate_response(answer, checks=CHECKS)
        seen[case.operation.label].add(answer.status_code)

    check()


def make_answerable(case: schemathesis.Case, prompt: str | list[int], most: int) -> schemathesis.Case:
    """Return a case with a prompt that fits, as what is generated has hardly ever one."""
    body = case.body if isinstance(case.body, dict) else {}
    kept = {name: value for name, value in body.items() if name in ("echo", "seed", "stream")}
    if case.path == "/v1/chat/completions":
        kept.pop("echo", None)
        kept["messages"] = [{"role": "user", "content": str(prompt)}]
    elif case.path == "/generation":
        kept = {"prompt": str(prompt)}
    else:
        kept["prompt"] = prompt
    case.body = {**kept, "max_tokens": most}
    return case


def holds(begin: Callable[..., RealSite], num_cases: int) -> None:
    site = begin(max_running=8, max_length=128)
    seen = ask(site, num_cases)
    for path in GENERATING:
        assert {200, 400} <= seen[f"POST {path}"]
    outcomes = site.outcomes()
    assert outcomes["failed"] == 0
    assert min(outcomes["finished"], outcomes["rejected"]) > num_cases // 20
    wait_until(site.is_empty)
    assert site.service.error is None
    site.engine.scheduler.pool.check([])


@pytest.mark.soak
@pytest.mark.long  # the same requests to an engine without a model are in test_description
@pytest.mark.parametrize("num_cases", [soaked(5000)])
def test_generated_requests(site: Callable[..., RealSite], num_cases: int) -> None:
    holds(site, num_cases)
