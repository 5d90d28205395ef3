"""One token for each row: against a plain reference, in any company, by chi-square, at the edges."""

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from colossalai.inference import SamplingParams
from colossalai.inference.sampling._draws import (
    HAS_INFINITY,
    HAS_NAN,
    HAS_NO_TOKEN,
    Draws,
    accepted,
    draw_of,
    fresh_seed,
    uniform_of,
)
from colossalai.inference.sampling._sampling import draw_tokens, logprobs_of
from tests.inference.reference import is_drawn, probabilities
from tests.tiers import further

pytestmark = pytest.mark.unit

LAST = 1 - 2.0**-53
"""The largest uniform number."""


def words(allowed, vocab_size):
    """Return the bits of the allowed tokens as llguidance gives them."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def rounded(low, high):
    """Return numbers that keep logits either equal or clearly apart."""
    return st.integers(int(64 * low), int(64 * high)).map(lambda number: number / 64)


@st.composite
def params(draw, vocab_size, **fixed):
    """Return SamplingParams of which each field is at rest in half of the cases."""

    def maybe(rest, values):
        return draw(st.one_of(st.just(rest), values))

    tokens = st.integers(0, vocab_size - 1)
    return SamplingParams(
        **{
            "temperature": maybe(1.0, st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.7, 50.0])),
            "top_k": maybe(
                0, st.one_of(st.integers(-1, 8), st.integers(60, 70), st.integers(0, vocab_size + 3))
            ),
            "top_p": maybe(1.0, st.floats(0.01, 1)),
            "min_p": maybe(0.0, st.floats(0, 1)),
            "repetition_penalty": maybe(1.0, rounded(0.5, 2)),
            "presence_penalty": maybe(0.0, rounded(-2, 2)),
            "frequency_penalty": maybe(0.0, rounded(-2, 2)),
            "logit_bias": maybe({}, st.dictionaries(tokens, rounded(-100, 100), max_size=3)),
            "logprobs": maybe(None, st.integers(0, 6)),
            **fixed,
        }
    )


@st.composite
def batches(draw):
    """Return logits in float64 and rows of many settings, some with equal logits and -inf among them."""
    vocab_size = draw(st.sampled_from([2, 7, 64, 65, 127, 200, 256, 300, 1000, 30001]))
    num_rows = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(size=(num_rows, vocab_size)) * draw(st.sampled_from([0.0, 0.1, 1, 4, 20]))
    if draw(st.booleans()):
        logits = logits.round()  # many are equal
    logits[random.random(logits.shape) < draw(st.sampled_from([0, 0.3, 0.99]))] = -math.inf
    sure = random.integers(vocab_size)
    logits[:, sure] = 0.5
    rows = []
    for _ in range(num_rows):
        tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12)
        allowed = draw(st.one_of(st.none(), st.sampled_from([1, 2, vocab_size])))
        rows.append(
            {
                "params": draw(params(vocab_size)),
                "prompt_token_ids": draw(tokens),
                "answer_token_ids": draw(tokens),
                "uniform": draw(st.one_of(st.sampled_from([0.0, LAST]), st.floats(0, LAST))),
                "banned": set(draw(tokens)) - {sure},
                "allowed": None
                if allowed is None
                else {sure, *random.integers(vocab_size, size=allowed).tolist()},
            }
        )
    return logits, rows


def draws_of(rows, vocab_size):
    return Draws.of(
        [
            draw_of(
                row["params"],
                prompt_token_ids=row["prompt_token_ids"],
                answer_token_ids=row["answer_token_ids"],
                uniform=row["uniform"],
                banned=row["banned"],
                mask=None if row["allowed"] is None else words(row["allowed"], vocab_size),
            )
            for row in rows
        ]
    )


@settings(max_examples=25)
@given(batches())
def test_a_token_is_that_of_the_plain_reference(batch):
    check_tokens(*batch)


@pytest.mark.long
@settings(max_examples=300)
@given(batches())
def test_any_of_many_tokens_is_that_of_the_plain_reference(batch):
    check_tokens(*batch)


def check_tokens(logits, rows):
    drawn = draw_tokens(torch.from_numpy(logits), draws_of(rows, logits.shape[1]))
    for number, row in enumerate(rows):
        settings_ = {name: row[name] for name in row if name not in ("params", "uniform")}
        asked = row["params"]
        # Where a filter cuts exactly at a token, rounding says on which side.
        readings = [
            replace(asked, top_p=min(1, asked.top_p * slack), min_p=min(1, asked.min_p * slack))
            for slack in (1, 1 - 1e-11, 1 + 1e-11)
        ]
        fits = (
            is_drawn(
                int(drawn.token_ids[number]),
                probabilities(logits[number], reading, **settings_),
                row["uniform"],
            )
            for reading in readings
        )
        assert any(fits), (number, row, drawn.token_ids[number])


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=20)
@given(batches(), dtypes, st.data())
def test_a_row_alone_has_the_token_that_it_has_in_company(batch, dtype, data):
    check_company(batch, dtype, data)


@pytest.mark.long
@settings(max_examples=150)
@given(batches(), dtypes, st.data())
def test_any_of_many_rows_alone_has_the_token_that_it_has_in_company(batch, dtype, data):
    check_company(batch, dtype, data)


def check_company(batch, dtype, data):
    logits, rows = batch
    values, vocab_size = torch.from_numpy(logits).to(dtype), logits.shape[1]
    untouched = values.clone()
    together = draw_tokens(values, draws_of(rows, vocab_size))
    assert torch.equal(values, untouched)
    order = data.draw(st.permutations(range(len(rows))))
    some = order[: data.draw(st.integers(1, len(rows)))]
    apart = draw_tokens(values[some], draws_of([rows[number] for number in some], vocab_size))
    for place, number in enumerate(some):
        assert apart.token_ids[place] == together.token_ids[number]
        assert apart.logprobs_at(place) == together.logprobs_at(number)


@pytest.mark.parametrize(
    "setting", [{}, {"top_p": 0.9}, {"top_k": 700}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.01}]
)
def test_company_changes_no_bit_of_a_wide_row(setting):
    """With several threads a sum over one long row is divided among them, and one over many rows is not."""
    logits = torch.randn(8, 131_077, generator=torch.Generator().manual_seed(0))
    rows = [
        draw_of(
            SamplingParams(logprobs=3, **setting),
            prompt_token_ids=(),
            answer_token_ids=(),
            uniform=uniform_of(5, 0, n),
        )
        for n in range(8)
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        together = draw_tokens(logits, Draws.of(rows))
        alone = [draw_tokens(logits[n : n + 1], Draws.of(rows[n : n + 1])) for n in range(8)]
    finally:
        torch.set_num_threads(threads)
    assert [int(drawn.token_ids[0]) for drawn in alone] == together.token_ids.tolist()
    assert [drawn.logprobs_at(0) for drawn in alone] == [together.logprobs_at(n) for n in range(8)]


@pytest.mark.parametrize(
    "setting",
    [
        further({}),
        further({"temperature": 0.7}),
        further({"top_k": 5}),
        {"top_k": 80, "top_p": 0.95},
        further({"top_p": 0.8}),
        further({"min_p": 0.2}),
    ],
    ids=str,
)
def test_tokens_are_distributed_as_their_probabilities(setting):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))
    chances = probabilities(logits.double(), SamplingParams(**setting))
    rows = [
        draw_of(
            SamplingParams(**setting), prompt_token_ids=(), answer_token_ids=(), uniform=uniform_of(7, 0, n)
        )
        for n in range(20_000)
    ]
    drawn = draw_tokens(logits.expand(20_000, -1), Draws.of(rows))
    counts = np.bincount(drawn.token_ids, minlength=100)
    likely = chances > 0
    assert not counts[~likely].any()
    assert stats.chisquare(counts[likely], 20_000 * chances[likely]).pvalue > 1e-4


def one(logits, uniform=0.5, *, dtype=torch.float32, banned=(), **setting):
    """Return the token of one row."""
    row = draw_of(
        SamplingParams(**setting), prompt_token_ids=(), answer_token_ids=(), uniform=uniform, banned=banned
    )
    return int(draw_tokens(torch.tensor([logits], dtype=dtype), Draws.of([row])).token_ids[0])


@pytest.mark.parametrize("vocab_size", [3, 100, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-60},
        {"temperature": 1e-60, "top_k": 2},
    ],
    ids=str,
)
def test_a_filter_that_leaves_one_token_leaves_the_most_likely(setting, uniform, dtype, vocab_size):
    logits = [math.sin(token) for token in range(vocab_size)]
    logits[vocab_size - 2] = 3.0
    assert one(logits, uniform, dtype=dtype, **setting) == vocab_size - 2


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
@pytest.mark.parametrize(
    "setting", [{}, {"top_k": 3}, {"top_k": 90}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str
)
@pytest.mark.parametrize("place", [0, 63, 64, 999])
def test_a_token_that_alone_is_possible_is_drawn(place, setting, uniform):
    logits = [-math.inf] * 1000
    logits[place] = -3.0
    assert one(logits, uniform, **setting) == place


def test_equal_logits_share_the_line_in_order_and_filters_keep_the_smaller_ids():
    logits = [1.0] * 1000
    assert [one(logits, u) for u in (0.0, 0.2505, 0.5005, LAST)] == [0, 250, 500, 999]
    assert [one(logits, u, top_k=4) for u in (0.0, 0.25, 0.5, LAST)] == [0, 1, 2, 3]
    assert [one(logits, u, top_k=100) for u in (0.0, LAST)] == [0, 99]
    assert [one(logits, u, top_p=0.2499) for u in (0.0, LAST)] == [0, 249]
    assert one(logits, LAST, min_p=1.0) == 999
    assert one(logits, temperature=0) == 0


def test_a_token_of_probability_0_is_never_drawn():
    for logits in (
        [-math.inf, 0.0, -math.inf],
        [-1e3, 0.0, -1e3],
        [-math.inf] * 300 + [0.0] + [-math.inf] * 300,
    ):
        for setting in ({}, {"top_p": 0.999}, {"top_k": 2}):
            for uniform in (0.0, LAST):
                assert logits[one(logits, uniform, **setting)] == 0


@pytest.mark.parametrize("setting", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize(
    ("value", "what"),
    [(math.nan, HAS_NAN), (math.inf, HAS_INFINITY), (-math.inf, HAS_NO_TOKEN)],
)
@pytest.mark.parametrize("vocab_size", [4, 300])
def test_a_row_without_a_distribution_has_no_token_and_the_others_have_theirs(
    vocab_size, value, what, setting
):
    logits = torch.zeros(4, vocab_size)
    logits[1, 1] = value
    if value == -math.inf:
        logits[1] = value
    before = logits[1].clone().nan_to_num(nan=7.0)
    row = draw_of(SamplingParams(**setting), prompt_token_ids=(), answer_token_ids=(), uniform=0.5)
    greedy = draw_of(SamplingParams(temperature=0), prompt_token_ids=(), answer_token_ids=(), uniform=0.5)
    logits[0, 2], logits[2, 3] = 1.0, 1.0
    named = replace(row, num_top=2)
    drawn = draw_tokens(logits, Draws.of([greedy, named, greedy, named]))
    assert [drawn.failure_at(number) for number in range(4)] == [None, what, None, None]
    alone = draw_tokens(logits[[0, 2, 3]], Draws.of([greedy, greedy, named]))
    assert drawn.token_ids[[0, 2, 3]].tolist() == alone.token_ids.tolist()
    assert drawn.logprobs_at(3) == alone.logprobs_at(2)
    assert logits[1].nan_to_num(nan=7.0).equal(before)


def test_a_nan_is_found_under_a_mask_and_a_token_beyond_the_vocabulary_is_named():
    logits = torch.zeros(1, 40)
    logits[0, 3] = math.nan
    row = draw_of(
        SamplingParams(), prompt_token_ids=(), answer_token_ids=(), uniform=0.5, mask=words([5], 40)
    )
    assert draw_tokens(logits, Draws.of([row])).failure_at(0) == HAS_NAN
    with pytest.raises(ValueError, match="token 40 has a bias or a penalty; the vocabulary has 40 tokens"):
        one([0.0] * 40, logit_bias={40: 1.0})


def test_a_top_k_beyond_64_bits_keeps_all_tokens():
    logits = [0.1 * token for token in range(40)]
    for uniform in (0.0, 0.4, LAST):
        assert one(logits, uniform, top_k=10**400) == one(logits, uniform)


def test_tokens_that_the_mask_has_no_bits_for_are_not_drawn():
    row = draw_of(
        SamplingParams(), prompt_token_ids=(), answer_token_ids=(), uniform=LAST, mask=words(range(20), 32)
    )
    assert draw_tokens(torch.zeros(1, 100), Draws.of([row])).token_ids == [19]


def test_log_probabilities_are_those_of_the_model_before_anything_else():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = [
        draw_of(
            SamplingParams(temperature=0.3, top_k=2, logit_bias={7: 100.0}, logprobs=asked),
            prompt_token_ids=(),
            answer_token_ids=(),
            uniform=0.1,
        )
        for asked in (None, 0, 4)
    ]
    drawn = draw_tokens(logits, Draws.of(rows))
    expected = logits.double().log_softmax(-1)
    assert drawn.token_ids.tolist() == [7, 7, 7]
    assert drawn.logprobs_at(0) is None
    assert drawn.logprobs_at(1).top == ()
    last = drawn.logprobs_at(2)
    assert last.token_id == 7
    assert last.logprob == pytest.approx(float(expected[2, 7]), abs=1e-5)
    order = sorted(range(500), key=lambda token: (-float(expected[2, token]), token))[:4]
    assert [token for token, _ in last.top] == order
    assert [value for _, value in last.top] == pytest.approx(expected[2, order].tolist(), abs=1e-5)
    given_ = logprobs_of(logits, np.array([1, 2, 3]), np.array([2, -1, 0]))
    assert given_.logprobs_at(0).logprob == pytest.approx(float(expected[0, 1]), abs=1e-5)
    assert given_.logprobs_at(1) is None


def test_draws_and_what_was_drawn_travel_as_arrays():
    rows = [
        draw_of(
            SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, logit_bias={3: 2.0}, logprobs=2),
            prompt_token_ids=(1, 2),
            answer_token_ids=(2, 5, 5),
            uniform=0.3,
            mask=words(range(30), 40),
        ),
        draw_of(SamplingParams(), prompt_token_ids=(1,), answer_token_ids=(), uniform=0.9),
    ]
    draws = Draws.of(rows)
    again = Draws.from_arrays(
        {name: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for name, a in draws.arrays().items()}
    )
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3))
    drawn, once_more = draw_tokens(logits, draws), draw_tokens(logits, again)
    assert drawn.token_ids.tolist() == once_more.token_ids.tolist()
    assert type(drawn).from_arrays(drawn.arrays()).logprobs_at(0) == once_more.logprobs_at(0)


def test_uniform_numbers_are_uniform_independent_and_the_same_for_ever():
    assert uniform_of(0, 0, 0) == 0.9268996369025607  # a text of a seed stays what it is
    numbers = np.array(
        [
            [uniform_of(seed, choice, position) for position in range(1000)]
            for seed in (-(2**63), 0, 1, 2**64 - 1)
            for choice in (0, 1)
        ]
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    assert len(np.unique(numbers)) == numbers.size
    assert np.abs(np.corrcoef(numbers) - np.eye(8)).max() < 0.15
    assert abs(np.corrcoef(numbers[:, 1:].ravel(), numbers[:, :-1].ravel())[0, 1]) < 0.05
    assert fresh_seed() != fresh_seed()
    assert 0 <= uniform_of(fresh_seed(), 0, 0) < 1


def test_no_uniform_number_is_1(monkeypatch):
    ones = SimpleNamespace(digest=lambda: b"\xff" * 8)
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **options: ones)
    assert uniform_of(0, 0, 0) == LAST


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_drafted_tokens_are_taken_up_to_the_first_that_differs(drafted, drawn):
    count = accepted(drafted, drawn)
    assert list(drafted[:count]) == list(drawn[:count])
    assert count == min(len(drafted), len(drawn)) or drafted[count] != drawn[count]


def test_a_draft_changes_no_token_of_the_text():
    """A model by a table: its next logits depend on the last token; drafts are guessed by another seed."""
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(4)) * 2
    setting = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.3)

    def tokens_at(answer, draft):
        rows = [
            draw_of(
                setting,
                prompt_token_ids=(0,),
                answer_token_ids=(*answer, *draft[:n]),
                uniform=uniform_of(3, 0, len(answer) + n),
            )
            for n in range(len(draft) + 1)
        ]
        last = [(0, *answer, *draft[:n])[-1] for n in range(len(draft) + 1)]
        return draw_tokens(table[last], Draws.of(rows)).token_ids.tolist()

    plain, drafted, num_accepted = [], [], 0
    while len(plain) < 60:
        plain += tokens_at(plain, [])
    while len(drafted) < 60:
        draft = [int(table[(drafted or [0])[-1]].argmax()), 3, 5]
        drawn = tokens_at(drafted, draft)
        count = accepted(draft, drawn)
        num_accepted += count
        drafted += drawn[: count + 1]
    assert drafted[:60] == plain
    assert num_accepted > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_biases_and_bans_change_the_logits_in_their_order(temperature):
    """Seen through masks of two tokens: which of them is drawn, and from which number on."""

    def drawn(logits, uniform=0.5, answer=(), prompt=(), banned=(), **setting):
        row = draw_of(
            SamplingParams(temperature=temperature, **setting),
            prompt_token_ids=prompt,
            answer_token_ids=answer,
            uniform=uniform,
            banned=banned,
        )
        values = torch.full((1, 300), -1e9)
        values[0, :2] = torch.tensor(logits)
        return int(draw_tokens(values, Draws.of([row])).token_ids[0])

    def first_share(**given_):
        """Return the number up to which token 0 is drawn; 0 or 1 where the most likely one is taken."""
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if drawn(uniform=middle, **given_) == 0 else (low, middle)
        return low

    def expected(first, second):
        return 1 / (1 + math.exp(second - first)) if temperature else float(first > second)

    cases = [
        ({"repetition_penalty": 2.0, "prompt": (0,)}, (-1.0, -1.5), (-2.0, -1.5)),
        ({"repetition_penalty": 2.0, "answer": (0,)}, (2.0, 1.5), (1.0, 1.5)),
        ({"repetition_penalty": 2.0, "answer": (0, 0), "logit_bias": {0: 2.0}}, (-1.0, 0.75), (0.5, 0.75)),
        ({"presence_penalty": 0.5, "answer": (0, 0, 1), "prompt": (1, 1)}, (0.0, 0.25), (-0.5, -0.25)),
        ({"frequency_penalty": 0.5, "answer": (0, 0, 1), "prompt": (1, 1)}, (1.0, 0.75), (0.0, 0.25)),
        ({"logit_bias": {0: -1.0, 1: 0.5}}, (1.0, 0.25), (0.0, 0.75)),
    ]
    for given_, logits, result in cases:
        assert first_share(logits=logits, **given_) == pytest.approx(expected(*result), abs=1e-6), given_
    assert drawn((9.0, 0.0), banned=[0], logit_bias={0: 100.0}) == 1
