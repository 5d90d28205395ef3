"""Options of a server: address, access control, limits and shutdown."""

import ipaddress
import math
from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of an HTTP server in front of an engine.

    Attributes:
        host: Address to listen on; without `api_key` a loopback address. Default: 127.0.0.1.
        port: Port to listen on; 0 chooses a free one. Default: 8020.
        api_key: Key that clients send as `Authorization: Bearer ...`; None accepts clients of this machine.
        no_auth: Listen on a public address without a key.
        open_metrics: Serve `/metrics` without the key.
        allow_weight_updates: Add the route `POST /v1/load_weights`.
        allow_cors: Accept requests from pages of other origins.
        log_prompts: Write prompts into the log.
        max_body_bytes: Largest body of a request.
        request_timeout_s: Seconds until a request ends with the tokens generated so far; None for no limit.
        drain_s: Seconds for running requests to finish at shutdown.
        keep_alive_s: Seconds until an idle connection is closed.
        num_tokenizer_threads: Threads that tokenize prompts, each with a copy of the tokenizer.
        ssl_keyfile: Private key for https, in PEM.
        ssl_certfile: Certificate for https, in PEM.

    Raises:
        ValueError: `host` is a public address without `api_key` or `no_auth`, or a field is out of range. The
            message names the field, its value and the allowed values.
    """

    host: str = "127.0.0.1"
    port: int = 8020
    api_key: str | None = field(default=None, repr=False)
    no_auth: bool = False
    open_metrics: bool = False
    allow_weight_updates: bool = False
    allow_cors: bool = False
    log_prompts: bool = False
    max_body_bytes: int = 4 * MIB
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    keep_alive_s: int = 5
    num_tokenizer_threads: int = 2
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None:
            is_plain = self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key
            if not self.api_key or not is_plain:  # the message must not contain the key
                raise ValueError("api_key must be printable ASCII characters without spaces, at least one")
            if self.no_auth:
                raise ValueError("api_key and no_auth=True contradict each other; leave one of them out")
        elif not self.no_auth and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and there is no api_key; give one, "
                "or listen on 127.0.0.1, or set no_auth=True to serve without a key"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError(
                f"ssl_keyfile={self.ssl_keyfile!r} and ssl_certfile={self.ssl_certfile!r}; https needs both"
            )
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value!r}; it must be from {low:g} to {high:g}")


_RANGES = (
    ("port", 0, 65535),
    ("max_body_bytes", 1, math.inf),
    ("request_timeout_s", 0, math.inf),
    ("drain_s", 0, math.inf),
    ("keep_alive_s", 0, math.inf),
    ("num_tokenizer_threads", 1, 64),
)


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only; a name other than localhost counts as public."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
