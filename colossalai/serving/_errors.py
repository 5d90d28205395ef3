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
"""Value of the Retry-After header when the queue is full or the server drains."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    406: "rate_limit_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str = Field(description="The mistake, the allowed values, and the remedy.")
    type: str
    param: str | None = Field(description="The field that is wrong, if it is one.")
    code: str | None = Field(description="A name for programs, where there is one.")


class ErrorBody(BaseModel):
    """Body of a response with an error."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: The HTTP status.
        message: The problem, the allowed values, and the fix.
        param: The field that is wrong.
        code: Identifier of the error for programs.
        headers: Further headers of the response.
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
        """The error as JSON, in ASCII: a message may quote half a surrogate pair from the client."""
        detail = ErrorDetail.model_construct(
            message=self.message,
            type=_TYPES.get(self.status, "invalid_request_error"),
            param=self.param,
            code=self.code,
        )
        return json.dumps({"error": dict(detail)}).encode()

    @property
    def response(self) -> Response:
        """The error as a response."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


def refusal(error: BaseException, *, full_status: int = 429) -> ApiError:
    """Return the error of a request that the engine rejects.

    Args:
        error: Exception raised by `submit`.
        full_status: HTTP status if the queue is full.
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
    """Return the error of a request that the engine accepted and that then failed with `error`.

    An engine that stops during a request is a failure of that request (500), not a refusal (503).
    """
    if isinstance(error, QueueFull | RequestRefused):
        return refusal(error)
    code = "request_failed" if isinstance(error, RequestFailed) else "engine_failed"
    return ApiError(500, str(error) or type(error).__name__, code=code)


def bad_value(error: ValueError) -> ApiError:
    """Return a 400 for a `ValueError` of a dataclass, whose message begins with the field's name."""
    name = re.match(r"\w+(?==|\[| has | names )", str(error))
    return ApiError(400, str(error), param=name and name[0])


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Return a 400 for a body that does not match its schema, with the first error."""
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
"""Type of the error of an unknown field; its message is complete."""


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the error of an unknown path or method in the common form."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], error.headers
    if error.status_code == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:
        return ApiError(
            400, f"the body is not JSON: {_parse_error_reason(error.__cause__)}", code="invalid_json"
        ).response
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is no {path!a}; /docs lists what is there", headers=headers).response
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (headers or {}).get("Allow", "another method")
        return ApiError(
            405, f"{path!a} is asked by {allowed}, not {request.method!a}", headers=headers
        ).response
    return ApiError(error.status_code, str(error.detail), headers=headers).response


def _parse_error_reason(cause: BaseException) -> str:
    """Return the reason of a parse error whose parser names no character."""
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not in UTF-8 ({cause.reason} at byte {cause.start})"
    if isinstance(cause, RecursionError):
        return "its lists and objects are nested too deeply"
    return "a number in it has too many digits" if isinstance(cause, ValueError) else "it cannot be read"


async def on_api_error(request: Request, error: Exception) -> Response:
    """Return the response of an `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response


def _param(loc: tuple[str | int, ...]) -> str:
    """Return the path of a value: `messages[0].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
