"""Makers of drafts whose guesses are right as often as a test wants, and engines whose clock stands still."""

from random import Random

from colossalai.inference._llm import LLM
from colossalai.inference.speculation import DraftMaker, Speculator
from tests.inference.engine.setups import POOL, model
from tests.inference.models import VOCAB


class Oracle(DraftMaker):
    """Knows texts; each of its guesses is right with a probability.

    Args:
        known: Prompts with their answers, one behind the other.
        probability: Of a right guess.
    """

    def __init__(self, known, probability=1.0):
        self.known = [list(text) for text in known]
        self.probability = probability
        self.random = Random(0)
        self.forgotten = []

    def reach(self, sequence, num_tokens):
        return num_tokens, 0

    def drafts(self, wanted):
        return {sequence: self.guess(sequence.tokens, number) for sequence, number in wanted.items()}

    def guess(self, tokens, number):
        found = (text for text in self.known if text[: len(tokens)] == tokens)
        right = next(found, tokens)[len(tokens) : len(tokens) + number]
        is_right = self.random.random
        return [token if is_right() < self.probability else (token + 1) % VOCAB for token in right]

    def forget(self, sequence):
        self.forgotten.append(sequence)


def still():
    return 0.0


def speculating(family="Llama", maker=None, num_tokens=4, **options):
    """Return a model whose drafts depend on no clock: all rows cost nothing.

    Args:
        family: The model.
        maker: Who guesses; None for the one of `options`.
        num_tokens: Of its drafts.
        options: Of the engine.
    """
    options.setdefault("speculate", f"ngram:{num_tokens}")
    llm = LLM(options.pop("served", None) or model(family), **{"kv_memory": POOL} | options)
    engine = llm.engine
    if maker is not None:
        engine._speculator = Speculator(maker, num_tokens=num_tokens)
    engine._clock = engine._speculator._clock = still
    return llm
