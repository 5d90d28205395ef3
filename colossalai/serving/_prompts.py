"""Prompts: tokenization of texts and chats in threads, and texts of tokens for log-probabilities."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from queue import SimpleQueue
from typing import Any, TypeVar

from jinja2 import TemplateError

from colossalai.inference import ModelInfo, dialogue_text
from colossalai.serving._errors import ApiError

T = TypeVar("T")

Tokens = tuple[int, ...]

_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Prompts:
    """Tokenizer of the prompts of a server.

    A tokenizer of transformers changes its own state during encoding, and fails when two threads use it. So
    each thread has a copy; the engine's own one only decodes tokens.

    Args:
        tokenizer: The engine's tokenizer; None if the server exchanges tokens only.
        info: Name and limits of the served model.
        num_threads: Number of threads.
    """

    def __init__(self, tokenizer: Any, info: ModelInfo, num_threads: int) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="colossalai-serving-tokens")
        self._copies: SimpleQueue[Any] = SimpleQueue()
        for _ in range(num_threads if tokenizer is not None else 0):
            self._copies.put(deepcopy(tokenizer))
        self._texts: dict[int, str] = {}
        self._anchor = self._find_anchor()
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    async def from_texts(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize texts, with the special tokens of the tokenizer.

        Args:
            texts: The texts, none empty.

        Raises:
            ApiError: The server has no tokenizer, or a text is empty or longer than the window.
        """
        if not all(texts):
            raise ApiError(400, "prompt: it is empty; it must have at least one character", param="prompt")
        self._need_tokenizer("prompt", "send the prompt as token ids")
        found = await self._run(lambda tokenizer: [tokenizer(text)["input_ids"] for text in texts])
        return [self.fit(ids, "prompt") for ids in found]

    async def from_chat(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Tokenize a chat with the model's own template, up to the beginning of the assistant's message.

        Args:
            messages: The chat, each with a role and a text.

        Raises:
            ApiError: The tokenizer has no template, or the template rejects these messages, or they are
                longer than the window.
        """
        self._need_tokenizer("messages", "/v1/completions takes token ids")
        if not self.has_chat_template:
            raise ApiError(
                400,
                f"the tokenizer of {self._info.name!r} has no chat template, so messages cannot be written "
                "for it; use /generate with a history, or /v1/completions",
                param="messages",
                code="no_chat_template",
            )

        def encode(tokenizer: Any) -> Any:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them

        try:
            found = await self._run(encode)
        except (TemplateError, TypeError, ValueError) as error:
            why = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, why, param="messages") from error
        return self.fit(found, "messages")

    async def from_dialogue(self, turns: Sequence[tuple[str, str]], num_new: int) -> Tokens:
        """Tokenize the last turns of a dialogue, as many as leave room for an answer.

        Args:
            turns: Instructions and their responses, oldest first; the last response is empty.
            num_new: Maximum number of tokens of the answer.

        Raises:
            ApiError: The server has no tokenizer, the chat template rejects the dialogue, or its last
                instruction alone leaves no room.
        """
        self._need_tokenizer("history", "/v1/completions takes token ids")
        room = self._info.max_length - num_new

        def encode(tokenizer: Any, first: int) -> list[int]:
            text, has_special_tokens = dialogue_text(turns[first:], tokenizer)
            ids: list[int] = tokenizer(text, add_special_tokens=not has_special_tokens)["input_ids"]
            return ids

        def fitting(tokenizer: Any) -> list[int]:
            found = encode(tokenizer, 0)
            if len(found) <= room:
                return found
            # Fewer turns have fewer tokens, so a binary search finds the first turn.
            last = len(turns) - 1
            first = bisect_left(range(1, last), -room, key=lambda first: -len(encode(tokenizer, first))) + 1
            return encode(tokenizer, min(first, last))

        try:
            found = await self._run(fitting)
        except (TemplateError, TypeError, ValueError) as error:
            why = f"the model's chat template does not take this dialogue: {error}"
            raise ApiError(400, why, param="history") from error
        if len(found) > room:
            left = self._info.max_length - len(found)
            instead = f"ask for max_new_tokens={left} or fewer" if left > 0 else "ask for fewer tokens"
            raise ApiError(
                400,
                f"history: its last instruction alone is a prompt of {len(found)} tokens, and the window is "
                f"{self._info.max_length} tokens, of which {num_new} are for the answer; shorten it by "
                f"{len(found) - room} tokens, or {instead}",
                param="history",
                code="context_length_exceeded",
            )
        return self.fit(found, "history")

    def fit(self, token_ids: Sequence[int], param: str) -> Tokens:
        """Check that a prompt fits the model, and return it.

        Args:
            token_ids: The prompt.
            param: Name of the field in the request.

        Raises:
            ApiError: `token_ids` is empty, has a token outside the vocabulary, or fills the window.
        """
        if not token_ids:
            raise ApiError(400, f"{param}: it has no tokens; it must have at least one", param=param)
        vocab_size, window = self._info.vocab_size, self._info.max_length
        if len(token_ids) >= window:
            raise ApiError(
                400,
                f"{param}: it has {len(token_ids)} tokens, and the model's window is {window} tokens, one of "
                f"which must be left for the answer; send at most {window - 1}",
                param=param,
                code="context_length_exceeded",
            )
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400, f"{param}: there is no token {wrong}; tokens are from 0 to {vocab_size - 1}", param=param
            )
        return tuple(token_ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens without the special ones; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for special tokens their name; `token:7` without a tokenizer."""
        if token_id not in self._texts:
            self._texts[token_id] = self._find_text(token_id)
        return self._texts[token_id]

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Return the UTF-8 bytes of a token's text; None for a token that is part of a character."""
        text = self.token_text(token_id)
        return None if _HALF_A_CHARACTER in text else list(text.encode())

    def token_width(self, token_id: int) -> int:
        """Return the number of characters that a token adds to the answer's text."""
        return 0 if token_id in self._special else len(self.token_text(token_id))

    async def _run(self, function: Callable[[Any], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._with_tokenizer_copy, function
        )

    def _with_tokenizer_copy(self, function: Callable[[Any], T]) -> T:
        tokenizer = self._copies.get()
        try:
            return function(tokenizer)
        finally:
            self._copies.put(tokenizer)

    def _need_tokenizer(self, param: str, instead: str) -> None:
        if self._tokenizer is None:
            raise ApiError(400, f"{param}: this server has no tokenizer; {instead}", param=param)

    # Tokenizers of words drop the space before the first word of a text. So a token is decoded after an
    # anchor token, whose text is then cut off.
    def _find_anchor(self) -> Tokens:
        if self._tokenizer is None:
            return ()
        return self._with_tokenizer_copy(
            lambda tokenizer: tuple(tokenizer("a", add_special_tokens=False)["input_ids"][-1:])
        )

    def _find_text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token:{token_id}"
        before = self._tokenizer.decode(list(self._anchor))
        after: str = self._tokenizer.decode([*self._anchor, token_id])
        if not after.startswith(before):
            return str(self._tokenizer.decode([token_id]))
        return after[len(before) :]
