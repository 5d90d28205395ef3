"""Open answers: the draws of their next tokens, and the conditions that end them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from colossalai.inference._request import Delta, FinishReason, Request, TokenLogprobs
from colossalai.inference._service import Listener
from colossalai.inference.sampling import Draw, StructureMatcher, TextStream, draw_of, uniform_of
from colossalai.inference.scheduling import RunningSequence


@dataclass
class OpenRequest:
    """A request in flight.

    Attributes:
        request: The request.
        listener: Listener of its deltas.
        seed: Seed of its draws.
        arrived: Time of arrival, in seconds of a steady clock.
        max_tokens: Maximum number of tokens of an answer: the request's own limit within the window.
        end_tokens: Tokens that end its answers.
        answers: Its answers so far; answers 1 to n - 1 are added when the prompt has been read.
        prompt_logprobs: Log-probabilities of its prompt so far, by position; None if not requested.
        has_told_scores: Whether its listener has received them.
        has_begun: Whether a part of its prompt has been read.
        failure: Error that prevents the next draw, such as one of a grammar.
        num_read: Tokens of its prompt that were read or cached, each counted once.
        number: Number of its arrival.
    """

    request: Request
    listener: Listener
    seed: int
    arrived: float
    max_tokens: int
    end_tokens: frozenset[int]
    answers: "list[OpenAnswer]" = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] | None = None
    has_told_scores: bool = False
    has_begun: bool = False
    failure: Exception | None = None
    num_read: int = 0
    number: int = 0

    @property
    def has_answered(self) -> bool:
        """Whether its listener has received a token or an end."""
        return any(
            answer.finish_reason or len(answer.sequence.tokens) > answer.sequence.num_prompt
            for answer in self.answers
        )

    @property
    def is_over(self) -> bool:
        """Whether all its answers have ended."""
        return len(self.answers) == self.request.params.n and all(
            answer.finish_reason for answer in self.answers
        )

    def scores(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the log-probabilities of the prompt in order; None if not requested."""
        if self.prompt_logprobs is None:
            return None
        return tuple(found for _, found in sorted(self.prompt_logprobs.items()))


class OpenAnswer:
    """One answer of a request.

    Args:
        of: The request.
        sequence: Its tokens and blocks.
        text: Its detokenized text; None if only tokens are exchanged.
        matcher: Grammar of the answer; None for any text.

    Attributes:
        finish_reason: Reason of its end; None while it is open.
    """

    def __init__(
        self,
        of: OpenRequest,
        sequence: RunningSequence,
        *,
        text: TextStream | None,
        matcher: StructureMatcher | None,
    ) -> None:
        self.of = of
        self.sequence = sequence
        self.text = text
        self.matcher = matcher
        self.finish_reason: FinishReason | None = None

    @property
    def room_for_draft(self) -> int:
        """Maximum length of a draft: one less than the tokens left; 0 before the first token."""
        num_answered = len(self.sequence.tokens) - self.sequence.num_prompt
        return self.of.max_tokens - num_answered - 1 if num_answered else 0

    def allowed(self, drafted: Sequence[int]) -> Sequence[int]:
        """Truncate a draft where the answer would end or violate its grammar."""
        num_allowed = 0
        for token in drafted:
            if token in self.of.end_tokens or (self.matcher and not self.matcher.accept(token)):
                break
            num_allowed += 1
        if self.matcher:
            self.matcher.rollback(num_allowed)
        return drafted[:num_allowed]

    def draws(self, drafted: Sequence[int]) -> list[Draw]:
        """Return the draws of its next token and of the token after each drafted one."""
        sequence, params = self.sequence, self.of.request.params
        num_answered = len(sequence.tokens) - sequence.num_prompt
        prompt: Sequence[int] = ()
        answer: Sequence[int] = ()
        if params.has_penalties:
            prompt, answer = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
        found = []
        for number in range(len(drafted) + 1):
            if number and self.matcher:
                self.matcher.accept(drafted[number - 1])
            mask = self.matcher.mask() if self.matcher else None
            ends = self.of.end_tokens
            if mask is not None and _allows_only(mask, ends):
                ends = frozenset()  # the grammar allows only end tokens, even before `min_tokens`
            found.append(
                draw_of(
                    params,
                    prompt_token_ids=prompt,
                    answer_token_ids=[*answer, *drafted[:number]],
                    uniform=uniform_of(self.of.seed, sequence.index, num_answered + number),
                    banned=ends if num_answered + number < params.min_tokens else (),
                    mask=mask,
                )
            )
        if self.matcher:
            self.matcher.rollback(len(drafted))
        return found

    def draws_of_twin(self, index: int) -> list[Draw]:
        """Return the draw of the first token of another answer to the same prompt."""
        first = self.draws(())[0]
        return [replace(first, uniform=uniform_of(self.of.seed, index, 0))]

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Delta:
        """Process drawn tokens, the last ones of the sequence, and return their delta.

        Tokens after an end are dropped.

        Args:
            token_ids: The tokens.
            logprobs: Their log-probabilities, each None if not requested.
        """
        sequence, request = self.sequence, self.of.request
        kept: list[int] = []
        pieces: list[str] = []
        stop_reason: str | int | None = None
        for token in token_ids:
            kept.append(token)
            pieces.append("" if token in self.of.end_tokens or not self.text else self.text.push([token]))
            self.finish_reason, stop_reason = self._end_at(
                token, len(sequence.tokens) - len(token_ids) + len(kept)
            )
            if self.finish_reason:
                break
        del sequence.tokens[len(sequence.tokens) - len(token_ids) + len(kept) :]
        if self.finish_reason and self.text:
            pieces.append(self.text.finish())
        wanted = None
        if request.params.logprobs is not None:
            wanted = tuple(found for found in logprobs[: len(kept)] if found is not None)
        return Delta(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=tuple(kept),
            text="".join(pieces),
            logprobs=wanted,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            cached_tokens=sequence.num_cached or 0,
        )

    def end(self, reason: FinishReason) -> Delta:
        """End the answer with the given reason."""
        self.finish_reason = reason
        text = self.text.finish() if self.text else ""
        request_id = self.of.request.request_id
        return Delta(request_id=request_id, index=self.sequence.index, text=text, finish_reason=reason)

    def _end_at(self, token: int, length: int) -> tuple[FinishReason | None, str | int | None]:
        """Return the reason and the stop that end the answer at a token, (None, None) for neither.

        Args:
            token: Its last token.
            length: Number of tokens of the prompt and the answer, this one included.
        """
        if self.matcher is not None and token not in self.of.end_tokens:
            self.matcher.accept(token)
        if token in self.of.end_tokens:
            is_named = token in self.of.request.params.stop_token_ids
            return "stop", token if is_named else None
        if self.text is not None and self.text.stopped is not None:
            return "stop", self.text.stopped.text
        if self.matcher is not None and self.matcher.is_finished:
            return "stop", None
        if length - self.sequence.num_prompt >= self.of.max_tokens:
            return "length", None
        return None, None


def _allows_only(mask: np.ndarray, token_ids: Collection[int]) -> bool:
    """Return whether a mask allows no other tokens; see `StructureMatcher.mask`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return int(bits.sum()) == sum(int(bits[token]) for token in token_ids if token < len(bits))
