"""Models of Hugging Face transformers, built from configs, train under ZeRO as in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.training import Batch, Run, Task, check_runs, grouped_runs
from tests.shardformer.models import bert, language_loss, vit
from tests.tiers import further
from tests.zero.test_training import by_stage

pytestmark = pytest.mark.dist

VOCAB, LENGTH, BATCH = 16, 6, 4


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob")
    config = AlbertConfig(intermediate_size=16, embedding_size=4, **sizes, **dict.fromkeys(rates, 0.0))
    return AlbertForSequenceClassification(config)


def gpt2_double_heads() -> nn.Module:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    return GPT2DoubleHeadsModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, num_labels=1, **dropout
        )
    )


def adapters() -> nn.Module:
    """LoRA adapters of peft on a frozen GPT-2."""
    from peft import LoraConfig, get_peft_model

    base = gpt2_double_heads().transformer
    return get_peft_model(base, LoraConfig(r=2, lora_dropout=0.0, target_modules=["c_attn"]))


def batches() -> list[Batch]:
    """Return tokens, and for each sample whether the step is an odd one."""
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        found.append(
            (torch.randint(VOCAB, (BATCH, LENGTH), generator=generator), torch.full((BATCH,), step % 2))
        )
    return found


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return language_loss(model(batch[0]), batch[0])


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0][:, 0] % 2).loss


def double_loss(model: nn.Module, batch: Batch) -> Tensor:
    """One head in every step, the other in every second one."""
    ids, is_odd = batch
    output = model(input_ids=ids[:, None], labels=ids[:, None])
    extra = output.mc_logits.square().mean() if is_odd[0] else 0.0
    return output.loss + extra


def hidden_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0]).last_hidden_state.square().mean()


def run_of(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor], stage: int, **options: Any
) -> Run:
    task = Task(
        build=build,
        batches=batches,
        criterion=None,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
        tolerance=1e-8,  # a loss is a mean over float32 masks in places
    )
    return by_stage(task, stage, **options)


ROWS = [
    further(run_of(bert, token_loss, 1, recompute=True)),
    run_of(albert, label_loss, 2),
    further(run_of(gpt2_double_heads, double_loss, 2)),
    further(run_of(vit, token_loss, 1)),
]
OF_PEFT = [run_of(adapters, hidden_loss, 1), further(run_of(adapters, hidden_loss, 2))]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(ROWS))
def test_models_of_transformers(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(OF_PEFT))
def test_adapters_of_peft(num_ranks: int, runs: list[Any]) -> None:
    pytest.importorskip("peft")
    check_runs(num_ranks, runs)
