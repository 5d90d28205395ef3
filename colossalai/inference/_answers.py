"""Answers that are being made: what is drawn next for them, and whether what was drawn ends them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from colossalai.inference._request import Delta, FinishReason, Request, TokenLogprobs
from colossalai.inference._service import Listener
from colossalai.inference.sampling import Draw, StructureMatcher, TextStream, draw_of, uniform_of
from colossalai.inference.scheduling import RunningSequence


@dataclass
class OpenRequest:
    """A request that is under way.

    Attributes:
        request: What is asked for.
        listener: Who hears of it.
        seed: That of its draws.
        arrived: When it came, in seconds of a steady clock.
        max_tokens: Most tokens of an answer: what it asks for, and what the window allows.
        end_tokens: Tokens that end its answers.
        answers: Its answers so far; those that are drawn from the prompt's end are not there before.
        prompt_logprobs: Those of its prompt so far, by position; None where they are not asked for.
        has_told_scores: Whether its listener has heard of these.
        has_begun: Whether a part of its prompt has been read.
        failure: What keeps its next token from being drawn, as a grammar that failed; None if nothing does.
        num_read: Tokens of its prompt that have been read or were known; those read again are not more.
        number: Of its arrival.
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
        """Whether its listener has heard of a token, or of an end."""
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
        """Return the log-probabilities of the prompt, in order; None where they are not asked for."""
        if self.prompt_logprobs is None:
            return None
        return tuple(found for _, found in sorted(self.prompt_logprobs.items()))


class OpenAnswer:
    """One answer.

    Args:
        of: The request.
        sequence: Its tokens and blocks.
        text: Its text as it grows; None where only tokens are exchanged.
        matcher: The language that it is in; None for any.

    Attributes:
        finish_reason: Why it has ended; None while it goes on.
        num_told: Tokens of it that its listener has heard of.
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
        """How many tokens may be guessed: the answer takes them and one more; none before its first token."""
        num_answered = len(self.sequence.tokens) - self.sequence.num_prompt
        return self.of.max_tokens - num_answered - 1 if num_answered else 0

    def allowed(self, drafted: Sequence[int]) -> Sequence[int]:
        """Return a draft up to where the answer must end, or leave its language."""
        num_allowed = 0
        for token in drafted:
            if token in self.of.end_tokens or (self.matcher and not self.matcher.accept(token)):
                break
            num_allowed += 1
        if self.matcher:
            self.matcher.rollback(num_allowed)
        return drafted[:num_allowed]

    def draws(self, drafted: Sequence[int]) -> list[Draw]:
        """Return how its next token is drawn, and those behind each drafted token."""
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
                ends = frozenset()  # the language leaves nothing else, however few tokens there are
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
        """Return how the first token of another answer to the same prompt is drawn."""
        first = self.draws(())[0]
        return [replace(first, uniform=uniform_of(self.of.seed, index, 0))]

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Delta:
        """Take tokens that were drawn, the last ones of the sequence, and say what they add.

        Where an end is among them those behind it are forgotten.

        Args:
            token_ids: The tokens.
            logprobs: Their log-probabilities, None for each where they are not asked for.
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
        """End it as it is."""
        self.finish_reason = reason
        text = self.text.finish() if self.text else ""
        request_id = self.of.request.request_id
        return Delta(request_id=request_id, index=self.sequence.index, text=text, finish_reason=reason)

    def _end_at(self, token: int, length: int) -> tuple[FinishReason | None, str | int | None]:
        """Return why the answer ends with a token, and with which stop.

        Args:
            token: Its last token.
            length: Tokens of prompt and answer, this one included.
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
    """Return whether no other tokens have a bit in a mask; see `StructureMatcher.mask`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return int(bits.sum()) == sum(int(bits[token]) for token in token_ids if token < len(bits))
