"""Routes of the chat server: POST /generate, and /generate/stream with server-sent events.

A dialogue is a list of instructions with their responses. The prompt has the format of the training data: the
tokenizer's chat template, or Alpaca's. A dialogue longer than the window loses its oldest turns.
"""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from colossalai.inference import ALPACA_STOP, Request, SamplingParams
from colossalai.serving._errors import ApiError, bad_value
from colossalai.serving._request_record import RequestRecord
from colossalai.serving._streams import Front, IndexedDelta, Reply
from colossalai.serving.routes._answers import Answers
from colossalai.serving.routes._openai import GENERATING_ERRORS, EventStream, requests_of, responses
from colossalai.serving.routes._schemas import StrictBody

_MOST_NEW_TOKENS = 512  # default of `max_new_tokens`
_DATA = {"type": "string", "description": "A JSON string: the next piece of the answer, or an empty one."}
_NAME = {"enum": ["generate", "end", "error"], "description": "After an error, data is its JSON object."}
_EVENT = {"type": "object", "properties": {"event": _NAME, "data": _DATA}, "required": ["event", "data"]}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}, "description": "The answer in pieces."}
}


class DialogueTurn(StrictBody):
    """An instruction and its response."""

    instruction: str = Field(min_length=1)
    response: str = Field("", description="Empty for the last turn, whose response is generated.")


class DialogueBody(StrictBody):
    """A dialogue that ends with an open instruction."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "history": [{"instruction": "Name the longest river.", "response": ""}],
                    "max_new_tokens": 64,
                    "temperature": 0.7,
                }
            ]
        }
    )

    history: Annotated[list[DialogueTurn], Field(fail_fast=True)] = Field(
        min_length=1, description="Oldest first; the oldest are left out where the window is too small."
    )
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description=f"Most tokens of the answer; {_MOST_NEW_TOKENS} or half of the window if left out.",
    )
    top_k: int | None = Field(None, description="Draw from so many of the most likely tokens.")
    top_p: float | None = Field(None, description="Draw from the most likely tokens of this probability.")
    temperature: float | None = Field(None, description="0 takes the most likely token; 1 if left out.")
    repetition_penalty: float | None = Field(None, description="Makes tokens that are there less likely.")


class DialogueAnswer(BaseModel):
    """The response to the last instruction."""

    response: str


def add_dialogue_routes(router: APIRouter, front: Front) -> None:
    """Add POST /generate and /generate/stream.

    Args:
        router: Router that gets the routes.
        front: The engine and its options.
    """

    @router.post("/generate", responses=responses(*GENERATING_ERRORS, 429))
    async def generate(body: DialogueBody, http: HttpRequest) -> DialogueAnswer:
        """Answer the last instruction of a dialogue."""
        record = RequestRecord.of(http)
        request = await _request_of(front, body, record)
        answers = Answers([request.prompt_token_ids], 1, record)
        reply = await front.ask([request], record)
        while (deltas := await reply.next()) is not None:
            _add(answers, deltas)
        return DialogueAnswer(response=answers.choices[0].text)

    @router.post(
        "/generate/stream",
        response_class=Response,
        responses={**_STREAM, **responses(*GENERATING_ERRORS, 429)},
    )
    async def generate_stream(body: DialogueBody, http: HttpRequest) -> Response:
        """Answer the last instruction of a dialogue, in pieces: events `generate`, and then `end`."""
        record = RequestRecord.of(http)
        request = await _request_of(front, body, record)
        answers = Answers([request.prompt_token_ids], 1, record)
        reply = await front.ask([request], record)
        first = await reply.next()  # an error before the first piece still sets the status
        return EventStream(_events(record, reply, first, answers))


async def _request_of(front: Front, body: DialogueBody, record: RequestRecord) -> Request:
    """Return the engine's request of a body.

    Raises:
        ApiError: `body` cannot be answered.
    """
    record.model = front.info.name
    if body.history[-1].response:
        place = f"history[{len(body.history) - 1}].response"
        why = "the last one must be empty, as it is what is asked for; add a turn with the next instruction"
        raise ApiError(400, f"{place}: {why}", param=place)
    if front.options.log_prompts:
        record.prompts = [turn.model_dump() for turn in body.history]
    num_new = body.max_new_tokens or max(min(_MOST_NEW_TOKENS, front.info.max_length // 2), 1)
    names = ("top_k", "top_p", "temperature", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    try:
        params = SamplingParams(
            max_tokens=num_new, stop=() if front.prompts.has_chat_template else (ALPACA_STOP,), **given
        )
    except ValueError as error:
        raise bad_value(error) from error
    prompt = await front.prompts.from_dialogue(
        [(turn.instruction, turn.response) for turn in body.history], num_new
    )
    return requests_of(front, record, [prompt], [params])[0]


def _add(answers: Answers, deltas: list[IndexedDelta]) -> str:
    """Add deltas, and return the new text."""
    for index, delta in deltas:
        answers.add(index, delta)
    return "".join(delta.text for _, delta in deltas)


async def _events(
    record: RequestRecord, reply: Reply, deltas: list[IndexedDelta] | None, answers: Answers
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error of the engine is the last event."""
    try:
        while deltas is not None:
            if text := _add(answers, deltas):
                yield _event("generate", json.dumps(text).encode())
            deltas = await reply.next()
    except ApiError as error:
        record.outcome, record.error = "failed", error.message
        yield _event("error", error.body)
        return
    yield _event("end", b'""')


def _event(name: Literal["generate", "end", "error"], data: bytes) -> bytes:
    """Return a server-sent event; browsers ignore one without data."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
