"""API key: who may ask for what, compared in constant time."""

import hmac

from colossalai.serving._errors import ApiError
from colossalai.serving._options import ServerOptions

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/docs"})
"""Routes that never ask for the key: two for probes, and static pages, which hold nothing of the model."""

PAGE_PREFIX = "/page/"
"""Where the assets of the static pages are."""

_SCHEME = b"bearer "


def check_key(options: ServerOptions, path: str, authorization: bytes) -> None:
    """Refuse a request without the key where one is needed.

    Args:
        options: The key, and whether `/metrics` is open.
        path: What is asked for.
        authorization: The header of that name, b"" where there is none.

    Raises:
        ApiError: `authorization` does not hold the key that `path` needs; a 401 that says how to send it.
    """
    is_open = (
        path in OPEN_PATHS or path.startswith(PAGE_PREFIX) or (options.open_metrics and path == "/metrics")
    )
    if options.api_key is None or is_open:
        return
    # An unknown path asks for the key, too: whoever has none learns nothing about what is there.
    given = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else b""
    if not hmac.compare_digest(given, options.api_key.encode()):
        how = "is not the key of this server" if given else "is missing; send `Authorization: Bearer KEY`"
        raise ApiError(
            401, f"the API key {how}", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )


def without_key(options: ServerOptions, text: str) -> str:
    """Return a text for the log in which the key, should a client have put it there, cannot be read."""
    return text if options.api_key is None else text.replace(options.api_key, "***")
