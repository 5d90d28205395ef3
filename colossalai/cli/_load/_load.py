"""Load generator: requests drawn from a seed, and client threads that make them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from colossalai._clock import Clock
from colossalai.cli._load._client import Client, Question, RequestOutcome, Target

_MOST_WAITING_S = 0.1  # between two checks of `is_stopped`


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Settings of a load.

    Attributes:
        clients: Number of concurrent clients, each with one request at a time.
        requests: Number of requests; None: bounded by `duration_s` only.
        duration_s: Seconds after which no request begins; None: no bound.
        prompt_tokens: Minimum and maximum number of tokens of a prompt.
        new_tokens: Minimum and maximum number of tokens of an answer.
        rate: Requests per second at random (Poisson) times; None: as soon as a client is free. The latency of
            a request counts from its due time, even if no client was free then.
        seed: Seed of lengths, prompts and times.

    Raises:
        ValueError: A field is out of range, or the load has no end.
    """

    clients: int = 16
    requests: int | None = 200
    duration_s: float | None = None
    prompt_tokens: tuple[int, int] = (16, 192)
    new_tokens: tuple[int, int] = (8, 96)
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} {low}-{high}: give LOW-HIGH, 1 or more, such as 16-192")
        if self.requests is None and self.duration_s is None:
            raise ValueError("the load would never end: give --requests or --duration")

    def questions(self) -> Iterator[Question]:
        """Yield the requests; the same for the same settings."""
        generator = np.random.default_rng(self.seed)
        due = 0.0
        number = 0
        while self.requests is None or number < self.requests:
            length, new = (
                int(generator.integers(low, high + 1)) for low, high in (self.prompt_tokens, self.new_tokens)
            )
            draws = tuple(generator.random(length).tolist())
            if self.rate is not None:
                due += float(generator.exponential(1 / self.rate))
            at_once = self.rate is None
            yield Question(number=number, draws=draws, max_tokens=new, due_s=None if at_once else due)
            number += 1


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Result of a load.

    Attributes:
        outcomes: Outcomes of the ended requests.
        elapsed_s: Seconds from the first request to the last end.
        is_whole: Whether the load was not interrupted.
    """

    outcomes: tuple[RequestOutcome, ...]
    elapsed_s: float
    is_whole: bool


def run_clients(
    target: Target, settings: LoadSettings, *, after: Callable[[RequestOutcome], object]
) -> LoadResult:
    """Make requests and return their outcomes; after Ctrl-C, those of the ended requests.

    Args:
        target: The server.
        settings: Settings of the load.
        after: Called with each outcome, in the calling thread.
    """
    ended: queue.SimpleQueue[RequestOutcome | None] = queue.SimpleQueue()
    load = _Load(settings, Clock(now=time.perf_counter))  # the clients' clock
    clients = [
        # Daemon threads: the process can end while one of them waits for the server.
        threading.Thread(target=_run_client, args=(target, load, ended), daemon=True, name=f"client {number}")
        for number in range(settings.clients)
    ]
    for client in clients:
        client.start()
    outcomes: list[RequestOutcome] = []
    num_running = len(clients)
    try:
        while num_running:
            outcome = ended.get()
            if outcome is None:
                num_running -= 1
                continue
            outcomes.append(outcome)
            after(outcome)
    except KeyboardInterrupt:
        load.is_stopped = True
        # Outcomes of ended requests that this thread has not read yet.
        while not ended.empty():
            if (outcome := ended.get()) is not None:
                outcomes.append(outcome)
    begin = min((outcome.began_s for outcome in outcomes), default=0.0)
    end = max((outcome.ended_s for outcome in outcomes), default=0.0)
    return LoadResult(outcomes=tuple(outcomes), elapsed_s=end - begin, is_whole=not load.is_stopped)


class _Load:
    """State shared by the clients: the remaining requests."""

    def __init__(self, settings: LoadSettings, clock: Clock) -> None:
        self._clock = clock
        self.origin_s = clock.now()
        self.is_stopped = False
        self._duration_s = settings.duration_s
        self._questions = settings.questions()
        self._lock = threading.Lock()

    def next(self) -> Question | None:
        """Wait until the next request is due and return it; None at the end of the load."""
        with self._lock:
            question = next(self._questions, None)
        if question is None:
            return None
        while not self.is_stopped:
            now = self._clock.now() - self.origin_s
            due = now if question.due_s is None else question.due_s
            if self._duration_s is not None and max(now, due) >= self._duration_s:
                return None
            if now >= due:
                return question
            self._clock.sleep(min(due - now, _MOST_WAITING_S))
        return None


def _run_client(target: Target, load: _Load, ended: "queue.SimpleQueue[RequestOutcome | None]") -> None:
    client = Client(target, load.origin_s)
    try:
        while (question := load.next()) is not None:
            ended.put(client.ask(question))
    finally:
        client.close()
        ended.put(None)
