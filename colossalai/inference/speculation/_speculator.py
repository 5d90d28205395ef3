"""Length of drafts: the number of tokens expected to pay off, possibly none.

The chance of a drafted token follows from the acceptance rate of its sequence and its kind; each further
token requires the previous one to be accepted. The cost of another row follows from the measured times of
steps by number of rows. A step with R sequences and D drafted tokens makes R + (sum of their chances) tokens
in T(R + D) seconds, and the tokens that maximize this rate are chosen, best first. One sequence affords many
where a step reads the weights for one row or for five, hardly any where arithmetic binds.

The choice affects the time of a text, never its content: drafts change no draw.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from colossalai.inference.scheduling import RunningSequence
from colossalai.inference.speculation._drafts import DraftMaker

# A token with a smaller chance is not computed: it would mostly be a wasted row.
_LEAST_CHANCE = 0.1
# One of this number of tokens left out for that reason is tried, because the text may begin to repeat. Prime,
# so that for any number of sequences it is not always the same one's turn.
_TRIED_OF = 31
# Required gain of the rate by drafts: the accuracy of measured times.
_MARGIN = 1.1
# Decay of a record's counts at each new draft: a memory of about 10 or 50 drafts.
_KEPT_OF_SEQUENCE, _KEPT_OF_KIND = 0.9, 0.98


@dataclass
class _Record:
    """Acceptance rate of drafted tokens, with exponential decay.

    Attributes:
        keeps: Decay factor of the counts at each new entry.
        right: Number of accepted tokens.
        total: Number of judged tokens: those up to the first rejected one.
    """

    keeps: float
    right: float = 0.0
    total: float = 0.0

    def note(self, num_right: int, num_judged: int) -> None:
        self.right = self.keeps * self.right + num_right
        self.total = self.keeps * self.total + num_judged


class RowPace:
    """Time of steps by their number of rows.

    Unknown times are estimated optimistically, so that they are tried: more rows as free, fewer as
    proportional. Old measurements are dropped for the same reason.
    """

    _SHARE = 0.2  # weight of a new measurement in the running means
    _AGE = 512  # steps

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}  # by bucket: rows, seconds, last update
        self._num_passed = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step."""
        self.pass_step()
        bucket = _bucket(num_rows)
        rows, mean, _ = self._means.get(bucket, (float(num_rows), seconds, 0))
        share = self._SHARE
        new = (rows + share * (num_rows - rows), mean + share * (seconds - mean), self._num_passed)
        self._means[bucket] = new

    def pass_step(self) -> None:
        """Count a step, and drop old measurements."""
        self._num_passed += 1
        old = self._num_passed - self._AGE
        if any(each[2] <= old for each in self._means.values()):
            self._means = {key: each for key, each in self._means.items() if each[2] > old}

    def seconds(self, num_rows: int) -> float:
        """Return the estimated time of a step in seconds; 0 before any measurement."""
        points = sorted((rows, mean) for rows, mean, _ in self._means.values())
        if not points:
            return 0.0
        low, high = points[0], points[-1]
        if num_rows <= low[0]:
            return low[1] * num_rows / low[0]
        if num_rows >= high[0]:
            return high[1]
        high = next(point for point in points if point[0] >= num_rows)
        low = next(point for point in reversed(points) if point[0] < num_rows)
        return low[1] + (high[1] - low[1]) * (num_rows - low[0]) / (high[0] - low[0])


def _bucket(num_rows: int) -> int:
    """Return the bucket of a number of rows: exact up to 15, then in steps of an eighth."""
    shift = max(num_rows.bit_length() - 4, 0)
    return num_rows >> shift << shift


class Speculator:
    """Requests drafts as long as they pay off.

    Args:
        maker: Source of drafts.
        num_tokens: Maximum length of a draft.
        clock: Monotonic clock in seconds.

    Attributes:
        num_drafted: Number of computed drafted tokens.
        num_accepted: Number of accepted ones.
    """

    def __init__(
        self, maker: DraftMaker, *, num_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.maker = maker
        self.num_tokens = num_tokens
        self.num_drafted = 0
        self.num_accepted = 0
        self._clock = clock
        self._pace = RowPace()
        self._round_pace = RowPace()  # of the maker: time of one more token, by number of sequences
        self._of_kind: defaultdict[int, _Record] = defaultdict(lambda: _Record(_KEPT_OF_KIND, 1.0, 2.0))
        self._of_sequence: dict[RunningSequence, defaultdict[int, _Record]] = {}
        self._last_kind: dict[RunningSequence, int] = {}
        self._num_left_out: defaultdict[int, int] = defaultdict(int)

    def drafts(
        self, room: Mapping[RunningSequence, int], num_rows: int
    ) -> Mapping[RunningSequence, Sequence[int]]:
        """Return drafts for the next step.

        Args:
            room: Maximum length of each sequence's draft, at least 1.
            num_rows: Number of rows of the step without drafts.
        """
        reaches = {
            sequence: self.maker.reach(sequence, min(most, self.num_tokens))
            for sequence, most in room.items()
        }
        lengths = self._lengths({each: reach for each, reach in reaches.items() if reach[0]}, num_rows)
        if not lengths:
            return {}
        # Reading a prompt is a one-time cost, and no measure for later drafts.
        is_usual = all(self.maker.lag(sequence) <= 1 + self.num_tokens for sequence in lengths)
        began = self._clock()
        found = self.maker.drafts(lengths)
        if is_usual:
            self._round_pace.note(len(lengths), (self._clock() - began) / max(lengths.values()))
        for sequence in found:
            self._last_kind[sequence] = reaches[sequence][1]
        return found

    def note_draft(self, sequence: RunningSequence, num_drafted: int, num_accepted: int) -> None:
        """Record the number of computed and accepted tokens of a sequence's last draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        kind = self._last_kind[sequence]
        num_judged = min(num_accepted + 1, num_drafted)
        records = self._of_sequence.setdefault(sequence, defaultdict(lambda: _Record(_KEPT_OF_SEQUENCE)))
        for record in (records[kind], self._of_kind[kind]):
            record.note(num_accepted, num_judged)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step without prompts."""
        self._pace.note(num_rows, seconds)
        self._round_pace.pass_step()

    def forget(self, sequence: RunningSequence) -> None:
        """Free the state of an ended sequence."""
        self.maker.forget(sequence)
        self._of_sequence.pop(sequence, None)
        self._last_kind.pop(sequence, None)

    def _chance(self, sequence: RunningSequence, kind: int) -> float:
        """Return the chance of a drafted token, from its sequence's rate and the rate of its kind."""
        every = self._of_kind[kind]
        records = self._of_sequence.get(sequence)
        own = records[kind] if records else _Record(_KEPT_OF_SEQUENCE)
        return (own.right + every.right / every.total) / (own.total + 1)

    def _lengths(
        self, reaches: Mapping[RunningSequence, tuple[int, int]], num_rows: int
    ) -> dict[RunningSequence, int]:
        """Return the lengths of drafts with the highest rate of tokens per second."""
        gains: list[tuple[float, int, RunningSequence]] = []
        tried: dict[RunningSequence, int] = {}
        for number, (sequence, (most, kind)) in enumerate(reaches.items()):
            chance = self._chance(sequence, kind)
            if chance < _LEAST_CHANCE:
                self._num_left_out[kind] += 1
                if self._num_left_out[kind] % _TRIED_OF == 0:
                    tried[sequence] = 1
            for length in range(1, most + 1):
                if chance**length < _LEAST_CHANCE:
                    break
                gains.append((chance**length, -number, sequence))
        # The chances of one sequence fall with the length, or stay equal: the first ones come first.
        gains.sort(key=lambda gain: gain[:2], reverse=True)
        best_rate, num_best = _MARGIN * self._rate(num_rows, num_rows), 0
        made, lengths = float(num_rows), defaultdict[RunningSequence, int](int)
        longest = 0
        for number, (chance, _, sequence) in enumerate(gains, 1):
            made += chance
            lengths[sequence] += 1
            longest = max(longest, lengths[sequence])
            rate = self._rate(made, num_rows + number, len(lengths), longest)
            if rate > best_rate:
                best_rate, num_best = rate, number
        chosen = defaultdict[RunningSequence, int](int)
        for _, _, sequence in gains[:num_best]:
            chosen[sequence] += 1
        return {**chosen, **tried}

    def _rate(self, num_tokens: float, num_rows: int, num_drafts: int = 0, longest: int = 0) -> float:
        """Return tokens per second; before any measurement as if all steps took equally long.

        Args:
            num_tokens: Expected number of tokens of a step.
            num_rows: Number of its rows.
            num_drafts: Number of its sequences with a draft.
            longest: Length of the longest draft.
        """
        seconds = self._pace.seconds(num_rows)
        if not seconds:
            return num_tokens
        return num_tokens / (seconds + longest * self._round_pace.seconds(num_drafts))
