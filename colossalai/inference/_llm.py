"""Large language models as one object: prompts in, answers out."""

import operator
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Self

from rich.progress import track

from colossalai.inference._build import engine_of_ranks
from colossalai.inference._engine import InferenceEngine
from colossalai.inference._load import EngineOptions, ModelSource, check_count, load_tokenizer
from colossalai.inference._remote import RemoteEngine
from colossalai.inference._request import (
    Completion,
    Delta,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from colossalai.inference.loading import WeightSource

Prompt = str | Sequence[int]


class LLM:
    """A language model with batched generation.

    Args:
        model: A `save_pretrained` folder; a name or function of `colossalai.inference.models`; or a causal
            language model in memory, of transformers or a `GPT` of this package. A model in memory still
            belongs to the caller and can be trained or run `generate` between two calls.
        tokenizer: The tokenizer, or its folder. Default: the one in the model's folder. Without a
            tokenizer, prompts are tokens.
        tp_size: Number of tensor parallel ranks, in processes of their own.
        pp_size: Number of pipeline stages, in processes of their own.
        options: Fields of `EngineOptions`, such as `adapters={"sql": "path/to/folder"}` for peft adapters
            that prompts can select by name.

    Raises:
        ValueError: `model` cannot be served, an adapter does not fit it, or a setting is out of range; the
            message has the reason.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        tokenizer: Any = None,
        tp_size: int = 1,
        pp_size: int = 1,
        **options: Any,
    ) -> None:
        settings = EngineOptions(**options)
        for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
            check_count(name, size)
        if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
            tokenizer = load_tokenizer(model, tokenizer)
        self.tokenizer = tokenizer
        self.engine = _start_engine(model, tokenizer, settings, tp_size=tp_size, pp_size=pp_size)
        self._names = count()
        # An engine is stepped by one thread at a time.
        self._turn = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        shows_progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate answers to prompts. Concurrent calls of several threads run one after another.

        Args:
            prompts: One or several prompts, as texts or lists of tokens.
            params: Sampling parameters: one for all prompts, or one for each.
            adapter: Name of the adapter, None for the model itself: one for all prompts, or one for each.
            shows_progress: Whether to show a progress bar.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            ValueError: A prompt cannot be served (`RequestRefused`), or is neither a text nor tokens; or
                `params` or `adapter` differ in number from the prompts, or have another class. Nothing has
                been computed.
            RequestFailed: The model computes a NaN for one of `prompts`.
        """
        given = _prompts_of(prompts)
        each = _for_each(params, len(given))
        adapters = _adapters_for_each(adapter, len(given))
        with self._turn:
            return self._generate(given, each, adapters, shows_progress=shows_progress)

    def _generate(
        self,
        given: Sequence[Prompt],
        each: Sequence[SamplingParams],
        adapters: Sequence[str | None],
        *,
        shows_progress: bool,
    ) -> list[RequestOutput]:
        collectors = []
        for prompt, wanted, name in zip(given, each, adapters, strict=True):
            request = Request(
                request_id=f"generate-{next(self._names)}",
                prompt_token_ids=self._tokens_of(prompt),
                params=wanted,
                adapter=name,
                is_streamed=False,
            )
            collectors.append(Collector(request, prompt if isinstance(prompt, str) else None))
        return answer_all(self.engine, collectors, shows_progress=shows_progress)

    def update_weights(self, source: WeightSource) -> None:
        """Replace all values of the model without a restart.

        A model in memory is updated in place by its owner and needs no call: the engine detects an optimizer
        step. Adapters stay unchanged; quantized weights are quantized again.

        Args:
            source: A checkpoint file or folder, as for the option `checkpoint`; a model of the same class in
                memory, such as one in training; or a mapping of names to tensors, which are kept until the
                last one is read. Ranks in other processes receive a source in memory through a temporary
                file.

        Raises:
            ValueError: `source` has other names or shapes than the model; the message lists all. Nothing has
                changed.
            OSError: `source` cannot be read; nothing has changed.
            RequestFailed: `source` could not be read to its end. Prompts fail until an update succeeds.
        """
        with self._turn:
            self.engine.update_weights(source)

    def weights_changed(self) -> None:
        """Mark the model in memory as changed after an undetectable change, as through `param.data`.

        Later prompts use no cached results of earlier values.

        Raises:
            ValueError: `model` is not a model in memory; use `update_weights`.
        """
        if isinstance(self.engine, RemoteEngine):
            raise ValueError("the model is in processes of its own: change it by update_weights")
        with self._turn:
            self.engine.weights_changed()

    def close(self) -> None:
        """End the ranks of the model; does nothing without any."""
        if isinstance(self.engine, RemoteEngine):
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return _tokens(prompt)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: pass tokens as prompts, or LLM(..., tokenizer=...)")
        return tuple(self.tokenizer(prompt)["input_ids"])


class Collector:
    """Listener that assembles the deltas of a request into its output.

    Args:
        request: The request.
        prompt: Its prompt as text, if it was a text.
    """

    def __init__(self, request: Request, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._deltas: dict[int, list[Delta]] = {index: [] for index in range(request.params.n)}
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended, or the request has failed."""
        ended = all(deltas and deltas[-1].finish_reason for deltas in self._deltas.values())
        return ended or self._error is not None

    def on_delta(self, received: Delta | BaseException) -> None:
        """Append a delta, or store the error that ended the request."""
        if not isinstance(received, Delta):
            self._error = received
        elif received.is_restart:
            self._deltas = {index: [] for index in self._deltas}
        else:
            self._deltas[received.index].append(received)

    def output(self) -> RequestOutput:
        """Return the answers.

        Raises:
            BaseException: The request has failed; the engine's error is raised.
        """
        if self._error is not None:
            raise self._error
        outputs = tuple(_completion(index, deltas) for index, deltas in self._deltas.items())
        first = self._deltas[0]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            usage=Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=sum(len(each.token_ids) for each in outputs),
                cached_tokens=max(delta.cached_tokens for delta in first),
            ),
            prompt_logprobs=next(
                (delta.prompt_logprobs for delta in first if delta.prompt_logprobs is not None), None
            ),
        )


def answer_all(
    engine: InferenceEngine | RemoteEngine, collectors: Sequence[Collector], *, shows_progress: bool = False
) -> list[RequestOutput]:
    """Run an engine until all requests are answered; `engine` has no others.

    Args:
        engine: The engine.
        collectors: One for each request.
        shows_progress: Whether to show a progress bar.

    Raises:
        RequestRefused: A request cannot be served; nothing has been computed.
        RequestFailed: The model computes a NaN for a request.
    """
    for collector in collectors:
        engine.check(collector.request)
    try:
        for collector in collectors:
            engine.submit(collector.request, collector.on_delta)
        finished: Iterable[Collector] = _iterate_finished(engine, collectors)
        if shows_progress:  # rich before 15 prints a line even for a disabled bar
            finished = track(finished, "answers", len(collectors))
        for _ in finished:
            pass
    finally:
        for collector in collectors:
            engine.abort(collector.request.request_id)
    return [collector.output() for collector in collectors]


def _iterate_finished(
    engine: InferenceEngine | RemoteEngine, collectors: Sequence[Collector]
) -> Iterator[Collector]:
    """Run steps; yield each collector at the end of its request."""
    waiting = list(collectors)
    while waiting:
        for collector in [collector for collector in waiting if collector.is_over]:
            waiting.remove(collector)
            yield collector
        if waiting:
            assert engine.step(), "requests are under way, and there is nothing to do"


def _completion(index: int, deltas: Sequence[Delta]) -> Completion:
    last = deltas[-1]
    assert last.finish_reason is not None, "the answer has ended"
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(found for delta in deltas for found in delta.logprobs or ())
    return Completion(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
    )


def _start_engine(
    model: ModelSource, tokenizer: Any, settings: EngineOptions, *, tp_size: int, pp_size: int
) -> InferenceEngine | RemoteEngine:
    if tp_size * pp_size == 1:
        engine = engine_of_ranks(model, settings, mesh=None, tokenizer=tokenizer)
        assert engine is not None, "this process is the only rank"
        return engine
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            f"tp_size={tp_size} and pp_size={pp_size} start ranks of their own, which load the model: give "
            f"its folder or its name, not a {type(model).__name__} of this process"
        )
    told = {
        "model": os.path.abspath(model) if os.path.exists(model) else str(model),
        "tp": tp_size,
        "pp": pp_size,
    }
    where = getattr(tokenizer, "name_or_path", None) or None
    return RemoteEngine(
        {**told, "tokenizer": where, "options": asdict(settings)}, num_ranks=tp_size * pp_size
    )


def _prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list.

    Raises:
        ValueError: `prompts` is neither a prompt nor several of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    given: list[Any] = list(prompts) if _is_iterable(prompts) else [prompts]
    if given and all(_is_token(each) for each in given):
        return [given]
    wrong = [each for each in given if not isinstance(each, str) and not _is_iterable(each)]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is not a prompt: a prompt is a text or a list of tokens, which are whole numbers"
        )
    return given


def _is_iterable(value: object) -> bool:
    is_scalar = getattr(value, "ndim", 1) == 0  # of torch or numpy
    return isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) and not is_scalar


def _is_token(value: object) -> bool:
    if isinstance(value, bool | str):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _tokens(prompt: Iterable[Any]) -> tuple[int, ...]:
    tokens = tuple(prompt)
    wrong = [token for token in tokens if not _is_token(token)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in a prompt is not a token: tokens are whole numbers")
    return tuple(map(operator.index, tokens))


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    each = list(params) if isinstance(params, Sequence) else [params]
    wrong = [found for found in each if not isinstance(found, SamplingParams)]
    if isinstance(params, str) or wrong:
        raise ValueError(
            f"params={params!r}; it must be a SamplingParams, or a list with one for each prompt"
        )
    if len(each) != num_prompts:
        raise ValueError(f"{len(each)} SamplingParams for {num_prompts} prompts: give one, or one for each")
    return each


def _adapters_for_each(adapter: str | Sequence[str | None] | None, num_prompts: int) -> Sequence[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * num_prompts
    if len(adapter) != num_prompts:
        raise ValueError(f"{len(adapter)} adapters for {num_prompts} prompts: give one, or one for each")
    return adapter
