"""Routes: OpenAI's schemas, and the documented routes /generation and /generate."""

from colossalai.serving.routes._dialogues import add_dialogue_routes as add_dialogue_routes
from colossalai.serving.routes._generation import add_generation_route as add_generation_route
from colossalai.serving.routes._generation import add_weights_route as add_weights_route
from colossalai.serving.routes._openai import add_openai_routes as add_openai_routes
from colossalai.serving.routes._openai import responses as responses
