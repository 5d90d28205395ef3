"""Pace of steps: how long they take, and how much of a prompt one of them reads."""

from colossalai.inference.scheduling._scheduler import BatchStep


class PromptPace:
    """How much of a prompt a step reads beside those who are answered: so much as nearly doubles the step.

    Attributes:
        prompt_tokens: Most tokens of prompts in such a step; None while nothing is known.
    """

    _SHARE = 0.2  # of a new measurement in the running mean
    _LEAST = 8  # tokens; below it a step is hardly shorter
    _FIRST = 16  # tokens, before anything was measured
    _AIM = 0.8  # of an ordinary step: single steps swing about the mean

    def __init__(self) -> None:
        self.prompt_tokens: int | None = self._FIRST
        self._step_s: float | None = None
        self._token_s: float | None = None

    def note(self, step: BatchStep, seconds: float) -> None:
        """Note how long a step took."""
        answered = [chunk for chunk in step.chunks if len(chunk.token_ids) == 1 + chunk.num_drafted]
        num_read = step.num_tokens - sum(len(chunk.token_ids) for chunk in answered)
        if not num_read:
            self._step_s = _mean(self._step_s, seconds, self._SHARE)
        elif self._step_s is not None and answered:
            beyond = max(seconds - self._step_s, 0.0) / num_read
            self._token_s = _mean(self._token_s, beyond, self._SHARE)
        if self._step_s and self._token_s:
            self.prompt_tokens = max(self._LEAST, int(self._AIM * self._step_s / self._token_s))


def _mean(before: float | None, new: float, share: float) -> float:
    return new if before is None else before + share * (new - before)
