"""What is trained here opens in transformers, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import load_reward_model, save_pretrained, with_value_head
from colossalai.core import global_context as gpc
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def write(folder: str, family: str, plan: str) -> list[float]:
    """Save a reward model and a causal one under a plan; return the rewards of two rows."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[plan]())
    values = with_value_head(causal(family)).eval()
    ids, mask = rows()
    rewards = values(ids, mask)[:, -1].tolist()  # the second row is compared where it has no filling
    rewards[1] = values(ids[1:, :5], mask[1:, :5])[0, -1].item()
    boosted, *_ = booster.boost(values)
    save_pretrained(boosted, f"{folder}/reward", booster=booster, tokenizer=tokenizer())
    boosted, *_ = booster.boost(causal(family))
    save_pretrained(boosted, f"{folder}/causal", booster=booster, tokenizer=tokenizer())
    gpc.destroy()
    return rewards


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = 2, 0
    return ids, mask


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        further("llama", "tp 2"),
        ("gpt2", "pp 2"),
        further("opt", "fsdp"),
        further("opt", "pp 2"),
        ("narrow opt", "tp 2"),  # whose head reads fewer features than the layers have
    ],
)
def test_folders_open_in_transformers(tmp_path: Path, family: str, plan: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    rewards = torch.tensor(run_ranks(write, 2, str(tmp_path), family, plan)[0], dtype=torch.float64)
    ids, mask = rows()
    own = load_reward_model(tmp_path / "reward").eval()
    assert own.score.weight.dtype == torch.float64
    both = own(ids, mask)
    torch.testing.assert_close(torch.stack([both[0, -1], both[1, 4]]), rewards)
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    theirs.config.pad_token_id = 2
    torch.testing.assert_close(theirs(ids, attention_mask=mask).logits[:, 0].double(), rewards)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "causal")
    assert type(opened) is type(causal(family))
    for (name, found), wanted in zip(opened.named_parameters(), causal(family).parameters(), strict=True):
        assert torch.equal(found, wanted), name
    text = "sum: 3+4=7"
    assert AutoTokenizer.from_pretrained(tmp_path / "causal")(text).input_ids == tokenizer()(text).input_ids
    with pytest.raises(ValueError, match="put a head on a causal model with with_value_head"):
        load_reward_model(tmp_path / "causal")


@pytest.mark.unit
def test_a_value_head_is_drawn_narrowly_and_needs_a_model_of_transformers() -> None:
    values = with_value_head(causal())
    assert values.score.weight.std().item() == pytest.approx(33**-0.5, rel=0.5)
    with pytest.raises(ValueError, match="Linear is not a causal language model of transformers"):
        with_value_head(torch.nn.Linear(2, 2))


@pytest.mark.unit
def test_a_value_head_is_not_put_on_what_is_no_plain_model() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    with pytest.raises(ValueError, match=r"PeftModel.* has adapters: put the value head on the base model"):
        with_value_head(get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"])))
    with pytest.raises(ValueError, match=r"opens by load_reward_model"):
        with_value_head(AutoModelForSequenceClassification.from_config(causal().config))
