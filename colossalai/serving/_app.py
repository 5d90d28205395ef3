"""ASGI application: all routes in front of one engine, the static pages, and the OpenAPI description."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from colossalai._version import __version__
from colossalai.inference import EngineStopped, Service
from colossalai.serving._errors import (
    ApiError,
    on_api_error,
    on_http_error,
    on_validation_error,
    refusal,
)
from colossalai.serving._gate import Gate
from colossalai.serving._options import ServerOptions
from colossalai.serving._streams import Front, ending
from colossalai.serving.routes import (
    add_dialogue_routes,
    add_generation_route,
    add_openai_routes,
    add_weights_route,
    responses,
)

_PAGE = Path(__file__).parent / "_page"
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/page/chat.css": ("chat.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/curves.js": ("curves.js", "text/javascript"),
    "/page/docs.js": ("docs.js", "text/javascript"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/wire.js": ("wire.js", "text/javascript"),
}
"""Static pages and their assets. All of them are served from here, as the policy below requires."""

_PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    """The server is alive."""

    status: Literal["alive"] = "alive"


class Readiness(BaseModel):
    """The engine accepts requests."""

    status: Literal["ready"] = "ready"


class VersionAnswer(BaseModel):
    """Version of the program, and of the weights: a number that grows when they change."""

    version: str
    weights_version: int


class ServingApp(FastAPI):
    """FastAPI application whose OpenAPI description lists its own errors and its API key scheme.

    Args:
        front: State shared by the routes.
    """

    def __init__(self, front: Front) -> None:
        @asynccontextmanager
        async def live(app: FastAPI) -> AsyncIterator[None]:
            self.openapi()  # builds the validators of bodies here, not in the first request
            yield
            await front.close()

        super().__init__(
            title="colossalai serve",
            version=__version__,
            docs_url=None,  # they come from a CDN
            redoc_url=None,
            lifespan=live,
            exception_handlers={
                ApiError: on_api_error,
                HTTPException: on_http_error,
                RequestValidationError: on_validation_error,
            },
        )
        self.front = front

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description of all routes."""
        if self.openapi_schema is None:
            described = super().openapi()
            for operations in described["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # an invalid body is a 400 here
            for name in ("HTTPValidationError", "ValidationError"):
                described["components"]["schemas"].pop(name, None)
            if self.front.options.api_key is not None:
                described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                described["security"] = [{"key": []}]
        assert self.openapi_schema is not None
        return self.openapi_schema


def make_app(service: Service, options: ServerOptions | None = None) -> ServingApp:
    """Return an ASGI application that serves an engine.

    Args:
        service: The engine. It keeps running when the application ends.
        options: Options of the server. Default: `ServerOptions()`.

    Returns:
        An application for any ASGI server; `Server` runs it and ends it with a drain.
    """
    front = Front(service, options or ServerOptions())
    app = ServingApp(front)
    router = APIRouter()
    add_openai_routes(router, front)
    add_generation_route(router, front)
    add_dialogue_routes(router, front)
    if front.options.allow_weight_updates:
        add_weights_route(router, front)
    _add_probes(router, front)
    _add_pages(router)
    app.include_router(router)
    app.add_middleware(Gate, front=front)
    if front.options.allow_cors:  # outside the gate: a preflight request carries no key
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app


def _add_probes(router: APIRouter, front: Front) -> None:
    errors = responses()
    plain: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @router.get("/health")
    async def health() -> Health:
        """Return 200 while the process is alive, whether or not it is ready."""
        return Health()

    @router.get("/ready", responses=responses(503))
    async def ready() -> Readiness:
        """Return 200 if the model is loaded, the engine runs and the server does not drain."""
        if front.is_draining:
            raise ending()
        try:
            await front.run_slow(front.service.stats)
        except EngineStopped as error:
            raise refusal(error) from error
        return Readiness()

    @router.get("/metrics", response_class=Response, responses={**plain, **errors})
    async def metrics() -> Response:
        """Return counters and histograms in Prometheus' text format."""
        return Response(await front.run_slow(front.metrics.text), media_type=_METRICS_TYPE)

    @router.get("/version", responses=errors)
    async def version() -> VersionAnswer:
        """Return the versions of the program and of the weights."""
        try:
            stats = await front.run_slow(front.service.stats)
        except EngineStopped as error:
            raise refusal(error) from error
        return VersionAnswer(version=__version__, weights_version=stats.weights_version)


def _add_pages(router: APIRouter) -> None:
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _page_of(name, media_type), methods=["GET"], include_in_schema=False)


def _page_of(name: str, media_type: str) -> Any:
    async def page() -> Response:
        return FileResponse(_PAGE / name, media_type=media_type, headers=_PAGE_HEADERS)

    return page
