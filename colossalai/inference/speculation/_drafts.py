"""Drafts of the tokens that come next, and prompt lookup, which finds them in the text itself.

A step that computes one token of a sequence computes a few more for little, where it is bound by reading the
weights. So somebody cheaper guesses tokens, and a step of the model draws at each of their places; what was
drawn before the first difference is taken (2211.17192). Drafts change no text: a place has the uniform number
that it has without a draft.

Prompt lookup (2304.04487) guesses that what followed the last few tokens before follows again: texts that
quote their prompt, code, tables and lists do that.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossalai.inference.scheduling import RunningSequence

_LONGEST_MATCH = 3


@dataclass(frozen=True)
class SpeculationWay:
    """Who makes drafts, and how long they are.

    Attributes:
        maker: "ngram" for the text itself, else a model: its folder.
        num_tokens: Most tokens of a draft.
        longest_match: Of "ngram", most tokens at the end of the text that are looked up.
    """

    maker: str
    num_tokens: int
    longest_match: int = _LONGEST_MATCH

    @classmethod
    def of(cls, text: str) -> "SpeculationWay":
        """Return what an option says.

        Args:
            text: "ngram:K", "ngram:K:N", or "FOLDER:K".

        Raises:
            ValueError: `text` is of another form, or K or N is less than 1.
        """
        forms = "'ngram:K', 'ngram:K:N' or 'FOLDER:K' with whole numbers K and N from 1, such as 'ngram:4'"
        maker, *numbers = text.split(":") if text.startswith("ngram:") else text.rsplit(":", 1)
        is_whole = all(number.isascii() and number.isdigit() and int(number) for number in numbers)
        if not maker or not is_whole or not 1 <= len(numbers) <= 2:
            raise ValueError(f"speculate={text!r}; it must be {forms}")
        return cls(maker, *map(int, numbers))


class DraftMaker(ABC):
    """Guesses the tokens that come next in sequences."""

    @abstractmethod
    def reach(self, sequence: RunningSequence, num_tokens: int) -> tuple[int, int]:
        """Return how many tokens it can guess for a sequence, and the kind of the guess.

        Guesses of one kind are right about equally often.

        Args:
            sequence: The sequence.
            num_tokens: Most tokens that are wanted.
        """

    def lag(self, sequence: RunningSequence) -> int:
        """Return how many tokens of a sequence it computes before it can guess."""
        return 0

    @abstractmethod
    def drafts(self, wanted: Mapping[RunningSequence, int]) -> Mapping[RunningSequence, Sequence[int]]:
        """Return guesses for sequences; one that is not there has none for now.

        Args:
            wanted: How many tokens for each, at least 1 and not more than `reach` has said.
        """

    @abstractmethod
    def forget(self, sequence: RunningSequence) -> None:
        """Give back what is kept for a sequence that has ended; nothing happens if there is nothing."""


class NgramIndex:
    """Where each run of up to N tokens was last followed by another token.

    Args:
        longest: N.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._next: dict[tuple[int, ...], int] = {}  # by a run of tokens: the position behind it
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what a text has grown by; it costs N look-ups a token.

        Args:
            tokens: The whole text; it begins with what has been read before.
        """
        # A run is noted with the token behind it: the end of the text is not found as its own beginning.
        for end in range(max(self._num_read, 1), len(tokens)):
            for length in range(1, min(self._longest, end) + 1):
                self._next[tuple(tokens[end - length : end])] = end
        self._num_read = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how long an end of the text has occurred before, and the position behind its last place.

        Args:
            tokens: The text, as it was read.
        """
        for length in range(min(self._longest, len(tokens) - 1), 0, -1):
            place = self._next.get(tuple(tokens[-length:]))
            if place is not None:
                return length, place
        return 0, len(tokens)


class NgramDrafts(DraftMaker):
    """Guesses that what followed the last tokens before follows again.

    Args:
        longest_match: Most tokens at the end of a text that are looked up; the kind of a guess is how many
            of them were found.
    """

    def __init__(self, longest_match: int = _LONGEST_MATCH) -> None:
        self._longest = longest_match
        self._indices: dict[RunningSequence, NgramIndex] = {}

    def reach(self, sequence: RunningSequence, num_tokens: int) -> tuple[int, int]:
        """Return all that is wanted, where an end of the text has occurred before."""
        length, _ = self._find(sequence)
        return num_tokens if length else 0, length

    def drafts(self, wanted: Mapping[RunningSequence, int]) -> Mapping[RunningSequence, Sequence[int]]:
        """Return what followed; where the text ends too soon, it goes on with what was guessed itself."""
        found = {}
        for sequence, num_tokens in wanted.items():
            length, place = self._find(sequence)
            if length:
                behind = sequence.tokens[place : place + num_tokens]
                # What repeats with a period shorter than the draft is guessed to go on so.
                found[sequence] = (behind * -(-num_tokens // len(behind)))[:num_tokens]
        return found

    def forget(self, sequence: RunningSequence) -> None:
        """Give back the index of a sequence."""
        self._indices.pop(sequence, None)

    def _find(self, sequence: RunningSequence) -> tuple[int, int]:
        index = self._indices.setdefault(sequence, NgramIndex(self._longest))
        index.read(sequence.tokens)
        return index.find(sequence.tokens)
