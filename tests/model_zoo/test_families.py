"""The families in one process: published sizes, a batch that is learnt, padding, what is refused."""

import pytest
import torch

from colossalai.model_zoo import bert, gpt, resnet, vit
from colossalai.registry import MODELS
from tests.model_zoo.tiny import build, criterion_of, make_batch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("build_model", "millions"),
    [
        (vit.vit_lite_patch4_32, 3.722),
        (vit.vit_small_patch16_224, 22.051),
        (vit.vit_base_patch16_224, 86.568),
        (vit.vit_base_patch32_224, 88.224),
        (vit.vit_large_patch16_224, 304.327),
        (vit.vit_huge_patch14_224, 632.046),
        (bert.bert_base, 109.514),
        (bert.bert_large, 335.175),
        (gpt.gpt2_small, 124.440),
        (gpt.gpt2_medium, 354.823),
        (gpt.gpt2_large, 774.030),
        (gpt.gpt2_xl, 1557.611),
        (gpt.gpt3, 174_604.259),
        (resnet.resnet18, 11.690),
        (resnet.resnet34, 21.798),
    ],
)
def test_published_sizes(build_model, millions):
    with torch.device("meta"):
        model = build_model()
    found = sum(param.numel() for param in model.parameters()) / 1e6
    assert found == pytest.approx(millions, abs=1e-3)
    if build_model not in (resnet.resnet18, resnet.resnet34):  # torchvision has these names
        assert MODELS.get_module(build_model.__name__) is build_model


@pytest.mark.parametrize("name", ["bert", "vit", "resnet"])
def test_learns_a_batch(name):
    torch.manual_seed(0)
    if name == "resnet":
        model = resnet.resnet18(num_classes=4, in_channels=1, small_input=True, width=4)
        criterion, inputs, labels = torch.nn.CrossEntropyLoss(), torch.randn(8, 1, 8, 8), torch.arange(8) % 4
    else:
        model, criterion = build(name, init_std=0.1), criterion_of(name)
        inputs, labels = make_batch(name, 4, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize(("small_input", "feature_size"), [(True, 32), (False, 8)])
def test_small_input_keeps_the_size_in_the_stem_of_a_resnet(small_input, feature_size):
    model = resnet.resnet18(num_classes=10, in_channels=1, small_input=small_input, width=4)
    images = torch.randn(2, 1, 32, 32)
    assert model.stem(images).shape == (2, 4, feature_size, feature_size)
    assert model(images).shape == (2, 10)


def test_bert_ties_the_head_to_the_embedding():
    model = build("bert")
    assert model.head.decoder.weight is model.embedding.tokens.weight
    assert "head.decoder.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_nobody_attends_to_padding(name):
    torch.manual_seed(0)
    model = build(name).eval()
    ids = torch.arange(6)[None]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    changed = ids.clone()
    changed[0, 0] = 9
    torch.testing.assert_close(model(ids, mask)[:, 2:], model(changed, mask)[:, 2:])
    assert not torch.allclose(model(ids)[:, 2:], model(changed)[:, 2:])


@pytest.mark.parametrize(
    ("build_config", "message"),
    [
        (lambda: vit.ViTConfig(image_size=30), "patch_size=16 does not divide image_size=30"),
        (lambda: vit.ViTConfig(num_classes=0), "num_classes=0"),
        (lambda: bert.BertConfig(num_attention_heads=5), "does not divide into 5 heads"),
        (lambda: bert.BertConfig(dropout=1.0), "dropout=1.0"),
        (lambda: gpt.GPTConfig(hidden_size=30, num_attention_heads=4), "does not divide into 4 heads"),
        (lambda: gpt.GPTConfig(num_layers=0), "num_layers=0"),
        (lambda: gpt.GPTConfig(dropout=1.0), "dropout=1.0"),
    ],
)
def test_impossible_shapes_are_refused(build_config, message):
    with pytest.raises(ValueError, match=message):
        build_config()


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="a sequence of 7 tokens, max_position_embeddings=6"):
        build("bert")(torch.zeros(1, 7, dtype=torch.long))
