"""Common parts of both sides of `chat.py`: tokenizers, rows, models, and the reward of a model on sums.

This module imports neither colossalai nor TRL: the two sides run in separate environments.
"""

import argparse
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_NEW = 4  # tokens of an answer to a sum
MAX_NORM = 1.0  # of gradients
SUMS = string.digits + "+="
LETTERS = string.ascii_letters + string.digits + "+-*/=.,:;!?()[] "
"""Characters of the texts that only cost time: with padding and end 80 tokens, so that a random model ends
an answer after some 80 tokens."""

Row = dict[str, str]
Job = dict[str, Any]


def tokenizer(characters: str) -> Any:
    """Return a tokenizer with a token for each of some characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "</s>", *characters]
    inner = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def sums(split: str, *, num_train: int, seed: int) -> list[Row]:
    """Return all sums of two digits of a split, "train" or "test", as prompt and answer."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    chosen = pairs[:num_train] if split == "train" else pairs[num_train:]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in chosen]


def random_texts(names: Sequence[str], number: int, tokens: tuple[int, int], *, seed: int) -> list[Row]:
    """Return rows of random letters; the length of each named text is drawn from a range."""
    draw = random.Random(seed)
    return [
        {name: "".join(draw.choices(LETTERS, k=draw.randint(*tokens))) for name in names}
        for _ in range(number)
    ]


def llama(
    characters: str,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    seed: int,
    vocab: int | None = None,
) -> Any:
    """Return a random Llama with a token for each of some characters, and further tokens up to `vocab`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    made = tokenizer(characters)
    config = LlamaConfig(
        vocab_size=vocab or len(made),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    return LlamaForCausalLM(config)


def larger_llama(seed: int, *, layers: int = 6, vocab: int | None = None) -> Any:
    """Return a Llama of 5M parameters for timed steps: 6 layers, or 4 layers and 4,096 tokens."""
    return llama(LETTERS, hidden=256, layers=layers, intermediate=688, heads=4, seed=seed, vocab=vocab)


def base_of_sums(folder: str, *, steps: int, rate: float, num_train: int, seed: int) -> dict[str, float]:
    """Write a Llama of 0.3M parameters that is briefly trained on texts of the training sums.

    Returns:
        Its reward on the sums of each split.
    """
    model = llama(SUMS, hidden=160, layers=1, intermediate=428, heads=4, seed=seed)
    splits = {name: sums(name, num_train=num_train, seed=seed) for name in ("train", "test")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    draw = random.Random(seed)
    for _ in range(steps):
        ids, attended, labels = _texts(draw.choices(splits["train"], k=8))
        model(input_ids=ids, attention_mask=attended, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer(SUMS).save_pretrained(folder)
    return {name: sum_reward(model, rows) for name, rows in splits.items()}


@torch.no_grad()
def sum_reward(model: Any, rows: Sequence[Row]) -> float:
    """Return the mean probability of the exact answer at temperature 1."""
    was_training = model.training
    model.eval()
    ids, attended, labels = _texts(rows)
    logp = model(input_ids=ids, attention_mask=attended).logits[:, :-1].log_softmax(-1)
    model.train(was_training)
    given = logp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return float(torch.where(labels[:, 1:] >= 0, given, 0.0).sum(1).exp().mean())


def _texts(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, attention mask and labels of sums with their answers and an end, (batch, length)."""
    made = tokenizer(SUMS)
    texts = [each["prompt"] + each["answer"] + "</s>" for each in rows]
    given = made(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = given.input_ids.masked_fill(given.attention_mask == 0, -100)
    labels[:, : len(rows[0]["prompt"])] = -100  # all prompts have the same length
    return given.input_ids, given.attention_mask, labels


class Steps:
    """Record of the steps of a side: CPU times, rewards, and the curve of the held-out reward.

    Args:
        job: Settings of the run; "every" is the number of steps between evaluations of the held-out reward.
    """

    def __init__(self, job: Job) -> None:
        self._every = job.get("every")
        self._test = [] if self._every is None else sums("test", num_train=job["num_train"], seed=job["seed"])
        self.seconds: list[float] = []
        self.generating: list[float] = []
        self.tokens: list[int] = []
        self.rewards: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self._generating = 0.0
        self._last = time.process_time()

    def start(self, *, prepared: float = 0.0) -> None:
        """Begin the first step, and add the seconds of preparation to it."""
        self._last = time.process_time() - prepared

    def add_generation(self, seconds: float, tokens: int) -> None:
        """Record the generation time and the number of generated tokens in this step."""
        self._generating += seconds
        self.tokens.append(tokens)

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds from the time of this step."""
        self._last += seconds

    def end_step(self, model: Any, reward: float | None = None) -> None:
        """Record a step; evaluate the held-out reward every few steps, outside the timed region."""
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.generating.append(self._generating)
        self._generating = 0.0
        if reward is not None:
            self.rewards.append(reward)
        if self._every is not None and len(self.seconds) % self._every == 0:
            self.curve.append((len(self.seconds), sum_reward(model, self._test)))
        self._last = time.process_time()

    def figures(self, **more: Any) -> Job:
        """Return the record: medians without the first step, which includes setup; a mean of all steps."""
        counted = self.seconds[1:] or self.seconds
        figures = {
            "step_ms": 1e3 * statistics.median(counted),
            "whole_ms": 1e3 * statistics.mean(self.seconds),
            "generating_ms": 1e3 * statistics.median(self.generating[1:] or self.generating),
            "tokens": statistics.mean(self.tokens) if self.tokens else 0.0,
            "rewards": self.rewards,
            "curve": self.curve,
        }
        return figures | more


def letter_reward(answer: str) -> float:
    """Return the fraction of digits, a reward for random letters."""
    return sum(each in string.digits for each in answer) / max(len(answer), 1)


def run_job(parts: dict[str, Callable[[Job], Job]], description: str | None) -> None:
    """Run the job of a JSON file, and write its figures to a file next to it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("job", help="a JSON file")
    path = Path(parser.parse_args().job)
    job = json.loads(path.read_text())
    torch.set_num_threads(1)
    path.with_suffix(".told.json").write_text(json.dumps(parts[job["part"]](job)))
