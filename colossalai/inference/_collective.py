"""Engine on the ranks of the running job: each has a part of the model and its own prompts.

The first of these ranks gathers and schedules the prompts. The others run its steps until all answers are
complete, and receive theirs. No rank waits between two calls, so the job can train.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from torch import nn

from colossalai.cluster import broadcast_value, gather_values
from colossalai.context import Mesh
from colossalai.inference._build import build_engine, build_worker
from colossalai.inference._engine import InferenceEngine
from colossalai.inference._llm import Collector, answer_all
from colossalai.inference._load import EngineOptions
from colossalai.inference._ranks import RanksExecutor, StepLink
from colossalai.inference._request import (
    REQUEST_ERRORS,
    Completion,
    EngineStopped,
    Request,
    RequestFailed,
    RequestRefused,
    SamplingParams,
    TokenLogprobs,
    sampling_params_of,
)


class CollectiveEngine:
    """An engine on the ranks of the running job; every method is collective over them.

    Args:
        part: This rank's part of the model; see `empty_part`.
        tokenizer: The tokenizer of the model.
        options: Options of the engine.
        mesh: The ranks; those along the axes `pp` and `tp` share an engine.

    Raises:
        ValueError: `part` cannot be served, or `options` leave no room for one request.
    """

    def __init__(self, part: nn.Module, tokenizer: Any, options: EngineOptions, *, mesh: Mesh) -> None:
        link = StepLink(mesh, next(part.parameters()).device)
        self._ranks = mesh.axis(("pp", "tp"))
        self._names = count()
        self._engine: InferenceEngine | None = None
        self._failure: str | None = None
        if self._ranks.rank == 0:
            self._engine = build_engine(part, tokenizer, options, link=link)
        else:
            self._work = build_worker(part, options, link=link)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[Completion, ...]]:
        """Return the answers to the prompts of this rank.

        Args:
            prompts: Prompts as tokens; may be empty.
            params: Sampling parameters of each prompt.

        Raises:
            RequestRefused: A prompt of some rank cannot be served; raised on all ranks.
            RequestFailed: The model computes a NaN for a prompt of some rank; raised on all ranks.
            EngineStopped: The engine on the first rank has failed, now or earlier; raised on all ranks.
        """
        # Same collectives on all ranks: gather prompts, run steps until rank 0 pauses, broadcast answers.
        own = [[[int(token) for token in prompt] for prompt in prompts], [asdict(each) for each in params]]
        of_ranks = gather_values(own, self._ranks.group)
        told: Any = None
        if self._engine is None:
            self._work()
        else:
            told = self._answers(self._engine, of_ranks)
        # Rank 0 has the answers; the other ranks return from `_work` when it has stopped them.
        found = broadcast_value(told, source=self._ranks.ranks[0], group=self._ranks.group)
        if "error" in found:
            kind, message = found["error"]
            raise REQUEST_ERRORS.get(kind, EngineStopped)(message)
        first = sum(len(theirs) for theirs, _ in of_ranks[: self._ranks.rank])
        return [
            tuple(_completion_of(fields) for fields in answers)
            for answers in found["answers"][first : first + len(prompts)]
        ]

    def weights_changed(self) -> None:
        """Drop cached results of earlier values of the parts."""
        if self._engine is not None:
            self._engine.weights_changed()

    def _answers(self, engine: InferenceEngine, of_ranks: Sequence[Any]) -> dict[str, Any]:
        """Return the answers to the prompts of all ranks, or the error, as plain values."""
        assert isinstance(engine.executor, RanksExecutor), "the engine was built with a link"
        try:
            if self._failure is not None:
                raise EngineStopped(self._failure)
            collectors = [
                Collector(
                    Request(
                        request_id=f"generate-{next(self._names)}",
                        prompt_token_ids=tuple(prompt),
                        params=sampling_params_of(fields),
                        is_streamed=False,
                    )
                )
                for prompts, params in of_ranks
                for prompt, fields in zip(prompts, params, strict=True)
            ]
            outputs = answer_all(engine, collectors)
            return {"answers": [[asdict(each) for each in output.outputs] for output in outputs]}
        except (RequestFailed, RequestRefused) as error:  # reported to the ranks that wait for the broadcast
            return {"error": [type(error).__name__, str(error)]}
        except Exception as error:  # messages of other ranks may be left unreceived
            self._failure = self._failure or f"the engine has failed: {type(error).__name__}: {error}"
            return {"error": [EngineStopped.__name__, self._failure]}
        finally:
            while engine.has_work:  # steps in flight of answers that have ended
                engine.step()
            engine.executor.pause()


def _completion_of(fields: dict[str, Any]) -> Completion:
    logprobs = fields["logprobs"]
    if logprobs is not None:
        logprobs = tuple(TokenLogprobs(**each) for each in logprobs)
    return Completion(**{**fields, "logprobs": logprobs})
