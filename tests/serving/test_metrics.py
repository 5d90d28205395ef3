"""/metrics: Prometheus' parser reads it, its names keep promtool's rules, and its numbers are right."""

import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from colossalai.serving._request_record import RequestRecord
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import FakeService
from tests.serving.test_leaving import open_request

pytestmark = pytest.mark.unit

NAMES = {
    "colossalai_requests_running": "gauge",
    "colossalai_requests_queued": "gauge",
    "colossalai_requests_received": "counter",
    "colossalai_requests": "counter",
    "colossalai_kv_blocks": "gauge",
    "colossalai_prompt_tokens": "counter",
    "colossalai_generated_tokens": "counter",
    "colossalai_prefix_hit_tokens": "counter",
    "colossalai_preemptions": "counter",
    "colossalai_draft_tokens": "counter",
    "colossalai_accepted_draft_tokens": "counter",
    "colossalai_weight_updates": "counter",
    "colossalai_answer_cache_hits": "counter",
    "colossalai_engine_steps": "counter",
    "colossalai_engine_up": "gauge",
    "colossalai_time_to_first_token_seconds": "histogram",
    "colossalai_time_per_output_token_seconds": "histogram",
    "colossalai_request_duration_seconds": "histogram",
}
# As in promtool's linter: units that are not base units, and abbreviations of units.
NO_BASE_UNITS = (
    *("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks", "kelvins"),
    *("kilobytes", "megabytes", "gigabytes", "bits", "kilobits", "inches", "yards", "miles", "percent"),
)
ABBREVIATIONS = ("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d")
TYPES = ("gauge", "counter", "summary", "histogram", "untyped", "info", "metric")


def lint(text: str) -> Iterator[str]:
    """Yield what promtool's `check metrics` would say of a page of metrics."""
    seen = set()
    for family in text_string_to_metric_families(text):
        name = family.name
        words = name.split("_")
        if name in seen:
            yield f"{name} is there twice"
        seen.add(name)
        if not family.documentation:
            yield f"{name} has no help"
        if family.type in ("unknown", "untyped"):
            yield f"{name} has no type"
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            yield f"{name} is not in snake case"
        yield from (f"{name} has the type {word} in its name" for word in TYPES if word in words)
        yield from (
            f"{name} has a unit that is no base unit: {word}" for word in NO_BASE_UNITS if word in words
        )
        yield from (f"{name} has an abbreviated unit: {word}" for word in ABBREVIATIONS if word in words)
        if "seconds" in words and words[-1] != "seconds":
            yield f"{name} does not end with its unit"
        yield from _lint_samples(family)


def _lint_samples(family: Metric) -> Iterator[str]:
    for sample in family.samples:
        is_counter = family.type == "counter"
        if is_counter and not sample.name.endswith("_total"):
            yield f"{sample.name} is a counter without _total"
        if not is_counter and sample.name.endswith("_total"):
            yield f"{sample.name} is no counter and ends with _total"
        if family.type not in ("histogram", "summary"):
            if sample.name.endswith(("_bucket", "_sum", "_count")):
                yield f"{sample.name} has an ending of histograms"
            if "le" in sample.labels:
                yield f"{sample.name} has a label of histograms"
        if any(not re.fullmatch("[a-z][a-z0-9_]*", label) for label in sample.labels):
            yield f"{sample.name} has a label that is not in snake case"


def values(site: Site) -> dict[tuple[str, str], float]:
    """Return the samples by name and their label beside the model."""
    found = {}
    for family in text_string_to_metric_families(site.client.get("/metrics").text):
        for sample in family.samples:
            labels = {**sample.labels}
            assert labels.pop("model") in ("fake", "poems")
            key = (sample.name, ",".join(labels.values()))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_names_types_and_rules(site: Site) -> None:
    site.client.post("/generation", json={"prompt": "the", "max_tokens": 3})
    answer = site.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert {family.name: family.type for family in families} == NAMES
    assert list(lint(answer.text)) == []


BAD = {
    "# HELP x_ms a\n# TYPE x_ms gauge\nx_ms 1\n": "abbreviated unit",
    "# HELP x_milliseconds a\n# TYPE x_milliseconds gauge\nx_milliseconds 1\n": "no base unit",
    "# TYPE x gauge\nx 1\n": "no help",
    "# HELP x_total a\n# TYPE x_total gauge\nx_total 1\n": "no counter and ends with _total",
    "# HELP x_gauge a\n# TYPE x_gauge gauge\nx_gauge 1\n": "the type gauge",
    "# HELP xY a\n# TYPE xY gauge\nxY 1\n": "not in snake case",
    "# HELP x_count a\n# TYPE x_count gauge\nx_count 1\n": "an ending of histograms",
    '# HELP x a\n# TYPE x gauge\nx{theLabel="1"} 1\n': "label that is not in snake case",
    "# HELP x_seconds_lost a\n# TYPE x_seconds_lost gauge\nx_seconds_lost 1\n": "does not end with its unit",
}


@pytest.mark.parametrize("text", BAD)
def test_the_rules_find_what_breaks_them(text: str) -> None:
    assert any(BAD[text] in line for line in lint(text))


def test_two_applications_count_apart(start: Any) -> None:
    first, second = start(), start()
    first.client.post("/generation", json={"prompt": "the", "max_tokens": 1})
    assert first.outcomes()["received"] == 1
    assert second.outcomes()["received"] == 0


def test_numbers_of_the_engine(start: Any) -> None:
    site = start(slots=1, adapters=("poems",))
    site.service.hold(2)
    connections = [
        open_request(site, "/v1/completions", {"prompt": [5] * 7, "max_tokens": 9}) for _ in range(3)
    ]
    site.service.wait_for(lambda: site.service.num_queued == 2 and site.service.steps_allowed == 0)
    found = values(site)
    assert found["colossalai_requests_running", ""] == 1
    assert found["colossalai_requests_queued", ""] == 2
    assert [found["colossalai_kv_blocks", state] for state in ("used", "cached", "free")] == [2, 1, 0]
    assert found["colossalai_prompt_tokens_total", ""] == 7
    assert found["colossalai_generated_tokens_total", ""] == 2
    assert found["colossalai_engine_steps_total", ""] == 2
    assert found["colossalai_requests_received_total", ""] == 3
    assert found["colossalai_requests_total", "finished"] == 0
    for connection in connections:
        connection.close()
    site.outcomes()


def test_times_are_those_of_the_visit(site: Site) -> None:
    metrics = site.server._app.front.metrics
    record = RequestRecord({"type": "http", "method": "POST", "path": "/generation"})
    record.first_token_at = record.began_at + 0.25
    record.last_token_at = record.began_at + 2.25
    record.generated_tokens, record.most_tokens = 18, 9  # two answers of nine tokens, made together
    record.began_at -= 100.0
    record.first_token_at -= 100.0
    record.last_token_at -= 100.0
    metrics.received()
    metrics.ended(record, "finished")
    found = values(site)
    assert found["colossalai_time_to_first_token_seconds_sum", ""] == pytest.approx(0.25)
    assert found["colossalai_time_per_output_token_seconds_sum", ""] == pytest.approx(2 / 8)
    assert found["colossalai_request_duration_seconds_sum", ""] >= 100.0
    metrics.received()
    metrics.ended(record, "aborted")
    found = values(site)
    assert found["colossalai_time_to_first_token_seconds_count", ""] == 2
    assert found["colossalai_time_per_output_token_seconds_count", ""] == 1
    assert found["colossalai_request_duration_seconds_count", ""] == 1


def test_times_and_models(start: Any) -> None:
    site = start(adapters=("poems",))
    body = {"prompt": [5], "max_tokens": 5, "n": 2}
    for model in ("poems", "fake"):
        assert site.client.post("/v1/completions", json={**body, "model": model}).status_code == 200
    assert site.client.post("/v1/completions", json={**body, "model": 'x"} 1'}).status_code == 404
    site.outcomes()
    found = values(site)
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert found[f"colossalai_{name}_seconds_count", ""] == 2
    text = site.client.get("/metrics").text
    assert 'colossalai_requests_total{model="poems",outcome="finished"} 1.0' in text


def load(site: Site, seed: int, num_requests: int) -> Counter[str]:
    """Send requests of all kinds, a tenth malformed and a tenth of clients that leave, and count them."""
    draw = random.Random(seed)
    sent: Counter[str] = Counter()
    for _ in range(num_requests):
        kind = draw.choices(("whole", "stream", "generation", "malformed", "leaves"), (3, 3, 1, 1, 1))[0]
        sent[kind] += 1
        body: dict[str, Any] = {"prompt": [draw.randrange(5, 99)] * draw.randint(1, 20)}
        body |= {"max_tokens": draw.randint(1, 30), "n": draw.randint(1, 3), "stream": kind == "stream"}
        if kind == "generation":
            answer = site.client.post("/generation", json={"prompt": "the", "max_tokens": draw.randint(1, 9)})
            sent[f"status {answer.status_code}"] += 1
        elif kind == "malformed":
            wrong = draw.choice(
                [{"prompt": []}, {"prompt": "a", "x": 1}, {**body, "n": 0}, {**body, "model": "y"}]
            )
            answer = site.client.post("/v1/completions", json=wrong)
            assert answer.status_code in (400, 404)
        elif kind == "leaves":
            connection = open_request(site, "/v1/completions", {**body, "stream": draw.random() < 0.5})
            if draw.random() < 0.5:
                connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
            connection.close()
        else:
            answer = site.client.post("/v1/completions", json=body)
            sent[f"status {answer.status_code}"] += 1
    return sent


def assert_nothing_is_lost(start: Any, num_clients: int, num_requests: int) -> None:
    site = start(slots=3, max_queue=6, step_s=0.0005)
    results: list[Counter[str]] = []
    threads = [
        threading.Thread(target=lambda seed=seed: results.append(load(site, seed, num_requests)))
        for seed in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == num_clients
    sent = sum(results, Counter())
    # A client that leaves at once may be gone before its first byte is read: it is no request then.
    wait_until(site.service.is_idle)
    found = site.outcomes()
    num_sent = sum(sent[kind] for kind in ("whole", "stream", "generation", "malformed", "leaves"))
    assert num_sent - sent["leaves"] <= found["received"] <= num_sent
    assert found["failed"] == 0
    assert sent["status 200"] <= found["finished"] <= sent["status 200"] + sent["leaves"]
    refused = sent["malformed"] + sent["status 429"] + sent["status 406"]
    assert refused <= found["rejected"] <= refused + sent["leaves"]
    assert found["aborted"] <= sent["leaves"]
    front = site.server._app.front
    assert not front._records
    assert not front._replies
    stats = site.service.stats()
    assert (stats.running, stats.queued, stats.blocks["used"]) == (0, 0, 0)


def test_counters_add_up_under_a_random_load(start: Any) -> None:
    assert_nothing_is_lost(start, num_clients=6, num_requests=20)


@pytest.mark.long
def test_counters_add_up_under_a_long_random_load(start: Any) -> None:
    assert_nothing_is_lost(start, num_clients=24, num_requests=100)


def test_a_slow_scrape_does_not_hold_up_answers(site: Site) -> None:
    """The engine's statistics may wait for its lock; the event loop must not."""
    inside, released = threading.Event(), threading.Event()

    class Slow(FakeService):
        def stats(self) -> Any:
            inside.set()
            assert released.wait(60)
            return super().stats()

    site.service.__class__ = Slow
    scrape = threading.Thread(target=lambda: site.client.get("/metrics"))
    scrape.start()
    assert inside.wait(60)
    try:
        assert site.client.post("/generation", json={"prompt": "the", "max_tokens": 2}).status_code == 200
    finally:
        released.set()
        scrape.join()
