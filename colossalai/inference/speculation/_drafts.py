"""Drafts of the next tokens, and prompt lookup, which finds them in the text itself.

If a step is bound by reading the weights, a few more tokens of a sequence cost little. So a cheap method
drafts tokens, a step of the model draws at each of their positions, and the drawn tokens before the first
difference are accepted (2211.17192). Drafts do not change the text: a position uses the same uniform number
with and without a draft.

Prompt lookup (2304.04487) drafts the tokens that followed the last few tokens at an earlier position: texts
that quote their prompt, code, tables and lists repeat themselves in this way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colossalai.inference.scheduling import RunningSequence

_LONGEST_MATCH = 3


@dataclass(frozen=True)
class SpeculationWay:
    """Method and length of drafts.

    Attributes:
        maker: "ngram" for prompt lookup, else the folder of a model.
        num_tokens: Maximum length of a draft.
        longest_match: For "ngram", maximum number of last tokens to look up.
    """

    maker: str
    num_tokens: int
    longest_match: int = _LONGEST_MATCH

    @classmethod
    def of(cls, text: str) -> "SpeculationWay":
        """Parse the option `speculate`.

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
    """Abstract: drafts the next tokens of sequences."""

    @abstractmethod
    def reach(self, sequence: RunningSequence, num_tokens: int) -> tuple[int, int]:
        """Return the possible length of a draft for a sequence, and its kind.

        Drafts of one kind are accepted about equally often.

        Args:
            sequence: The sequence.
            num_tokens: Maximum length.
        """

    def lag(self, sequence: RunningSequence) -> int:
        """Return the number of tokens of a sequence to compute before a draft."""
        return 0

    @abstractmethod
    def drafts(self, wanted: Mapping[RunningSequence, int]) -> Mapping[RunningSequence, Sequence[int]]:
        """Return drafts for sequences; a missing sequence has none for now.

        Args:
            wanted: Length of each draft, from 1 to the result of `reach`.
        """

    @abstractmethod
    def forget(self, sequence: RunningSequence) -> None:
        """Free the state of an ended sequence; does nothing without any."""


class NgramIndex:
    """Index of the last position after each run of up to N tokens.

    Args:
        longest: N.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._next: dict[tuple[int, ...], int] = {}  # position after each run of tokens
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Add the new tokens of a text; costs N look-ups per token.

        Args:
            tokens: The whole text, which begins with the tokens of earlier calls.
        """
        # A run is added with the token after it, so the end of the text does not match itself.
        for end in range(max(self._num_read, 1), len(tokens)):
            for length in range(1, min(self._longest, end) + 1):
                self._next[tuple(tokens[end - length : end])] = end
        self._num_read = len(tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest repeated end of the text, and the position after it last occurred.

        Args:
            tokens: The text, as passed to `read`.
        """
        for length in range(min(self._longest, len(tokens) - 1), 0, -1):
            place = self._next.get(tuple(tokens[-length:]))
            if place is not None:
                return length, place
        return 0, len(tokens)


class NgramDrafts(DraftMaker):
    """Prompt lookup: drafts the tokens that followed the last tokens at an earlier position.

    Args:
        longest_match: Maximum number of last tokens to look up; the number of matched tokens is the kind of
            a draft.
    """

    def __init__(self, longest_match: int = _LONGEST_MATCH) -> None:
        self._longest = longest_match
        self._indices: dict[RunningSequence, NgramIndex] = {}

    def reach(self, sequence: RunningSequence, num_tokens: int) -> tuple[int, int]:
        """Return the requested length if an end of the text has occurred before."""
        length, _ = self._find(sequence)
        return num_tokens if length else 0, length

    def drafts(self, wanted: Mapping[RunningSequence, int]) -> Mapping[RunningSequence, Sequence[int]]:
        """Return the tokens that followed; if the text ends too soon, the draft repeats them."""
        found = {}
        for sequence, num_tokens in wanted.items():
            length, place = self._find(sequence)
            if length:
                behind = sequence.tokens[place : place + num_tokens]
                # A repetition with a period shorter than the draft is continued.
                found[sequence] = (behind * -(-num_tokens // len(behind)))[:num_tokens]
        return found

    def forget(self, sequence: RunningSequence) -> None:
        """Free the index of a sequence."""
        self._indices.pop(sequence, None)

    def _find(self, sequence: RunningSequence) -> tuple[int, int]:
        index = self._indices.setdefault(sequence, NgramIndex(self._longest))
        index.read(sequence.tokens)
        return index.find(sequence.tokens)
