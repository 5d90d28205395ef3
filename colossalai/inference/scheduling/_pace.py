"""Pace of steps: their measured time, and the number of prompt tokens that fit into one."""

from colossalai.inference.scheduling._scheduler import BatchStep


class PromptPace:
    """Number of prompt tokens in a step that also answers: chosen to nearly double its time.

    Attributes:
        prompt_tokens: Maximum number of prompt tokens in such a step; None before any measurement.
    """

    _SHARE = 0.2  # weight of a new measurement in the running mean
    _LEAST = 8  # tokens; fewer would hardly shorten a step
    _FIRST = 16  # tokens, before any measurement
    _AIM = 0.8  # share of an ordinary step: the time of single steps varies

    def __init__(self) -> None:
        self.prompt_tokens: int | None = self._FIRST
        self._step_s: float | None = None
        self._token_s: float | None = None

    def note(self, step: BatchStep, seconds: float) -> None:
        """Record the time of a step."""
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
