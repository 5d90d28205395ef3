"""Runs of chat methods under plans beside those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from colossalai.booster import Booster
from colossalai.chat import SFT, chat_data
from colossalai.chat.data import make_toy_data, make_toy_tokenizer
from tests.turns import run_each

TOLERANCE = 1e-10  # in float64

Cell = tuple[Any, ...]
Records = Sequence[Mapping[str, float]]


def without_times(records: Records) -> list[dict[str, float]]:
    """Return records without what depends on the machine."""
    times = ("seconds", "tokens_per_second")
    return [{key: value for key, value in each.items() if not key.startswith(times)} for each in records]


def beside_one_process(
    run: Callable[..., Any], cells: Sequence[Cell], num_ranks: int, alone_of: Callable[..., Cell]
) -> Iterator[tuple[Cell, Any, Any]]:
    """Yield each cell with what a rank returns, and what one process does; for each rank.

    Args:
        run: Called with the values of a cell on each rank; it launches.
        cells: What is run on ranks.
        num_ranks: How many there are.
        alone_of: Called with the values of a cell; returns those of the run in one process.
    """
    alone = {repr(cell := alone_of(*each)): cell for each in cells}
    expected = dict(zip(alone, run_each(1, run, alone.values()), strict=True))
    for cell, of_ranks in zip(cells, run_each(num_ranks, run, cells), strict=True):
        (wanted,) = expected[repr(alone_of(*cell))]
        for found in of_ranks:
            yield cell, found, wanted


def assert_same(
    found: Records,
    wanted: Records,
    what: object,
    *,
    is_left_out: Callable[[int, str, Mapping[str, float]], bool] = lambda place, key, other: False,
) -> None:
    """Compare records key by key; engine and trainer are one model, after each of its steps.

    Args:
        found: The records.
        wanted: Those of one process.
        what: The cell, for the message.
        is_left_out: Called with the place of a record, a key and the wanted record.
    """
    for place, (own, other) in enumerate(zip(found, wanted, strict=True)):
        assert own.keys() == other.keys()
        for key, value in own.items():
            # The gap is between sums in float32.
            allowed = 1e-6 if key.startswith("logprob_gap") else TOLERANCE
            is_close = math.isclose(value, other[key], rel_tol=TOLERANCE, abs_tol=allowed)
            assert is_close or is_left_out(place, key, other), f"{what}: {key} is {value}, not {other[key]}"
        assert own.get("logprob_gap_largest", 0.0) < 1e-5


def sorting_model() -> tuple[Any, Any, dict[str, Any]]:
    """Return a model that has learned to sort a little, its optimizer, and its booster and tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made, booster = make_toy_tokenizer(), Booster()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(made), bos_token_id=1, eos_token_id=2, **shape))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    given: dict[str, Any] = {"booster": booster, "tokenizer": made}
    texts = chat_data(make_toy_data("sort", 400, 0))
    SFT(max_length=32).fit(model, optimizer, data=texts, epochs=8, batch_size=4, **given)
    return model, optimizer, given
