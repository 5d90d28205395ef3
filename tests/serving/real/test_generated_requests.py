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


def ask(site: RealSite, num_cases: int) -> dict[str, set[int]]:
    """Send requests to every route, some with a prompt that fits; return the statuses."""
    schema = schemathesis.openapi.from_url(f"{site.server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    seen: dict[str, set[int]] = {operation.label: set() for operation in operations}
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    cases = st.one_of(*(op.as_strategy(generation_mode=mode) for op in operations for mode in modes))
    prompts = st.one_of(
        st.text("the quick brown fox", min_size=1, max_size=20),
        st.lists(st.integers(2, 200), min_size=1, max_size=20),
    )

    @given(case=cases, prompt=prompts, is_answerable=st.booleans(), most=st.integers(1, 4))
    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case, prompt: str | list[int], is_answerable: bool, most: int) -> None:
        # What is generated has hardly ever a prompt that fits and no field that is out of its range.
        if is_answerable and isinstance(case.body, dict) and case.path in GENERATING:
            kept = {
                name: value for name, value in case.body.items() if name in ("echo", "n", "seed", "stream")
            }
            case.body = {**kept, "max_tokens": most}
            if case.path == "/v1/chat/completions":
                case.body.pop("echo", None)
                case.body["messages"] = [{"role": "user", "content": str(prompt)}]
            elif case.path == "/generation":
                case.body = {"prompt": str(prompt), "max_tokens": most}
            else:
                case.body["prompt"] = prompt
        answer = case.call()
        case.validate_response(answer, checks=CHECKS)
        seen[case.operation.label].add(answer.status_code)

    check()
    return seen


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


def test_300_generated_requests(site: Callable[..., RealSite]) -> None:
    holds(site, 300)


@pytest.mark.long
def test_many_generated_requests(site: Callable[..., RealSite]) -> None:
    holds(site, soaked(5000))
