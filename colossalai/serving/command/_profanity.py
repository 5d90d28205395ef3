"""Profanity filter: replaces answers that contain words of a list, before a client receives one.

It wraps an engine as another `Service`, so it covers all routes, whole answers and streams.

[Note: words of an incomplete answer]
A word may arrive in pieces, so a possible beginning of a word is held back until it is decided. Texts are
compared letter by letter after NFKD and case folding, with white space as one space and without invisible
characters. A letter is complete only with the marks that follow it, so the last one waits where a mark could
follow. In a script with spaces only whole words match ("ass" does not match in "class"), which the next
letter decides; in Chinese, Japanese, Korean, Thai and similar scripts a word matches anywhere.
"""

import json
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from colossalai.inference import (
    Delta,
    EngineStats,
    Listener,
    Request,
    RequestRefused,
    Service,
    ServiceInFront,
)

REPLACEMENT = "The question or its answer has words that are not said here; please put it in other words."
"""Replacement for a rejected answer."""

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR")
_JAMO_INSIDE = range(0x1160, 0x1200)  # vowels and ends of decomposed Korean syllables


@dataclass
class _Node:
    """Node of the trie of words, one letter per edge."""

    following: "dict[str, _Node]" = field(default_factory=dict)
    is_end: bool = False


class ProfanityWords:
    """Trie of forbidden words and phrases.

    Args:
        words: The words; empty ones are ignored.

    Raises:
        ValueError: `words` has no non-empty word.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.root = _Node()
        for word in words:
            node = self.root
            for letter in " ".join(_fold(word).split()):
                node = node.following.setdefault(letter, _Node())
            node.is_end = node is not self.root
        if not self.root.following:
            raise ValueError("there is no word: give at least one")

    @classmethod
    def of_file(cls, path: str) -> Self:
        """Read a file with a word or phrase on each line, or with a JSON list of them.

        Raises:
            ValueError: `path` cannot be read, or has no word.
        """
        place = f"the profanity file {path}"
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            words = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
        except OSError as error:
            raise ValueError(f"{place}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(
                f"{place}: write a word or phrase on each line, in UTF-8, or a JSON list of them ({error})"
            ) from error
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f"{place}: the JSON list has an item that is not a text")
        try:
            return cls(words)
        except ValueError as error:
            raise ValueError(f"{place} is empty: write a word or phrase on each line") from error

    def are_in(self, text: str) -> bool:
        """Return whether a text contains one of the words."""
        scan = ProfanityScan(self)
        scan.push(text)
        scan.end()
        return scan.has_found


# See [Note: words of an incomplete answer].
class ProfanityScan:
    """Search for words in a text that arrives in pieces.

    Args:
        words: The trie of words.
    """

    def __init__(self, words: ProfanityWords) -> None:
        self.has_found = False
        self._root = words.root
        self._text = ""  # the part of the text that is still needed
        self._origin = 0  # offset of that part in the whole text
        self._said = 0  # offset up to which the text was returned
        self._next = 0  # offset of the first letter that was not matched
        self._before = ""  # the letter before that offset
        self._begun: list[tuple[_Node, int]] = []  # open matches: node of the trie, and offset of the word
        self._whole: list[int] = []  # offsets of words that end just before `_next`

    def push(self, piece: str) -> str:
        """Append a piece, and return the text that is safe to send; "" once a word was found."""
        self._text += piece
        end = self._origin + len(self._text)
        for place in range(self._next + 1, end):
            if not _is_mark(self._text[place - self._origin]):
                self._look(place)
        if end > self._next and self._may_continue():
            end = self._next
        return self._take(min([end, *self._whole, *(start for _, start in self._begun)]))

    def end(self) -> str:
        """End the text, and return the held back part; "" if a word was found."""
        end = self._origin + len(self._text)
        self._look(end)
        self.has_found = self.has_found or bool(self._whole)
        return self._take(end)

    def _take(self, end: int) -> str:
        if self.has_found:
            return ""
        said = self._text[self._said - self._origin : end - self._origin]
        self._said = end
        begin = min(end, self._next)  # the last letter, with its marks, may be sent before it is matched
        self._text, self._origin = self._text[begin - self._origin :], begin
        return said

    def _look(self, end: int) -> None:
        """Match the letter that ends at an offset."""
        start, self._next = self._next, max(end, self._next)
        for letter in _fold(self._text[start - self._origin : end - self._origin]):
            if letter == self._before == " ":
                continue
            if any(not self._continues_word(letter) for _ in self._whole):
                self.has_found = True
            reached = [(found, begin) for node, begin in self._begun if (found := node.following.get(letter))]
            if (found := self._root.following.get(letter)) and not self._continues_word(letter):
                reached.append((found, start))
            self._begun, self._before = reached, letter
            self._whole = [begin for node, begin in reached if node.is_end]

    def _continues_word(self, letter: str) -> bool:
        """Whether a letter continues the word of the previous letter."""
        return _continues(letter) or (_is_spaced(self._before) and _is_spaced(letter))

    def _may_continue(self) -> bool:
        """Whether the last letter, with marks that may follow, can belong to a word of the list."""
        first = _fold(self._text[self._next - self._origin])[:1]
        if not first or self._whole or any(first in node.following for node, _ in self._begun):
            return True
        return first in self._root.following and not self._continues_word(first)


def _fold(text: str) -> str:
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(
        " " if letter.isspace() else letter for letter in folded if unicodedata.category(letter) != "Cf"
    )


def _is_mark(letter: str) -> bool:
    """Whether a letter is a combining mark."""
    return unicodedata.combining(unicodedata.normalize("NFKD", letter)[0]) != 0


def _continues(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "M" or ord(letter) in _JAMO_INSIDE


def _is_spaced(letter: str) -> bool:
    """Whether a letter belongs to a script with spaces between words."""
    return letter.isalnum() and not unicodedata.name(letter, "").startswith(_UNSPACED)


class ProfanityFilter(ServiceInFront):
    """An engine with a filter for forbidden words.

    A request whose prompt contains one is answered without the engine. An answer that contains one is cut
    before it, with the finish reason "content_filter".

    Args:
        service: The engine.
        words: The forbidden words.

    Raises:
        ValueError: `service` has no tokenizer.
    """

    def __init__(self, service: Service, words: ProfanityWords) -> None:
        if service.tokenizer is None:
            raise ValueError(
                "a profanity file is for texts, and the model has no tokenizer: leave the file out"
            )
        super().__init__(service)
        self._words = words

    def submit(self, request: Request, listener: Listener) -> None:
        """Forward a request, or answer it at once if its prompt contains a forbidden word.

        Raises:
            RequestRefused: `request` cannot be served by this engine, or has log-probabilities, which name
                tokens.
            QueueFull: The queue has no room.
            EngineStopped: The engine has ended.
        """
        params = request.params
        if params.logprobs is not None or params.prompt_logprobs is not None:
            raise RequestRefused(
                "logprobs name the words that this server filters (--profanity-file); leave them out"
            )
        if not self._words.are_in(self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True)):
            self._service.submit(
                request, _FilterListener(self._service, self._words, request, listener).on_delta
            )
            return
        for index in range(params.n):
            listener(
                Delta(
                    request_id=request.request_id,
                    index=index,
                    text=REPLACEMENT,
                    finish_reason="content_filter",
                )
            )

    def stats(self) -> EngineStats:
        """Return the state of the engine."""
        return self._service.stats()

    def update_weights(self, path: str, *, in_flight: str) -> None:
        """Load new values; see `Service.update_weights`."""
        self._service.update_weights(path, in_flight=in_flight)


class _FilterListener:
    """Listener that forwards the deltas of a request without forbidden words.

    Args:
        service: The engine.
        words: The forbidden words.
        request: The request.
        listener: Listener of the request.
    """

    def __init__(self, service: Service, words: ProfanityWords, request: Request, listener: Listener) -> None:
        self._service, self._words, self._request, self._listener = service, words, request, listener
        self._begin()

    def _begin(self) -> None:
        self._scans = [ProfanityScan(self._words) for _ in range(self._request.params.n)]
        self._has_said = [False] * len(self._scans)
        self._num_open = len(self._scans)

    def on_delta(self, received: Delta | BaseException) -> None:
        """Forward a delta, up to the first forbidden word."""
        if isinstance(received, BaseException):
            self._listener(received)
            return
        if received.is_restart:
            self._begin()
            self._listener(received)
            return
        scan = self._scans[received.index]
        if scan.has_found:
            return
        text = scan.push(received.text)
        if received.finish_reason is not None:
            text += scan.end()
        if scan.has_found:
            gap = "\n\n" if self._has_said[received.index] else ""  # after text that was already sent
            received = replace(
                received, text=gap + REPLACEMENT, finish_reason="content_filter", stop_reason=None
            )
            text = received.text
        self._has_said[received.index] |= bool(text)
        self._num_open -= received.finish_reason is not None
        self._listener(replace(received, text=text))
        if scan.has_found and not self._num_open:
            # The engine may hold a lock in this thread, its own one, so another thread calls abort.
            threading.Thread(
                target=self._service.abort, args=(self._request.request_id,), daemon=True
            ).start()
