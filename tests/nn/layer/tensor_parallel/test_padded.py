"""Parameters that are padded so that the ranks divide them: what a rank holds, what others see."""

import pytest
import torch

import colossalai.nn as col_nn
from colossalai.context import Mesh
from colossalai.tensor import spec_of
from colossalai.tensor._padded import PaddedSpec, pad_to, padded_size
from tests.nn.modes import SUFFIXES, launch
from tests.ranks import run_ranks
from tests.tiers import further


@pytest.mark.unit
def test_the_size_with_padding():
    assert padded_size(50257, 4) == 50260
    assert padded_size(50260, 4) == 50260
    assert padded_size(5, 4, 6) == 12
    assert padded_size(5) == 5


@pytest.mark.unit
def test_the_slices_of_all_ranks_are_the_whole_and_zeros():
    whole = torch.arange(26.0).view(2, 13) + 1
    for stored_as, shape, dims, unpadded in [
        (None, (2, 16), ((), ("tp",)), (2, 13)),
        ((1, 0), (16, 2), (("tp",), ()), (13, 2)),
    ]:
        slices = []
        for rank in range(4):
            mesh = Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 4}, rank=rank)
            spec = PaddedSpec(shape, dims, mesh, stored_as, unpadded=unpadded)
            assert spec.whole_shape == (2, 13)
            slices.append(spec.slice_of(whole))
            with pytest.raises(ValueError, match=r"the global shape is \(2, 13\), not \(2, 16\)"):
                spec.slice_of(pad_to(whole, (2, 16)))
        together = torch.cat(slices, 1) if stored_as is None else torch.cat(slices, 0).t()
        assert torch.equal(together, pad_to(whole, (2, 16)))
        assert torch.equal(together[:, 13:], torch.zeros(2, 3))


def padded_layers(name):
    """Return what is wrong with an embedding and a classifier of 13 entries."""
    launch(name)
    embedding = getattr(col_nn, f"VocabParallelEmbedding{SUFFIXES[name]}")(13, 8)
    classifier = getattr(col_nn, f"VocabParallelClassifier{SUFFIXES[name]}")(8, 13)
    ids = torch.arange(16).clamp(max=12)
    logits = classifier(embedding(ids))
    logits[logits > float("-inf")].sum().backward()
    wrong = []
    for param in (embedding.weight, classifier.weight, classifier.bias):
        spec = spec_of(param)
        for tensor in (param.detach(), param.grad):
            if not torch.equal(spec.slice_of(spec.whole(tensor)), tensor):
                wrong.append("the padding is not zero")
    if embedding.weight.shape != classifier.weight.shape:
        wrong.append("the weight cannot be shared")
    with pytest.raises(ValueError, match="ids from 0 to 13; its vocabulary has 13"):
        embedding(torch.tensor([0, 13]).repeat(8))
    return wrong, int((logits == float("-inf")).sum()), logits.numel()


@pytest.mark.dist
@pytest.mark.parametrize(("name", "ranks"), [("1d", 2), further("2d", 4), further("2.5d", 8), ("3d", 8)])
def test_padding_stays_zero_and_its_logits_minus_infinity(name, ranks):
    wrong, padded, total = zip(*run_ranks(padded_layers, ranks, name), strict=True)
    assert not any(wrong)
    assert sum(total) - sum(padded) == 16 * 13
