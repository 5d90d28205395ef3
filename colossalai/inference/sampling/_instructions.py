"""Alpaca template: instructions, and dialogues of them, as the prompts that models are trained on.

Training writes the same words (`colossalai.chat.data`) as serving and scripts that ask, so they stand here,
below both.
"""

from collections.abc import Sequence
from itertools import pairwise

_TASK = "Below is an instruction that describes a task"
_CONTEXT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."
_INSTRUCTION = "\n\n### Instruction:\n"
_RESPONSE = "\n\n### Response:"

Turns = Sequence[tuple[str, str]]
"""Instructions and the responses to them, oldest first; the last one has none yet, so "" stands there."""

ALPACA_STOP = "\n### Instruction:"
"""Where a model that does not end its answer begins to ask itself."""


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """Return the prompt of an instruction in the words that the Alpaca data set is trained with.

    Args:
        instruction: What is to be done.
        context: What it is to be done with; a prompt without it has no section for it.
    """
    if not context.strip():
        return f"{_TASK}{_REQUEST}{_INSTRUCTION}{instruction}{_RESPONSE}"
    return f"{_TASK}{_CONTEXT}{_REQUEST}{_INSTRUCTION}{instruction}\n\n### Input:\n{context}{_RESPONSE}"


def dialogue_text(turns: Turns, tokenizer: object) -> tuple[str, bool]:
    """Return the prompt of a dialogue, and whether it names the special tokens itself.

    A tokenizer with a chat template writes it by that, up to where the assistant begins. For another one it
    is that of Alpaca: of one instruction `alpaca_prompt`, of more with a section for each that is before.

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
