"""Incremental detokenization: the text of an answer as its tokens arrive, and its stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# [Note: text of an incomplete answer]
# The text of tokens is not the sum of their texts: a character can have several tokens, and the first token
# of a text can lose its space. So each new token is decoded with a window of tokens before it, and the new
# text is the growth of the window's text. The window begins at the end of a character, has a text before the
# new token, and is short, so that the cost of a token does not grow with the answer.
#
# Incomplete characters are decoded as replacement characters. A byte-level decoder returns one for an
# unfinished character, at the end of the text. A decoder with byte fallback returns one for each byte of a
# run of byte tokens, including earlier characters that have been returned already. So replacement characters
# at the end are held back, at most three, as a character has at most three bytes before its last one; and if
# the text no longer begins with the returned part, the window restarts after the last complete character.

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_PART = 3
"""Maximum number of bytes, and so of tokens, of an incomplete character."""
_WINDOW = 8
"""Length at which the window is cut at the end of a character, and to which it is cut without one."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A stop string found in an answer.

    Attributes:
        text: The string.
        num_tokens: Number of tokens of the answer up to the end of the string.
    """

    text: str
    num_tokens: int


class TextStream:
    """Incremental text of an answer.

    The concatenated results of `push` and `finish` equal `tokenizer.decode` of all tokens, cut before the
    first stop string, for any sequence of calls. One case differs: if a model writes invalid bytes (or U+FFFD
    in bytes), a decoder with byte fallback also retracts characters of the bytes before them. Here they
    remain.

    Attributes:
        stopped: The stop string found, if any; tokens after it are ignored.
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
            is_streamed: Whether `push` returns text. If not, it is decoded at once on demand, or token by
                token with stop strings.
        """
        self.stopped: Stopped | None = None
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._special = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self._is_streamed = is_streamed
        self._collected: list[int] = []  # pushed tokens not yet decoded
        self._num_tokens = 0  # number of decoded tokens
        self._window: list[int] = []
        self._given = ""  # returned part of the window's text
        self._ends = [0]  # numbers of tokens of the window after which a character ended
        self._held = ""  # possible beginning of a stop string
        self._pieces: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the new text that is certain."""
        self._collected.extend(token_ids)
        if not self._is_streamed and not self._stop:
            return ""
        new = self._read()
        return new if self._is_streamed else ""

    def finish(self) -> str:
        """End the answer, and return the text that `push` has not returned."""
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
        """The certain text so far."""
        self._read()
        return "".join(self._pieces)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
        assert isinstance(text, str), text
        return text

    def _read(self) -> str:
        """Decode the pending tokens, up to a stop string, and return their text."""
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
        """Return the new text of a token. See [Note: text of an incomplete answer]."""
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
        """Move the beginning of the window to the last end of a character that leaves some text."""
        for end in self._ends[-2::-1]:
            if text := self._decode(self._window[end:]):
                self._window, self._given = self._window[end:], text
                self._ends = [0, len(self._window)]
                break

    def _cut(self, new: str) -> str:
        """Return the text before a stop string or before a possible beginning of one."""
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
