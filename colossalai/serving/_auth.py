"""API key: authorization of requests, with a comparison in constant time."""

import hmac

from colossalai.serving._errors import ApiError
from colossalai.serving._options import ServerOptions

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/docs"})
"""Routes without a key: two for probes, and static pages, which contain no data of the model."""

PAGE_PREFIX = "/page/"
"""Prefix of the paths of the pages' assets."""

_SCHEME = b"bearer "


def check_key(options: ServerOptions, path: str, authorization: bytes) -> None:
    """Reject a request to a protected path without the key.

    Args:
        options: The key, and whether `/metrics` is open.
        path: Path of the request.
        authorization: Value of the Authorization header, b"" without one.

    Raises:
        ApiError: `authorization` lacks the key that `path` requires (401, with the header to send).
    """
    is_open = (
        path in OPEN_PATHS or path.startswith(PAGE_PREFIX) or (options.open_metrics and path == "/metrics")
    )
    if options.api_key is None or is_open:
        return
    # Unknown paths are protected, too, so that a client without the key cannot probe which routes exist.
    given = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else b""
    if not hmac.compare_digest(given, options.api_key.encode()):
        how = "is not the key of this server" if given else "is missing; send `Authorization: Bearer KEY`"
        raise ApiError(
            401, f"the API key {how}", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )


def without_key(options: ServerOptions, text: str) -> str:
    """Return a text for the log with the API key masked."""
    return text if options.api_key is None else text.replace(options.api_key, "***")
