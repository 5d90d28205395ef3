"""The documented route of the OPT service, POST /generation, and the loading of new weights."""

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field

from colossalai.inference import EngineStopped, RequestFailed, SamplingParams
from colossalai.serving._errors import ApiError, bad_value, failure, refusal
from colossalai.serving._request_record import RequestRecord
from colossalai.serving._streams import Front
from colossalai.serving.routes._answers import Answers
from colossalai.serving.routes._openai import GENERATING_ERRORS, requests_of, responses
from colossalai.serving.routes._schemas import StrictBody


class GenerationBody(StrictBody):
    """A prompt to continue."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "The longest river", "max_tokens": 64, "top_p": 0.9}]}
    )

    prompt: str = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=256)] = 64
    top_k: int | None = Field(None, description="Draw from so many of the most likely tokens.")
    top_p: float | None = Field(None, description="Draw from the most likely tokens of this probability.")
    temperature: float | None = Field(None, description="0 takes the most likely token; 1 if left out.")


class GenerationAnswer(BaseModel):
    """The continuation, without the prompt."""

    text: str


class LoadWeightsBody(StrictBody):
    """New values for the model that is served."""

    path: str = Field(min_length=1, description="A checkpoint, where the server finds it.")
    in_flight: Literal["finish", "restart"] = Field(
        "finish", description="Whether running requests end before, or begin again after it."
    )


class LoadWeightsAnswer(BaseModel):
    """The loaded weights, in effect from now on."""

    path: str
    model: str


def add_generation_route(router: APIRouter, front: Front) -> None:
    """Add POST /generation.

    Args:
        router: Router that gets the route.
        front: The engine and its options.
    """

    @router.post("/generation", responses=responses(*GENERATING_ERRORS, 406))
    async def generation(body: GenerationBody, http: HttpRequest) -> GenerationAnswer:
        """Continue a prompt."""
        record = RequestRecord.of(http)
        record.model = front.info.name
        if front.options.log_prompts:
            record.prompts = [body.prompt]
        prompt = (await front.prompts.from_texts([body.prompt]))[0]
        given = {"top_k": body.top_k, "top_p": body.top_p, "temperature": body.temperature}
        try:
            params = SamplingParams(
                max_tokens=min(body.max_tokens, front.info.max_length - len(prompt)),
                **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise bad_value(error) from error
        answers = Answers([prompt], 1, record)
        reply = await front.ask(requests_of(front, record, [prompt], [params]), record, full_status=406)
        while (deltas := await reply.next()) is not None:
            for index, delta in deltas:
                answers.add(index, delta)
        return GenerationAnswer(text=answers.choices[0].text)


def add_weights_route(router: APIRouter, front: Front) -> None:
    """Add POST /v1/load_weights.

    Args:
        router: Router that gets the route.
        front: The engine and its options.
    """

    @router.post("/v1/load_weights", responses=responses(400, 409, 413, 503))
    async def load_weights(body: LoadWeightsBody) -> LoadWeightsAnswer:
        """Load new weights from a checkpoint without a restart; returns once they are in effect."""
        if front.is_updating:
            raise ApiError(409, "weights are being loaded already; wait for the end of that", code="busy")
        front.is_updating = True
        # The update continues if the client disconnects, so the thread itself resets the flag.
        try:
            await front.run_slow(partial(_update, front, body))
        except EngineStopped as error:
            raise refusal(error) from error
        except TimeoutError as error:
            raise ApiError(409, str(error), code="busy", param="in_flight") from error
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="path") from error
        except RequestFailed as error:
            raise failure(error) from error
        return LoadWeightsAnswer(path=body.path, model=front.info.name)


def _update(front: Front, body: LoadWeightsBody) -> None:
    try:
        front.service.update_weights(body.path, in_flight=body.in_flight)
    finally:
        front.is_updating = False
