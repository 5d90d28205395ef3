"""OpenAI's routes: completions, chat completions and the list of models, and their common helpers."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from colossalai.inference import Request, SamplingParams
from colossalai.serving._errors import ApiError, ErrorBody
from colossalai.serving._prompts import Tokens
from colossalai.serving._request_record import RequestRecord
from colossalai.serving._streams import Front, IndexedDelta, Reply
from colossalai.serving.routes._answers import (
    Answers,
    ChatAnswer,
    ChatForm,
    CompletionAnswer,
    CompletionForm,
    Form,
    Heading,
    event,
)
from colossalai.serving.routes._schemas import ChatBody, CompletionBody, GeneratingBody, sampling_params

_DATA = {"type": "string", "description": "A chunk or an error as JSON; at the end of a whole stream [DONE]."}
_EVENT = {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}
_SSE = {"text/event-stream": {"itemSchema": _EVENT}}
_DEFAULT_COMPLETION_TOKENS = 16
_MOST_PROMPTS = 1024


class ModelCard(BaseModel):
    """A model or adapter that requests can name; an adapter has its model as the parent."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["colossalai"] = "colossalai"
    max_length: int = Field(description="Most tokens of a prompt and its answer.")
    has_chat_template: bool = Field(description="Whether /v1/chat/completions can write a chat for it.")
    parent: str | None = Field(default=None, description="The model that an adapter belongs to.")


class ModelList(BaseModel):
    """All models and adapters that requests can name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class EventStream(Response):
    """Server-sent events, each sent as soon as it is available.

    Args:
        events: The events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the gate cancels this call if the client disconnects."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for its description: `statuses`, 401 and 500."""
    return {status: {"model": ErrorBody} for status in sorted({401, 500, *statuses})}


GENERATING_ERRORS = (400, 404, 413, 503)
"""Errors of every generating route, in addition to the common ones and a full queue."""


def add_openai_routes(router: APIRouter, front: Front) -> None:
    """Add /v1/completions, /v1/chat/completions and /v1/models.

    Args:
        router: Router that gets the routes.
        front: The engine and its options.
    """
    errors = responses(*GENERATING_ERRORS, 429)

    def answer(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
        return {200: {"model": model, "content": _SSE, "description": "The answers."}, **errors}

    @router.post("/v1/completions", response_class=JSONResponse, responses=answer(CompletionAnswer))
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue one or more prompts."""
        return await _complete(front, body, RequestRecord.of(http))

    @router.post("/v1/chat/completions", response_class=JSONResponse, responses=answer(ChatAnswer))
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        """Make the next message of a chat, in the model's own template."""
        return await _chat(front, body, RequestRecord.of(http))

    @router.get("/v1/models", responses=responses())
    async def models() -> ModelList:
        """List the names for `model` in requests: the model and its adapters."""
        return ModelList(data=_cards(front))

    @router.get("/v1/models/{model:path}", responses=responses(404))
    async def model(model: str) -> ModelCard:
        """Describe one of them."""
        find_model(front, model)
        return next(card for card in _cards(front) if card.id == model)


def find_model(front: Front, name: str | None) -> str | None:
    """Return the adapter of a model name, None for the model itself.

    Args:
        front: The engine and its options.
        name: Field `model` of a request; None for the model itself.

    Raises:
        ApiError: `name` is neither the model nor an adapter (404, with the known names).
    """
    info = front.info
    if name is None or name == info.name:
        return None
    if name not in info.adapters:
        known = ", ".join(map(repr, (info.name, *info.adapters)))
        raise ApiError(
            404, f"there is no model {name!a}; known ones are {known}", param="model", code="model_not_found"
        )
    return name


def requests_of(
    front: Front,
    record: RequestRecord,
    prompts: Sequence[Tokens],
    params: Sequence[SamplingParams],
    *,
    adapter: str | None = None,
    priority: int = 0,
) -> list[Request]:
    """Return a request for each prompt of a call."""
    return [
        Request(
            request_id=record.request_id if len(prompts) == 1 else f"{record.request_id}-{index}",
            prompt_token_ids=prompt,
            params=each,
            priority=priority,
            timeout_s=front.options.request_timeout_s,
            adapter=adapter,
        )
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


async def _complete(front: Front, body: CompletionBody, record: RequestRecord) -> Response:
    body.check()
    adapter = find_model(front, body.model)
    record.model = adapter or front.info.name
    max_tokens = body.asked_tokens
    if max_tokens == 0 and not body.echo:
        text = "max_tokens=0; it must be at least 1, unless echo=true asks for the prompt alone"
        raise ApiError(400, text, param="max_tokens")
    texts, prompts = await _prompts_of(front, body)
    if front.options.log_prompts:
        record.prompts = list(texts or prompts)
    if max_tokens is None:
        max_tokens = _DEFAULT_COMPLETION_TOKENS
    echo_logprobs = body.logprobs if body.logprobs is not None or max_tokens else 0
    params = [
        sampling_params(
            body,
            max_tokens=max_tokens,
            room=front.info.max_length - len(prompt),
            vocab_size=front.info.vocab_size,
            logprobs=body.logprobs,
            prompt_logprobs=echo_logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    form = CompletionForm(
        _heading(body, record),
        front.prompts,
        echoes=_echoes(front, texts, prompts) if body.echo else None,
        has_logprobs=body.logprobs is not None,
        num_top=body.logprobs or 0,
    )
    requests = requests_of(front, record, prompts, params, adapter=adapter, priority=body.priority or 0)
    return await _answer(front, body, record, requests, form)


async def _chat(front: Front, body: ChatBody, record: RequestRecord) -> Response:
    body.check()
    adapter = find_model(front, body.model)
    record.model = adapter or front.info.name
    max_tokens = body.asked_tokens
    if max_tokens == 0:
        raise ApiError(400, "max_tokens=0; it must be at least 1", param="max_tokens")
    messages = [message.for_template for message in body.messages]
    if front.options.log_prompts:
        record.prompts = list(messages)
    prompt = await front.prompts.from_chat(messages)
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        room=front.info.max_length - len(prompt),
        vocab_size=front.info.vocab_size,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    form = ChatForm(_heading(body, record), front.prompts, has_logprobs=bool(body.logprobs))
    requests = requests_of(front, record, [prompt], [params], adapter=adapter, priority=body.priority or 0)
    return await _answer(front, body, record, requests, form)


async def _prompts_of(front: Front, body: CompletionBody) -> tuple[list[str] | None, list[Tokens]]:
    """Return the prompts as texts, if the request has texts, and as tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt], await front.prompts.from_texts([prompt])
    if not prompt:
        raise ApiError(400, "prompt: it is empty; it must have at least one text or token", param="prompt")
    if len(prompt) > _MOST_PROMPTS and not isinstance(prompt[0], int):
        text = f"prompt: it is a list of {len(prompt)} prompts; a call takes at most {_MOST_PROMPTS}"
        raise ApiError(400, text, param="prompt")
    texts = [each for each in prompt if isinstance(each, str)]
    if texts:
        return texts, await front.prompts.from_texts(texts)
    lists = [each for each in prompt if isinstance(each, list)]
    tokens = lists or [[each for each in prompt if isinstance(each, int)]]
    return None, [front.prompts.fit(each, "prompt") for each in tokens]


def _echoes(front: Front, texts: list[str] | None, prompts: list[Tokens]) -> list[tuple[str, Tokens]]:
    texts = [front.prompts.text_of(prompt) for prompt in prompts] if texts is None else texts
    return list(zip(texts, prompts, strict=True))


def _heading(body: GeneratingBody, record: RequestRecord) -> Heading:
    shows_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    assert record.model is not None
    return Heading(record.request_id, record.model, shows_usage)


async def _answer(
    front: Front, body: GeneratingBody, record: RequestRecord, requests: Sequence[Request], form: Form
) -> Response:
    """Submit requests to the engine, and return the answers, whole or as a stream."""
    answers = Answers([request.prompt_token_ids for request in requests], requests[0].params.n, record)
    reply = await front.ask(requests, record)
    deltas = (
        await reply.next()
    )  # a stream begins with its first token, so an error before it still sets the status
    if body.stream:
        holds = requests[0].params.prompt_logprobs is not None
        return EventStream(_events(record, reply, deltas, answers, form, _DeltaBuffer(holds)))
    while deltas is not None:
        for prompt, delta in deltas:
            answers.add(prompt, delta)
        deltas = await reply.next()
    return JSONResponse(form.whole(answers))


class _DeltaBuffer:
    """Buffer of deltas that arrive before answer 0 has returned the prompt's log-probabilities.

    Args:
        holds: Whether the request has prompt log-probabilities; otherwise nothing is buffered.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self._kept: dict[int, list[IndexedDelta]] = {}
        self._known: set[int] = set()

    def pass_on(self, deltas: Sequence[IndexedDelta]) -> list[IndexedDelta]:
        """Return the deltas that can be sent now, in order of arrival for each answer."""
        if not self._holds:
            return list(deltas)
        ready: list[IndexedDelta] = []
        for prompt, delta in deltas:
            if delta.index == 0 and prompt not in self._known:
                self._known.add(prompt)
                ready += [(prompt, delta), *self._kept.pop(prompt, [])]
            elif prompt in self._known:
                ready.append((prompt, delta))
            else:
                self._kept.setdefault(prompt, []).append((prompt, delta))
        return ready


async def _events(
    record: RequestRecord,
    reply: Reply,
    deltas: list[IndexedDelta] | None,
    answers: Answers,
    form: Form,
    holder: _DeltaBuffer,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error of the engine is the last event."""
    try:
        while deltas is not None:
            events = []
            for prompt, delta in holder.pass_on(deltas):
                choice = answers.add(prompt, delta)
                events += [event(chunk) for chunk in form.chunks(choice, delta, answers)]
            if events:
                yield b"".join(events)
            deltas = await reply.next()
    except ApiError as error:
        record.outcome, record.error = "failed", error.message
        yield b"data: " + error.body + b"\n\n"
        return
    yield b"".join(event(chunk) for chunk in form.last(answers)) + b"data: [DONE]\n\n"


def _cards(front: Front) -> list[ModelCard]:
    info = front.info
    model = ModelCard(
        id=info.name,
        created=info.created,
        max_length=info.max_length,
        has_chat_template=front.prompts.has_chat_template,
    )
    return [model, *(model.model_copy(update={"id": name, "parent": info.name}) for name in info.adapters)]
