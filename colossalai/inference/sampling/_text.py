"""Incremental detokenization: the text of an answer while its tokens come, and the strings that end it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# [Note: Text of tokens that are still coming]
# The text of tokens is not the sum of their texts: a character may have several tokens, and the first token
# of a text may lose its space. So each new token is decoded with a window of tokens before it, and what the
# text of the window has become longer by is the new text. The window begins where a character did, has a text
# before the new token, and is short, so that a token costs the same late in an answer.
#
# What is not a whole character yet is decoded as replacement characters. A byte-level decoder makes one of an
# unfinished character, which is at the end then. A decoder with byte fallback makes one of each byte of the
# whole run of byte tokens that it is in, of characters before it, too, which have been given already. So
# replacement characters at the end are kept back, no more than three, as a character has at most three bytes
# before its last one; and where the text no longer begins with what was given, the window starts anew behind
# the last character that was whole.

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_PART = 3
"""Most bytes, and so tokens, of a character that is not finished."""
_WINDOW = 8
"""Tokens from which the window is shortened where a character ends, and to which where none does."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A stop string that has come.

    Attributes:
        text: The string.
        num_tokens: How many tokens the answer has: up to the one that completes the string.
    """

    text: str
    num_tokens: int


class TextStream:
    """The text of an answer.

    What `push` and `finish` return is, put together, `tokenizer.decode` of all tokens, however they are
    pushed, cut before the first stop string. One case differs: where a model writes bytes that are no text
    (or U+FFFD in bytes), a decoder with byte fallback also takes back characters of the bytes before them.
    Here they stay.

    Attributes:
        stopped: The stop string that has come, if any; tokens after it are not read.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        is_streamed: bool = True,
    ) -> None:
        """Begin an answer.

        Args:
            tokenizer: A tokenizer of transformers.
            stop: Strings that end the text.
            skip_special_tokens: Whether special tokens have no text.
            is_streamed: Whether `push` returns text. If not, it is decoded when it is asked for, in one go;
                with stop strings token by token nevertheless.
        """
        self.stopped: Stopped | None = None
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._special = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self._is_streamed = is_streamed
        self._collected: list[int] = []  # pushed, and not read yet
        self._num_tokens = 0  # read
        self._window: list[int] = []
        self._given = ""  # of the text of the window
        self._ends = [0]  # after how many tokens of the window a character ended
        self._held = ""  # what may be the beginning of a stop string
        self._pieces: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is certain by now and has not been returned yet."""
        self._collected.extend(token_ids)
        if not self._is_streamed and not self._stop:
            return ""
        new = self._read()
        return new if self._is_streamed else ""

    def finish(self) -> str:
        """Return the text that `push` has not returned; the answer has no further tokens."""
        if not self._num_tokens and not self._stop:
            text = self._decode(self._collected)
            if _REPLACEMENT not in text:
                self._num_tokens, self._collected, self._pieces = len(self._collected), [], [text]
                return text
        new = self._read()
        if self.stopped is None:
            rest = self._cut(self._decode(self._window)[len(self._given) :])
            if self.stopped is None:
                rest, self._held = rest + self._held, ""
            self._window, self._given, self._ends = [], "", [0]
            self._pieces.append(rest)
            new += rest
        return new if self._is_streamed else "".join(self._pieces)

    @property
    def text(self) -> str:
        """The text so far that is certain."""
        self._read()
        return "".join(self._pieces)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
        assert isinstance(text, str), text
        return text

    def _read(self) -> str:
        """Read what was collected, up to a stop string, and return its text."""
        pieces = []
        for token in self._collected:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            if token not in self._special and (new := self._step(token)):
                pieces.append(self._cut(new))
        self._collected.clear()
        new = "".join(pieces)
        self._pieces.append(new)
        return new

    def _step(self, token: int) -> str:
        """Return what a token adds to the text. See [Note: Text of tokens that are still coming]."""
        text = self._decode([*self._window, token])
        if self._given and text == self._given:
            return ""  # a token without text
        self._window.append(token)
        if not text.startswith(self._given):
            self._window, self._given, self._ends = self._window[self._ends[-1] :], "", [0]
            text = self._decode(self._window)
        new = text[len(self._given) :]
        num_held = min(_LONGEST_PART, len(new) - len(new.rstrip(_REPLACEMENT)))
        new = new[: len(new) - num_held]
        self._given += new
        if not num_held:
            self._ends.append(len(self._window))
            if len(self._window) > _WINDOW:
                self._shorten()
        elif len(self._window) > 2 * _WINDOW:
            self._window = self._window[-_WINDOW:]
            text = self._decode(self._window)
            self._given = text[: len(text) - num_held]
            self._ends = [_WINDOW - _LONGEST_PART]
        return new

    def _shorten(self) -> None:
        """Let the window begin at the last end of a character from which it has a text."""
        for end in self._ends[-2::-1]:
            if text := self._decode(self._window[end:]):
                self._window, self._given = self._window[end:], text
                self._ends = [0, len(self._window)]
                break

    def _cut(self, new: str) -> str:
        """Return what of the text is given: before a stop string, and before what may become one."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found, key=lambda one: one[0])
            self.stopped, self._held = Stopped(text=stop, num_tokens=self._num_tokens), ""
            return text[:place]
        for size in range(min(len(text), self._longest_stop - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text
