"""Serving: an inference engine behind HTTP, with OpenAI's routes, limits, cancellation and metrics.

`make_app` returns the ASGI application, `Server` runs it in its own thread, `ServerOptions` configures both.
"""

from colossalai.serving._app import make_app as make_app
from colossalai.serving._options import ServerOptions as ServerOptions
from colossalai.serving._server import Server as Server
from colossalai.serving.command import ServeOptions as ServeOptions
from colossalai.serving.command import serve as serve
