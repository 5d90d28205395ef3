"""Chat data: rows of one format, read from a file or given."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, overload

from colossalai.chat.data._files import numbered, read_rows
from colossalai.chat.data._formats import ChatRow, ChatStage, RowFormat, recognize


class ChatData(Sequence[ChatRow]):
    """Rows of one format, for one stage of training.

    Args:
        rows: The rows, at least one.
        row_format: Their format.

    Attributes:
        stage: "sft", "preference" or "prompts".
        format: The name of the format, as in the table of `chat_data`.
    """

    def __init__(self, rows: Iterable[ChatRow], row_format: RowFormat) -> None:
        self._rows = tuple(rows)
        self.stage: ChatStage = row_format.stage
        self.format = row_format.name

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ChatRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ChatRow, ...]: ...

    def __getitem__(self, index: int | slice) -> ChatRow | tuple[ChatRow, ...]:
        return self._rows[index]

    def __repr__(self) -> str:
        return f"ChatData({len(self)} rows, stage={self.stage!r}, format={self.format!r})"


def chat_data(
    path_or_rows: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    stage: ChatStage | None = None,
    *,
    max_size: int | None = None,
    subset: str | None = None,
) -> ChatData:
    """Read the rows of a data set and recognize their stage.

    The first row determines the format, and all others must have it. Without a `stage` the formats are tried
    in this order; keys beyond those named stay in the rows.

    =============  =======================  ==========================================================
    stage          format                   keys
    =============  =======================  ==========================================================
    "preference"   prompt_pair              prompt, chosen, rejected: texts
    "preference"   dialogue_pair            chosen, rejected: texts with "Human:" and "Assistant:"
    "preference"   message_pair             chosen, rejected: messages; perhaps prompt
    "sft"          alpaca                   instruction, output, perhaps input
    "sft"          prompt_completion        prompt, completion
    "sft"          messages                 messages: a list of {role, content}
    "prompts"      alpaca                   instruction, perhaps input
    "prompts"      prompt                   prompt
    "prompts"      messages                 messages, of which the last answer is left out
    =============  =======================  ==========================================================

    Args:
        path_or_rows: A file with a JSON list, with a JSON object on each line, or in parquet; the name
            (owner/name) of a data set in the cache of the library `datasets`, whose train split is read; or
            the rows.
        stage: Stage of the rows. Default: recognized by their keys.
        max_size: Maximum number of rows to read.
        subset: Configuration of a data set in the cache. Default: its only one.

    Raises:
        ValueError: `path_or_rows` is not such a file or has no rows, a row fits no format or another one than
            the first, `max_size` is below 1, or there is a `subset` for a file or rows.
    """
    if max_size is not None and max_size < 1:
        raise ValueError(f"max_size={max_size}: give at least 1, or leave it out")
    is_path = isinstance(path_or_rows, str | os.PathLike)
    if subset is not None and not is_path:
        raise ValueError(f"subset={subset!r} is for data sets by name, and these are rows: leave it out")
    placed = read_rows(path_or_rows, subset) if is_path else numbered(path_or_rows)  # type: ignore[arg-type]
    rows: list[ChatRow] = []
    row_format: RowFormat | None = None
    for place, row in islice(placed, max_size):
        if row_format is None:
            row_format = recognize(row, place, stage)
        rows.append(row_format.read(row, place))
    if row_format is None:
        raise ValueError(
            f"{path_or_rows if is_path else 'the list of rows'}: it has no rows; give at least one"
        )
    return ChatData(rows, row_format)
