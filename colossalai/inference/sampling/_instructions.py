"""Alpaca template: prompts of instructions and dialogues, in the format of the training data.

Training (`colossalai.chat.data`), serving and scripts share these texts, so the module is below all of them.
"""

from collections.abc import Sequence
from itertools import pairwise

_TASK = "Below is an instruction that describes a task"
_CONTEXT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."
_INSTRUCTION = "\n\n### Instruction:\n"
_RESPONSE = "\n\n### Response:"

Turns = Sequence[tuple[str, str]]
"""Instructions and their responses, oldest first; the last response is "" because it is still open."""

ALPACA_STOP = "\n### Instruction:"
"""Stop string for models that do not end their answers and write a next instruction."""


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """Return the prompt of an instruction in the format of the Alpaca data set.

    Args:
        instruction: The task.
        context: Input of the task; without it the prompt has no input section.
    """
    if not context.strip():
        return f"{_TASK}{_REQUEST}{_INSTRUCTION}{instruction}{_RESPONSE}"
    return f"{_TASK}{_CONTEXT}{_REQUEST}{_INSTRUCTION}{instruction}\n\n### Input:\n{context}{_RESPONSE}"


def dialogue_text(turns: Turns, tokenizer: object) -> tuple[str, bool]:
    """Return the prompt of a dialogue, and whether it contains the special tokens.

    A tokenizer with a chat template applies it, up to the beginning of the assistant's message. Otherwise the
    prompt has Alpaca's format: `alpaca_prompt` of the first instruction, then a section for each later one.

    Args:
        turns: The dialogue, at least one turn.
        tokenizer: A tokenizer of transformers.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = []
        for instruction, response in turns:
            messages += [{"role": "user", "content": instruction}, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
        return str(text), True
    text = alpaca_prompt(turns[0][0])
    for (_, response), (instruction, _) in pairwise(turns):
        text += f"{response}{_INSTRUCTION}{instruction}{_RESPONSE}"
    return text, False
