"""Structured output: masks of the tokens that a grammar allows next, by llguidance.

A JSON schema or a regular expression is compiled to a grammar, and a matcher tracks an answer through it.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from colossalai.inference._request import RequestRefused, Structure

_SPACES = r"[ \t\r\n]{0,64}"
"""White space between parts of a JSON text. Unbounded, a small model could continue it forever."""


class StructureMatcher:
    """State of an answer in its grammar."""

    def __init__(self, matcher: Any, end_token_ids: frozenset[int]) -> None:
        """Begin an answer; use `StructureCompiler.compile` to create matchers."""
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._num_ends = 0  # end tokens after the text, which are not passed to the grammar

    def mask(self) -> np.ndarray:
        """Return the mask of allowed next tokens: one bit for each, lowest bit first, in int32 words.

        End tokens are allowed where the text can end, and nothing else once it must end.
        """
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)

    def accept(self, token_id: int) -> bool:
        """Append the next token; return False without changes if the grammar does not allow it."""
        if token_id in self._end_token_ids:
            is_allowed = bool(self._matcher.is_accepting())
            self._num_ends += is_allowed
            return is_allowed
        if self._num_ends or self._matcher.validate_tokens([token_id]) == 0:
            return False
        taken = self._matcher.consume_token(token_id)
        assert taken, self._matcher.get_error()
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends:
            done = self._matcher.rollback(num_tokens - num_ends)
            assert done, self._matcher.get_error()

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and only an end token can follow."""
        return bool(self._num_ends or self._matcher.is_stopped())


class StructureCompiler:
    """Compiles grammars for one tokenizer, with a cache of the most recent ones; thread-safe."""

    def __init__(self, tokenizer: Any, *, end_token_ids: Sequence[int], num_kept: int = 64) -> None:
        """Set up; llguidance is loaded and the vocabulary read at the first structure.

        Args:
            tokenizer: A fast tokenizer of transformers.
            end_token_ids: Tokens that end an answer, allowed where the grammar can end.
            num_kept: Maximum number of cached grammars.
        """
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._num_kept = num_kept
        self._vocabulary: Any = None
        self._kept: OrderedDict[Structure, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structure: Structure) -> StructureMatcher:
        """Return a matcher at the beginning of an answer.

        Raises:
            RequestRefused: llguidance is missing; `tokenizer` is not a fast one, or has no end token; or
                `structure` is invalid or not supported by llguidance.
        """
        with self._lock:
            if structure in self._kept:
                self._kept.move_to_end(structure)
            else:
                self._kept[structure] = self._compile_grammar(structure)
                if len(self._kept) > self._num_kept:
                    self._kept.popitem(last=False)
            return StructureMatcher(self._kept[structure].deep_copy(), self._end_token_ids)

    def _compile_grammar(self, structure: Structure) -> Any:
        try:
            import llguidance  # an optional library
            from llguidance import hf
        except ImportError as error:
            raise RequestRefused(
                "structured output needs the library llguidance: pip install colossalai[structured]"
            ) from error
        if self._vocabulary is None:
            if not self._end_token_ids:
                raise RequestRefused(
                    "structured output needs a token that ends an answer; the model has none"
                )
            try:
                ends = sorted(self._end_token_ids)
                self._vocabulary = hf.from_tokenizer(self._tokenizer, eos_token=ends)
            except ValueError as error:
                raise RequestRefused(f"structured output with this tokenizer: {error}") from error
        try:
            if structure.kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    structure.source, defaults={"whitespace_pattern": _SPACES}
                )
            else:
                grammar = llguidance.LLMatcher.grammar_from_regex(structure.source)
        except ValueError as error:
            raise _structure_error(structure, str(error)) from error
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise _structure_error(structure, matcher.get_error())
        return matcher


def _structure_error(structure: Structure, reason: str) -> RequestRefused:
    what = {"json": "JSON schema", "regex": "regular expression"}[structure.kind]
    source = structure.source if len(structure.source) <= 80 else structure.source[:77] + "..."
    return RequestRefused(f"the {what} {source!r} cannot be followed: {' '.join(reason.split())[:300]}")
