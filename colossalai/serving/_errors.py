"""Errors of the HTTP front end, all in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from colossalai.inference import EngineStopped, QueueFull, RequestFailed, RequestRefused

RETRY_AFTER_S = 1
"""What a client is told to wait where the queue is full or the server ends."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    406: "rate_limit_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, what is allowed, and what to change.")
    type: str
    param: str | None = Field(description="The field that is wrong, if it is one.")
    code: str | None = Field(description="A name for programs, where there is one.")


class ErrorBody(BaseModel):
    """The answer where a request has none."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: The HTTP status.
        message: What is wrong, what is allowed, what to change.
        param: The field that is wrong.
        code: A name for programs.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The error as JSON; in ASCII, since a message may quote half a character of a client."""
        detail = ErrorDetail.model_construct(
            message=self.message,
            type=_TYPES.get(self.status, "invalid_request_error"),
            param=self.param,
            code=self.code,
        )
        return json.dumps({"error": dict(detail)}).encode()

    @property
    def response(self) -> Response:
        """The error as an answer."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


def refusal(error: BaseException, *, full_status: int = 429) -> ApiError:
    """Return the answer to a request that the engine does not take.

    Args:
        error: What `submit` raised.
        full_status: The status where the queue is full.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        retry = {"retry-after": str(RETRY_AFTER_S)}
        return ApiError(full_status, str(error) or "the queue is full", code="queue_full", headers=retry)
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error), code="request_refused")
    if isinstance(error, EngineStopped):
        retry = {"retry-after": str(RETRY_AFTER_S)}
        return ApiError(503, str(error) or "the engine has ended", code="engine_stopped", headers=retry)
    return failure(error)


def failure(error: BaseException) -> ApiError:
    """Return the answer to a request that the engine had taken, and that ended with `error`.

    An engine that stops in the middle is a failure of this request, whatever it says of later ones.
    """
    if isinstance(error, QueueFull | RequestRefused):
        return refusal(error)
    code = "request_failed" if isinstance(error, RequestFailed) else "engine_failed"
    return ApiError(500, str(error) or type(error).__name__, code=code)


def bad_value(error: ValueError) -> ApiError:
    """Return the 400 of a value that a dataclass refused; its messages begin with the field's name."""
    name = re.match(r"\w+(?==|\[| has | names )", str(error))
    return ApiError(400, str(error), param=name and name[0])


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Answer to a body that does not fit its schema: 400, for the first thing that is wrong."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        why, place = first["ctx"]["error"], first["loc"][-1]
        return ApiError(
            400, f"the body is not JSON: {why} at character {place}", code="invalid_json"
        ).response
    message = str(first["msg"])
    if first["type"] == UNKNOWN_FIELD:
        param = _param((*first["loc"][1:], first["ctx"]["field"]))
        return ApiError(400, message, param=param, code=UNKNOWN_FIELD).response
    param = _param(first["loc"][1:])
    if first["type"] == "missing":
        message = "it is missing" if param else "the body is missing; send a JSON object"
    if first["type"] == "too_short":
        sizes = first["ctx"]
        message = f"it has {sizes['actual_length']} items; it must have at least {sizes['min_length']}"
    if param:
        message = f"{param}: {message[:1].lower()}{message[1:]}"
    return ApiError(400, message, param=param or None).response


UNKNOWN_FIELD = "unknown_field"
"""Type of the error of a field that a body must not have; its message is complete."""


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer to a path or method that is not there, in the form of all errors."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], error.headers
    if error.status_code == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:
        return ApiError(
            400, f"the body is not JSON: {_why_unread(error.__cause__)}", code="invalid_json"
        ).response
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is no {path!a}; /docs lists what is there", headers=headers).response
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (headers or {}).get("Allow", "another method")
        return ApiError(
            405, f"{path!a} is asked by {allowed}, not {request.method!a}", headers=headers
        ).response
    return ApiError(error.status_code, str(error.detail), headers=headers).response


def _why_unread(cause: BaseException) -> str:
    """Return why a body could not be parsed, where the parser did not name a character."""
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not in UTF-8 ({cause.reason} at byte {cause.start})"
    if isinstance(cause, RecursionError):
        return "its lists and objects are nested too deeply"
    return "a number in it has too many digits" if isinstance(cause, ValueError) else "it cannot be read"


async def on_api_error(request: Request, error: Exception) -> Response:
    """Answer with an error of ours."""
    assert isinstance(error, ApiError)
    return error.response


def _param(loc: tuple[str | int, ...]) -> str:
    """Return where a value is: `messages[0].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
