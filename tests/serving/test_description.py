"""The OpenAPI description is true (schemathesis), and the pages load nothing from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import colossalai.serving
from tests.serving.conftest import Site
from tests.tiers import soaked

pytestmark = pytest.mark.unit

KEY = "right"
PAGE = Path(colossalai.serving.__file__).parent / "_page"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture
def described(start: Any) -> Site:
    return start(options={"allow_weight_updates": True, "api_key": KEY}, window=40)


def ask(site: Site, num_cases: int) -> dict[str, set[int]]:
    """Send requests that the description allows, and others, to every route; return the statuses."""
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json", headers=headers)
    operations = [result.ok() for result in schema.get_all_operations()]
    seen: dict[str, set[int]] = {operation.label: set() for operation in operations}
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    cases = st.one_of(*(op.as_strategy(generation_mode=mode) for op in operations for mode in modes))

    @given(case=cases)
    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        answer = case.call(headers=headers)
        case.validate_response(answer, checks=CHECKS)
        seen[case.operation.label].add(answer.status_code)

    check()
    return seen


def test_generated_requests(described: Site) -> None:
    seen = ask(described, 60)
    assert {400} <= set().union(*seen.values())
    assert described.outcomes()["failed"] == 0


@pytest.mark.long
@pytest.mark.soak
def test_many_generated_requests(described: Site) -> None:
    seen = ask(described, soaked(5000))
    assert 200 in seen["POST /v1/completions"] | seen["POST /generation"]
    assert described.outcomes()["failed"] == 0


def test_answers_of_real_requests_fit_the_description(described: Site) -> None:
    """Most generated prompts are refused by the window; these are not."""
    schema = schemathesis.openapi.from_url(
        f"{described.url}/openapi.json", headers={"authorization": f"Bearer {KEY}"}
    )
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for path, body in (
        ("/v1/completions", {"prompt": "the", "logprobs": 2, "echo": True, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "the", "logprobs": 0}),
        ("/v1/completions", {"prompt": "the", "stream": True}),
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/generation", {"prompt": "the"}),
        ("/v1/load_weights", {"path": "a"}),
    ):
        case = schema[path]["POST"].Case(body=body, media_type="application/json")
        answer = case.call(headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200, answer.text
        case.validate_response(answer, checks=CHECKS)


def test_the_description_names_its_errors_and_its_key(described: Site, start: Any) -> None:
    assert described.server._app.openapi_schema is not None  # made at the start: no request waits for it
    description = described.client.get("/openapi.json").json()
    operation = description["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]) == {"200", "400", "401", "404", "413", "429", "500", "503"}
    assert set(description["paths"]["/generation"]["post"]["responses"]) >= {"406"}
    assert "HTTPValidationError" not in str(description)
    assert description["security"] == [{"key": []}]
    body = description["components"]["schemas"]["CompletionBody"]
    assert body["additionalProperties"] is False
    assert "tools" not in body["properties"]
    plain = start().client.get("/openapi.json").json()
    assert "security" not in plain
    assert "/v1/load_weights" not in plain["paths"]


SCRIPTS = ("chat.js", "curves.js", "docs.js", "wire.js")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.inline = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.inline += (tag == "script" and "src" not in names) or tag == "style" or "style" in names
        self.inline += any(name.startswith("on") for name in names)
        self.found += [(tag, value or "") for name, value in attrs if name in ("src", "href", "action")]


def test_pages_load_nothing_from_elsewhere(site: Site) -> None:
    for path in ("/", "/docs"):
        loads_nothing_from_elsewhere(site, path)


def loads_nothing_from_elsewhere(site: Site, path: str) -> None:
    answer = site.client.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    links = _Links()
    links.feed(answer.text)
    assert links.inline == 0  # the policy would not run it
    assert links.found
    for tag, link in links.found:
        assert link.startswith("/") or link == "data:,", (tag, link)
        if link.startswith("/"):
            assert site.client.get(link).status_code == 200


def test_no_asset_names_another_origin() -> None:
    files = list(PAGE.iterdir())
    assert {path.name for path in files} == {"index.html", "docs.html", *SCRIPTS, "chat.css", "style.css"}
    for path in files:
        assert not re.search(r"https?:|//[a-z]|@import|innerHTML|eval\(", path.read_text()), path.name


def test_the_pages_are_part_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((PAGE.parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["colossalai"]
    shipped = {path for pattern in patterns for path in PAGE.parents[1].glob(pattern)}
    assert set(PAGE.iterdir()) <= shipped
