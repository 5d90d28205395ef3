"""Length of drafts: what is computed follows from how often guesses are right, and from what rows cost."""

from dataclasses import replace

import pytest

from colossalai.inference import LLM, SamplingParams
from colossalai.inference.speculation import RowPace, Speculator
from tests.inference.engine.setups import GREEDY, POOL, expected, heard, model, texts
from tests.inference.models import MIXED, prompts
from tests.inference.speculation.makers import Oracle, speculating, still
from tests.inference.speculation.test_ngram import sequence_of
from tests.tiers import further

pytestmark = pytest.mark.unit

LONG = SamplingParams(max_tokens=200, temperature=0)


class Simulation:
    """A speculator whose steps take the time that a function says, over sequences that never end."""

    def __init__(self, num_sequences, seconds, probability, *, num_tokens=4, round_s=0.0):
        self.now = 0.0
        self.seconds, self.round_s, self.num_tokens = seconds, round_s, num_tokens
        self.maker = Oracle([], probability)
        self.maker.drafts = self.guess
        self.speculator = Speculator(self.maker, num_tokens=num_tokens, clock=lambda: self.now)
        self.sequences = [sequence_of([0]) for _ in range(num_sequences)]
        self.lengths = []

    def guess(self, wanted):
        self.now += self.round_s * max(wanted.values())
        return {sequence: [0] * number for sequence, number in wanted.items()}

    def run(self, num_steps):
        """Run steps; return the tokens per second."""
        began, num_made = self.now, 0
        self.lengths = []
        for _ in range(num_steps):
            room = dict.fromkeys(self.sequences, self.num_tokens)
            drafts = self.speculator.drafts(room, len(self.sequences))
            rows = len(self.sequences) + sum(map(len, drafts.values()))
            for sequence, draft in drafts.items():
                right = 0
                while right < len(draft) and self.maker.random.random() < self.maker.probability:
                    right += 1
                self.speculator.note_draft(sequence, len(draft), right)
                num_made += right
            num_made += len(self.sequences)
            self.now += self.seconds(rows)
            self.speculator.note_step(rows, self.seconds(rows))
            self.lengths.append(rows - len(self.sequences))
        return num_made / (self.now - began)


def reading_weights(rows):
    return 1.0


def arithmetic(rows):
    return 0.1 * rows


def core(rows):
    """Steps of a core: up to four rows cost what one does, then each costs its part."""
    return max(1.0, 0.25 * rows)


def test_drafts_are_long_where_rows_are_free_and_guesses_right():
    simulation = Simulation(4, reading_weights, 0.95)
    assert simulation.run(200) > 3 * 4
    assert sum(simulation.lengths[-50:]) > 50 * 4 * 3.5


@pytest.mark.parametrize("probability", [further(0.5), 0.9])
def test_no_drafts_where_a_row_costs_as_much_as_a_step_gives(probability):
    simulation = Simulation(16, arithmetic, probability)
    rate = simulation.run(2000)
    assert rate > 0.97 * 16 / arithmetic(16)
    # What is not known is tried, and again when it was not seen for long.
    assert 1 < sum(map(bool, simulation.lengths)) < 60


def test_the_same_maker_pays_for_one_sequence_and_not_for_sixteen():
    alone, many = Simulation(1, core, 0.6), Simulation(16, core, 0.6)
    assert alone.run(1000) > 1.5 * 1 / core(1)
    assert 0.95 < many.run(1000) / (16 / core(16)) < 1.05
    assert max(many.lengths[100:400]) == 0


def test_drafts_that_take_longer_than_they_save_end():
    quick, slow = (Simulation(1, reading_weights, 0.9, round_s=seconds) for seconds in (0.1, 1.0))
    assert quick.run(500) > 2
    assert slow.run(500) > 0.95
    assert sum(slow.lengths) < 50


def test_who_begins_to_repeat_is_found_again():
    simulation = Simulation(1, reading_weights, 0.0)
    simulation.run(500)
    assert sum(simulation.lengths) <= 500 / 31 + 4
    simulation.maker.probability = 1.0
    simulation.run(60)
    assert simulation.lengths[-1] == 4


def test_what_is_refused_of_one_sequence_takes_nothing_from_another():
    simulation = Simulation(2, reading_weights, 1.0)
    wrong, right = simulation.sequences
    for _ in range(200):
        drafts = simulation.speculator.drafts(dict.fromkeys(simulation.sequences, 4), 2)
        for sequence, draft in drafts.items():
            simulation.speculator.note_draft(sequence, len(draft), len(draft) * (sequence is right))
        simulation.speculator.note_step(2, 1.0)
    assert len(drafts[right]) == 4
    assert wrong not in drafts


def test_the_pace_between_and_beyond_what_was_measured():
    pace = RowPace()
    assert pace.seconds(3) == 0
    pace.note(4, 1.0)
    assert (pace.seconds(2), pace.seconds(4), pace.seconds(100)) == (0.5, 1.0, 1.0)
    pace.note(8, 3.0)
    assert (pace.seconds(6), pace.seconds(7), pace.seconds(9)) == (2.0, 2.5, 3.0)
    for _ in range(511):
        pace.note(8, 5.0)
    assert pace.seconds(8) == pytest.approx(5.0)
    assert pace.seconds(4) == pytest.approx(2.5)  # the measurement at 4 has been forgotten


@pytest.mark.long  # `make test` has the lengths of drafts that are never right, above
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_maker_that_is_always_wrong_costs_few_rows(num_requests):
    batch = prompts(*MIXED)[-num_requests:]
    whole = LLM(model("Llama"), kv_memory=POOL).generate(batch, LONG)
    right = [[*prompt, *output.token_ids] for prompt, output in zip(batch, whole, strict=True)]
    llm = speculating("Llama", Oracle(right, 0.0))
    for num_tokens in (LONG.max_tokens, 40, 40):
        found = texts(llm.generate(batch, replace(LONG, max_tokens=num_tokens)))
        assert found == [output.token_ids[:num_tokens] for output in whole]
    stats = llm.engine.stats()
    assert stats.accepted_draft_tokens == 0
    assert 0 < stats.draft_tokens < 0.1 * stats.generated_tokens


def test_a_prompt_is_read_as_without_drafts():
    """A long prompt among those who are answered takes as many steps as if nobody guessed."""
    steps = {}
    for maker in (None, Oracle([[*p, *t] for p, t in zip(prompts(*MIXED), expected("Llama"), strict=True)])):
        they = heard(max_tokens_per_step=24, max_running=4, speculate="ngram:8")
        if maker is None:
            they.engine._speculator = None
        else:
            they.engine._speculator = Speculator(maker, num_tokens=8, clock=still)
        they.engine._clock = still
        for number in (0, 2):
            they.submit(str(number), prompts(*MIXED)[number])
        while not they.tokens("2"):
            they.engine.step()
        they.submit("long", prompts(200)[0], SamplingParams(max_tokens=1, temperature=0))
        number = 0
        while not they.tokens("long"):
            they.engine.step()
            number += 1
        steps[maker is None] = number
        they.finish()
        assert they.tokens("0") == expected("Llama")[0]
    assert steps[True] == steps[False]


def test_what_is_kept_of_a_request_goes_with_it():
    llm = speculating("GPT2")
    llm.generate(prompts(*MIXED), replace(GREEDY, max_tokens=40))
    they = llm.engine._speculator
    assert they.num_drafted > 0
    assert not they._of_sequence
    assert not they._last_kind
    assert not they.maker._indices


def test_nothing_is_guessed_without_the_option():
    llm = LLM(model("GPT2"), kv_memory=POOL)
    llm.generate(prompts(*MIXED), GREEDY)
    assert llm.engine._speculator is None
    assert llm.engine.stats().draft_tokens == llm.engine.stats().accepted_draft_tokens == 0
