"""Prometheus metrics: counters of the engine, and outcomes and latencies of the front end."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from colossalai.inference import EngineStats, EngineStopped, Service
from colossalai.serving._request_record import Outcome, RequestRecord

OUTCOMES: tuple[Outcome, ...] = ("finished", "aborted", "rejected", "failed")

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_MODEL = ("model",)
_ENGINE_COUNTERS = (
    ("colossalai_prompt_tokens", "Tokens of prompts that were read.", "prompt_tokens"),
    ("colossalai_generated_tokens", "Tokens that were made.", "generated_tokens"),
    ("colossalai_prefix_hit_tokens", "Tokens of prompts from the prefix cache.", "prefix_hit_tokens"),
    ("colossalai_preemptions", "Times that a request gave its blocks back.", "preemptions"),
    ("colossalai_engine_steps", "Steps that the engine has run.", "steps"),
    ("colossalai_draft_tokens", "Guessed tokens that steps computed.", "draft_tokens"),
    ("colossalai_accepted_draft_tokens", "Guessed tokens in answers.", "accepted_draft_tokens"),
    ("colossalai_weight_updates", "Times that the model was given new weights.", "weight_updates"),
    ("colossalai_answer_cache_hits", "Requests that were answered from kept answers.", "answer_cache_hits"),
)
_ENGINE_GAUGES = (
    ("colossalai_requests_running", "Requests that have blocks; each prompt of a list is one.", "running"),
    ("colossalai_requests_queued", "Requests that wait for blocks.", "queued"),
)


class Metrics(Collector):
    """Metrics of one application; a second one in the same process has its own.

    A call of a generating route is one request here, with any number of prompts: it is received once, and has
    one outcome.

    Args:
        service: The engine that supplies the statistics.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._own = CollectorRegistry()
        self._received = Counter(
            "colossalai_requests_received", "Requests that came.", _MODEL, registry=self._own
        )
        self._ended = Counter(
            "colossalai_requests", "Requests that ended.", ("model", "outcome"), registry=self._own
        )
        self._first_token = self._histogram(
            "colossalai_time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self._token = self._histogram(
            "colossalai_time_per_output_token_seconds",
            "Mean time between tokens of a finished request, after its first.",
            _TOKEN_S,
        )
        self._request = self._histogram(
            "colossalai_request_duration_seconds",
            "From arrival to the end of a finished request.",
            _REQUEST_S,
        )
        name = service.info.name
        self._received.labels(name)
        for outcome in OUTCOMES:  # a rate needs the zero before the first one
            self._ended.labels(name, outcome)

    def received(self) -> None:
        """Count a received request."""
        self._received.labels(self._service.info.name).inc()

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """Count the outcome of a request, and observe its latencies."""
        model = record.model or self._service.info.name
        self._ended.labels(model, outcome).inc()
        if record.first_token_at is not None:
            self._first_token.labels(model).observe(record.first_token_at - record.began_at)
        if outcome == "finished":
            self._request.labels(model).observe(record.age_s)
            if record.first_token_at is not None and record.most_tokens > 1:
                duration = record.last_token_at - record.first_token_at
                self._token.labels(model).observe(duration / (record.most_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, those of the engine read at this moment."""
        for family in self._own.collect():
            # The creation time of a series doubles the number of series, and has no use here.
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family
        yield from self._collect_engine()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _collect_engine(self) -> Iterator[Metric]:
        name = self._service.info.name
        up = GaugeMetricFamily("colossalai_engine_up", "Whether the engine runs: 1 or 0.", labels=_MODEL)
        stats: EngineStats | None = None
        try:
            stats = self._service.stats()
        except EngineStopped:  # the metrics of the front end remain available
            up.add_metric([name], 0)
            yield up
            return
        up.add_metric([name], 1)
        yield up
        for metric, text, field in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(metric, text, labels=_MODEL)
            gauge.add_metric([name], getattr(stats, field))
            yield gauge
        for metric, text, field in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(metric, text, labels=_MODEL)
            counter.add_metric([name], getattr(stats, field))
            yield counter
        blocks = GaugeMetricFamily(
            "colossalai_kv_blocks", "Blocks of the cache of keys and values.", labels=("model", "state")
        )
        for state, number in stats.blocks.items():
            blocks.add_metric([name, state], number)
        yield blocks

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _MODEL, buckets=buckets, registry=self._own)
