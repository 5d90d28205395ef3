"""A load: requests drawn from a seed, and clients in threads that make them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from colossalai.cli._load._client import Client, Question, RequestOutcome, Target

_MOST_WAITING_S = 0.1  # between two looks at whether the load goes on


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What is asked of a server.

    Attributes:
        clients: Clients that ask at the same time, each one request after another.
        requests: Number of requests; None for as many as `duration_s` has room for.
        duration_s: Seconds after which no request begins; None for no bound.
        prompt_tokens: Least and most tokens of a prompt.
        new_tokens: Least and most tokens of an answer.
        rate: Requests a second at random (Poisson) times; None for as soon as a client is free. The time of
            a request counts from when it was due, also where no client was free then.
        seed: Of lengths, prompts and times.

    Raises:
        ValueError: A field is out of its range, or nothing ends the load.
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
    """What a load has shown.

    Attributes:
        outcomes: Of the requests that have ended.
        elapsed_s: Seconds from the first request to the last end.
        is_whole: Whether it went on to its end.
    """

    outcomes: tuple[RequestOutcome, ...]
    elapsed_s: float
    is_whole: bool


def run_clients(
    target: Target, settings: LoadSettings, *, after: Callable[[RequestOutcome], object]
) -> LoadResult:
    """Make requests, and return what became of them; Ctrl-C ends it with those that have ended.

    Args:
        target: The server.
        settings: What is asked of it.
        after: Is called with each outcome, in the thread that calls this.
    """
    ended: queue.SimpleQueue[RequestOutcome | None] = queue.SimpleQueue()
    load = _Load(settings, time.perf_counter())
    clients = [
        # Daemons, since one that waits for its server is not waited for at the end.
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
    begin = min((outcome.began_s for outcome in outcomes), default=0.0)
    end = max((outcome.ended_s for outcome in outcomes), default=0.0)
    return LoadResult(outcomes=tuple(outcomes), elapsed_s=end - begin, is_whole=not load.is_stopped)


class _Load:
    """What clients share: the requests that are left."""

    def __init__(self, settings: LoadSettings, origin_s: float) -> None:
        self.origin_s = origin_s
        self.is_stopped = False
        self._duration_s = settings.duration_s
        self._questions = settings.questions()
        self._lock = threading.Lock()

    def next(self) -> Question | None:
        """Return a request when it is due; None where there is none."""
        with self._lock:
            question = next(self._questions, None)
        if question is None:
            return None
        while not self.is_stopped:
            now = time.perf_counter() - self.origin_s
            due = now if question.due_s is None else question.due_s
            if self._duration_s is not None and max(now, due) >= self._duration_s:
                return None
            if now >= due:
                return question
            time.sleep(min(due - now, _MOST_WAITING_S))
        return None


def _run_client(target: Target, load: _Load, ended: "queue.SimpleQueue[RequestOutcome | None]") -> None:
    client = Client(target, load.origin_s)
    try:
        while (question := load.next()) is not None:
            ended.put(client.ask(question))
    finally:
        client.close()
        ended.put(None)
