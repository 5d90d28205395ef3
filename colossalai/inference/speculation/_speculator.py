"""Length of drafts: as many tokens as can be expected to pay, which may be none.

A guess is right with a chance that follows from how often guesses of its sequence and of its kind were
right; behind it, a further one only where it was. What a row more costs follows from how long steps of so
many rows took. So a step with R sequences and D guesses makes R + (sum of their chances) tokens in T(R + D)
seconds, and the guesses are taken, best first, that make this rate largest. One sequence pays for many
guesses where a step reads the weights for one row or for five; where arithmetic binds, hardly any does.

Whatever is chosen changes when a text comes, and not which: drafts change no draw.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from colossalai.inference.scheduling import RunningSequence
from colossalai.inference.speculation._drafts import DraftMaker

# A guess with a smaller chance is not computed: it is mostly a row for nothing, whatever rows cost.
_LEAST_CHANCE = 0.1
# Of so many guesses that were left out for that reason one is tried: the text may repeat from here on. Prime,
# so that among any number of sequences it is not always the same one's turn.
_TRIED_OF = 31
# By so much the rate with drafts has to be better than without: times of steps are known no better.
_MARGIN = 1.1
# What a record keeps of its counts at each new draft: it remembers about 10, or 50.
_KEPT_OF_SEQUENCE, _KEPT_OF_KIND = 0.9, 0.98


@dataclass
class _Record:
    """How often guesses were right, older ones counting less and less.

    Attributes:
        keeps: What is kept of the counts at each new entry.
        right: Number of right guesses.
        total: Number of guesses that could be judged: those up to the first wrong one.
    """

    keeps: float
    right: float = 0.0
    total: float = 0.0

    def note(self, num_right: int, num_judged: int) -> None:
        self.right = self.keeps * self.right + num_right
        self.total = self.keeps * self.total + num_judged


class RowPace:
    """How long steps take, by their number of rows.

    What is not known is taken to be better than it may be, so that it is tried: more rows to cost nothing,
    fewer to cost in proportion. What has not been seen for long is forgotten for the same reason.
    """

    _SHARE = 0.2  # of a new measurement in the running means
    _AGE = 512  # steps

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}  # by bucket: rows, seconds, when noted last
        self._num_passed = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Note how long a step of so many rows took."""
        self.pass_step()
        bucket = _bucket(num_rows)
        rows, mean, _ = self._means.get(bucket, (float(num_rows), seconds, 0))
        share = self._SHARE
        new = (rows + share * (num_rows - rows), mean + share * (seconds - mean), self._num_passed)
        self._means[bucket] = new

    def pass_step(self) -> None:
        """Let a step pass, and forget what was noted long before it."""
        self._num_passed += 1
        old = self._num_passed - self._AGE
        if any(each[2] <= old for each in self._means.values()):
            self._means = {key: each for key, each in self._means.items() if each[2] > old}

    def seconds(self, num_rows: int) -> float:
        """Return how long a step of so many rows takes; 0 where nothing is known."""
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
    """Return a number that close numbers of rows share: exact up to 15, then in steps of an eighth."""
    shift = max(num_rows.bit_length() - 4, 0)
    return num_rows >> shift << shift


class Speculator:
    """Asks a maker for drafts, as long as they pay.

    Args:
        maker: Makes them.
        num_tokens: Most tokens of a draft.
        clock: Seconds that only grow.

    Attributes:
        num_drafted: Drafted tokens that were computed.
        num_accepted: Those of them that became part of a text.
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
        self._round_pace = RowPace()  # of the maker: for a token more of so many sequences
        self._of_kind: defaultdict[int, _Record] = defaultdict(lambda: _Record(_KEPT_OF_KIND, 1.0, 2.0))
        self._of_sequence: dict[RunningSequence, defaultdict[int, _Record]] = {}
        self._last_kind: dict[RunningSequence, int] = {}
        self._num_left_out: defaultdict[int, int] = defaultdict(int)

    def drafts(
        self, room: Mapping[RunningSequence, int], num_rows: int
    ) -> Mapping[RunningSequence, Sequence[int]]:
        """Return drafts for the next step.

        Args:
            room: Most tokens that each sequence may be guessed on by, where that is more than none.
            num_rows: Rows of the step without drafts.
        """
        reaches = {
            sequence: self.maker.reach(sequence, min(most, self.num_tokens))
            for sequence, most in room.items()
        }
        lengths = self._lengths({each: reach for each, reach in reaches.items() if reach[0]}, num_rows)
        if not lengths:
            return {}
        # What is read of a prompt is read once, and tells nothing of the guesses that follow.
        is_usual = all(self.maker.lag(sequence) <= 1 + self.num_tokens for sequence in lengths)
        began = self._clock()
        found = self.maker.drafts(lengths)
        if is_usual:
            self._round_pace.note(len(lengths), (self._clock() - began) / max(lengths.values()))
        for sequence in found:
            self._last_kind[sequence] = reaches[sequence][1]
        return found

    def note_draft(self, sequence: RunningSequence, num_drafted: int, num_accepted: int) -> None:
        """Note how many tokens of the last draft of a sequence were computed, and how many were right."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        kind = self._last_kind[sequence]
        num_judged = min(num_accepted + 1, num_drafted)
        records = self._of_sequence.setdefault(sequence, defaultdict(lambda: _Record(_KEPT_OF_SEQUENCE)))
        for record in (records[kind], self._of_kind[kind]):
            record.note(num_accepted, num_judged)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """Note how long a step took that read no prompt."""
        self._pace.note(num_rows, seconds)
        self._round_pace.pass_step()

    def forget(self, sequence: RunningSequence) -> None:
        """Give back what is kept for a sequence that has ended."""
        self.maker.forget(sequence)
        self._of_sequence.pop(sequence, None)
        self._last_kind.pop(sequence, None)

    def _chance(self, sequence: RunningSequence, kind: int) -> float:
        """Return how likely a guess is right: as those of the sequence, and as one of all of this kind."""
        every = self._of_kind[kind]
        records = self._of_sequence.get(sequence)
        own = records[kind] if records else _Record(_KEPT_OF_SEQUENCE)
        return (own.right + every.right / every.total) / (own.total + 1)

    def _lengths(
        self, reaches: Mapping[RunningSequence, tuple[int, int]], num_rows: int
    ) -> dict[RunningSequence, int]:
        """Return the lengths of drafts that make the most tokens a second."""
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
        # Of one sequence the chances fall with the length, or are all the same: the first ones come first.
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
        """Return tokens per second; where nothing has been measured, as if all steps took equally long.

        Args:
            num_tokens: Tokens that a step can be expected to make.
            num_rows: Its rows.
            num_drafts: Sequences that have a draft in it.
            longest: Tokens of the longest draft.
        """
        seconds = self._pace.seconds(num_rows)
        if not seconds:
            return num_tokens
        return num_tokens / (seconds + longest * self._round_pace.seconds(num_drafts))
