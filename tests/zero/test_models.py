"""Models of Hugging Face transformers, built from configs, train under ZeRO as in one process."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import adamw, assert_same, plugin

pytestmark = pytest.mark.dist

VOCAB, LENGTH, BATCH = 16, 6, 4
SMALL = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(intermediate_size=16, **SMALL, **NO_DROPOUT))


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        intermediate_size=16, embedding_size=4, classifier_dropout_prob=0.0, **SMALL, **NO_DROPOUT
    )
    return AlbertForSequenceClassification(config)


def gpt2_double_heads() -> nn.Module:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    return GPT2DoubleHeadsModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, num_labels=1, **dropout
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, intermediate_size=16, num_labels=3, **config, **NO_DROPOUT)
    )


def tokens(step: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def masked_loss(model: nn.Module, ids: Tensor, step: int) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def label_loss(model: nn.Module, ids: Tensor, step: int) -> Tensor:
    return model(input_ids=ids, labels=ids[:, 0] % 2).loss


def double_loss(model: nn.Module, ids: Tensor, step: int) -> Tensor:
    """One head in every step, the other in every second one."""
    output = model(input_ids=ids[:, None], labels=ids[:, None])
    extra = output.mc_logits.square().mean() if step % 2 else 0.0
    return output.loss + extra


def image_loss(model: nn.Module, ids: Tensor, step: int) -> Tensor:
    images = torch.sin(torch.arange(3 * 64, dtype=torch.float64) * (1 + ids[:, :1])).view(-1, 3, 8, 8)
    return model(pixel_values=images, labels=ids[:, 0] % 3).loss


MODELS = {
    "bert": (bert, masked_loss),
    "albert": (albert, label_loss),
    "gpt2 double heads": (gpt2_double_heads, double_loss),
    "vit": (vit, image_loss),
}


def train(name: str, stage: int, recompute: bool) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    replicas = gpc.mesh.axis("dp")
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    twin = copy.deepcopy(model)
    plain = adamw(twin)
    booster = Booster(plugin=plugin(stage, recompute=recompute))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(3):
        plain.zero_grad()
        optimizer.zero_grad()
        loss_of(twin, tokens(step), step).backward()
        plain.step()
        ids = tokens(step).chunk(replicas.size)[replicas.rank]
        booster.backward(loss_of(model, ids, step), optimizer)
        optimizer.step()
        assert_same(model, twin, step, tolerance=1e-8)  # a loss is a mean over float32 masks in places
    gpc.destroy()


@pytest.mark.parametrize(
    ("name", "stage", "recompute"),
    [
        further("bert", 1, True),
        ("albert", 2, False),
        further("gpt2 double heads", 2, False),
        further("vit", 1, False),
    ],
)
def test_three_steps(name: str, stage: int, recompute: bool) -> None:
    run_ranks(partial(train, name, stage, recompute), 2)


def adapters(stage: int) -> None:
    """LoRA adapters of peft on a frozen GPT-2."""
    from peft import LoraConfig, get_peft_model

    colossalai.launch_from_torch({}, verbose=False)
    replicas = gpc.mesh.axis("dp")
    torch.manual_seed(0)
    base = gpt2_double_heads().transformer
    model = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.0, target_modules=["c_attn"])).double()
    twin = copy.deepcopy(model)
    plain = adamw(twin)
    booster = Booster(plugin=plugin(stage))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    for step in range(3):
        plain.zero_grad()
        optimizer.zero_grad()
        twin(input_ids=tokens(step)).last_hidden_state.square().mean().backward()
        plain.step()
        ids = tokens(step).chunk(replicas.size)[replicas.rank]
        booster.backward(model(input_ids=ids).last_hidden_state.square().mean(), optimizer)
        optimizer.step()
        assert_same(model, twin, step, tolerance=1e-8)
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, further(2)])
def test_adapters_of_peft(stage: int) -> None:
    pytest.importorskip("peft")
    run_ranks(adapters, 2, stage)
