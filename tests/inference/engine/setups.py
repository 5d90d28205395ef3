"""Engines over tiny models, and listeners that note what they hear."""

from collections import defaultdict
from functools import cache

from colossalai.inference import Delta, Request, SamplingParams
from colossalai.inference._build import build_engine
from colossalai.inference._llm import LLM
from colossalai.inference._load import EngineOptions
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.tiny_tokenizers import byte_level

FAMILIES = ("Llama", "GPT2", "OPT", "Qwen3", "Bloom")
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
POOL = 2**22  # bytes; the models take 1 to 2 KiB a token


@cache
def model(family):
    return tiny(family)


@cache
def expected(family):
    """Return what `generate` answers to each prompt of the batch alone."""
    return [greedy(model(family), prompt, NUM_TOKENS) for prompt in prompts(*MIXED)]


def texts(outputs):
    return [output.token_ids for output in outputs]


def is_empty(engine):
    """Return whether nobody holds a block."""
    engine.scheduler.pool.check([])
    return not engine.has_work and not engine.scheduler.running and not engine.scheduler.waiting


def small_pool(family, num_tokens):
    """Return the bytes of so many tokens."""
    return (
        LLM(model(family), kv_memory=POOL, block_size=1).engine.executor.runner.bytes_per_block * num_tokens
    )


@cache
def speaker():
    """Return a model that speaks the tokens of a tokenizer, and that tokenizer."""
    tokenizer = byte_level()
    return tiny("Llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id), tokenizer


@cache
def speaking():
    return LLM(speaker()[0], tokenizer=speaker()[1], kv_memory=POOL)


PROMPT = "the quick brown fox"
SPOKEN = SamplingParams(max_tokens=24, seed=11, ignore_eos=True)


class RecordedDeltas:
    """What the listeners of requests hear, by request."""

    def __init__(self, engine):
        self.engine = engine
        self.deltas = defaultdict(list)
        self.errors = {}

    def submit(self, name, prompt, params=GREEDY, **more):
        def on_delta(heard):
            assert name not in self.errors, "it was heard of after its error"
            if isinstance(heard, Delta):
                before = [each for each in self.deltas[name] if each.index == heard.index]
                assert not any(each.finish_reason for each in before), "it was heard of after its end"
                self.deltas[name].append(heard)
            else:
                self.errors[name] = heard

        request = Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **more)
        self.engine.submit(request, on_delta)

    def finish(self):
        while self.engine.has_work:
            assert self.engine.step()

    def tokens(self, name, index=0):
        return tuple(t for each in self.deltas[name] if each.index == index for t in each.token_ids)

    def reasons(self, name):
        return sorted((each.index, each.finish_reason) for each in self.deltas[name] if each.finish_reason)


def heard(family="Llama", tokenizer=None, **options):
    return RecordedDeltas(build_engine(model(family), tokenizer, EngineOptions(kv_memory=POOL, **options)))
