"""Embeddings of tokens and patches in every mode against torch's in one process."""

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.communication import ledger
from colossalai.nn.layer import restart
from colossalai.tensor import spec_of
from tests.nn.modes import (
    MODES,
    SUFFIXES,
    assert_small,
    by_case,
    compare,
    in_one_process,
    launch,
    run_in_turn,
    same_start,
    whole,
)
from tests.tiers import further

VOCAB, FEATURES = 16, 8


def tokens(mode, *, vocab_parallel, padding_idx):
    """Compare an embedding with torch's, over a batch that has every id, some of them twice."""
    kind = "VocabParallelEmbedding" if vocab_parallel else "Embedding"
    torch.manual_seed(2)
    twin = nn.Embedding(VOCAB, FEATURES, padding_idx)
    torch.manual_seed(2)
    layer = getattr(col_nn, f"{kind}{SUFFIXES[mode]}")(VOCAB, FEATURES, padding_idx)
    same_start(layer, twin)
    if padding_idx is not None:  # a row that was loaded from elsewhere need not be zero
        with torch.no_grad():
            twin.weight[padding_idx] = 7.0
            layer.weight.copy_(spec_of(layer.weight).slice_of(twin.weight))
    ids = torch.cat([torch.randperm(VOCAB), torch.randint(VOCAB, (8,))]).view(8, 3)
    return compare(layer, twin, ids, y_cut=layer.cut)


class TorchPatches(nn.Module):
    """What ViT puts in front of its blocks, in torch's own layers."""

    def __init__(self, image, patch, channels, features, *, flatten):
        super().__init__()
        convolution = nn.Conv2d(channels, features, patch, patch)
        self.weight, self.bias = convolution.weight, convolution.bias
        self.patch, self.flatten = patch, flatten
        if flatten:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, features))
            self.pos_embed = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, features))

    def forward(self, images):
        y = nn.functional.conv2d(images, self.weight, self.bias, stride=self.patch)
        if not self.flatten:
            return y
        y = y.flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(y), -1, -1), y], dim=1) + self.pos_embed


def patches(mode, *, flatten):
    torch.manual_seed(4)
    twin = TorchPatches(8, 4, 3, FEATURES, flatten=flatten)
    torch.manual_seed(4)
    layer = getattr(col_nn, f"PatchEmbedding{SUFFIXES[mode]}")(8, 4, 3, FEATURES, flatten=flatten)
    images = torch.randn(8, 3, 8, 8)
    return compare(layer, twin, images, y_cut=layer.cut, feature_dim=-1 if flatten else 1)


def all_cases(name):
    mode = launch(name)
    cases = {
        f"tokens, {vocab_parallel=}, {padding_idx=}": tokens(
            mode, vocab_parallel=vocab_parallel, padding_idx=padding_idx
        )
        for vocab_parallel in (False, True)
        for padding_idx in (None, 5, -1)
    }
    return by_case(
        cases | {f"patches, {flatten=}": patches(mode, flatten=flatten) for flatten in (True, False)}
    )


def initializers(name):
    """An initializer sees the whole weight, so its values do not depend on the mode."""
    mode = launch(name)

    def ramp(weight, fan_in, fan_out):
        assert (fan_in, fan_out) == (VOCAB, FEATURES)
        weight.copy_(torch.arange(weight.numel()).view_as(weight))

    kind = getattr(col_nn, f"VocabParallelEmbedding{SUFFIXES[mode]}")
    layer = kind(VOCAB, FEATURES, weight_initializer=ramp)
    ramp(wanted := torch.empty(VOCAB, FEATURES), VOCAB, FEATURES)
    assert torch.equal(whole(layer.weight, layer.weight), wanted)


def the_limit(name):
    """`col_nn.Embedding` cuts the vocabulary above the limit alone."""
    suffix = SUFFIXES[launch(name)]
    whole_rows = col_nn.Embedding(VOCAB, FEATURES, vocab_parallel_limit=VOCAB)
    cut_rows = col_nn.Embedding(VOCAB, FEATURES, vocab_parallel_limit=VOCAB - 1)
    assert type(whole_rows) is getattr(col_nn, f"Embedding{suffix}")
    assert type(cut_rows) is getattr(col_nn, f"VocabParallelEmbedding{suffix}")
    assert whole_rows.weight.shape[0] == VOCAB > cut_rows.weight.shape[0]


@pytest.mark.mesh
def test_ids_and_sizes_that_do_not_fit_are_refused_before_any_collective():
    with in_one_process("2d") as mode, ledger() as book:
        restart(mode)
        layer = col_nn.VocabParallelEmbedding2D(VOCAB, FEATURES)
        for id_ in (-1, VOCAB):  # in the part of the batch of one rank alone: all ranks say it
            ids = torch.zeros(8, 3, dtype=torch.int64)
            ids[7, 2] = id_
            for embedding in (layer, col_nn.Embedding2D(VOCAB, FEATURES)):
                with pytest.raises(
                    ValueError,
                    match=rf"Embedding2D got ids from {min(id_, 0)} to {max(id_, 0)}; .* has 16",
                ):
                    embedding(ids)
        with pytest.raises(
            ValueError, match=r"Embedding2D cuts dimension 0 of .* is 7, which the 2 ranks along col"
        ):
            layer(torch.zeros(7, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"the weight of Embedding2D: dimension 1 .* is 7, .* along row"):
            col_nn.Embedding2D(VOCAB, 7)
        with pytest.raises(ValueError, match=r"Embedding2D got padding_idx=16; .* has 16 entries"):
            col_nn.Embedding2D(VOCAB, FEATURES, 16)
        with pytest.raises(ValueError, match=r"Embedding1D needs a job launched with .*mode='1d'"):
            col_nn.Embedding1D(VOCAB, FEATURES)
        assert book.count() == 0


@pytest.mark.mesh
def test_images_that_do_not_fit_are_refused_before_any_collective():
    with in_one_process("2d") as mode, ledger() as book:
        restart(mode)
        layer = col_nn.PatchEmbedding2D(8, 4, 3, FEATURES)
        with pytest.raises(ValueError, match=r"PatchEmbedding2D got images of shape .* with \(3, 8, 8\)"):
            layer(torch.zeros(8, 3, 8, 4))
        with pytest.raises(ValueError, match=r"PatchEmbedding2D got images of shape .* with \(3, 8, 8\)"):
            layer(torch.zeros(8, 1, 8, 8))
        with pytest.raises(
            ValueError, match=r"PatchEmbedding2D cuts dimension 0 of .* is 5, which the 2 ranks along col"
        ):
            layer(torch.zeros(5, 3, 8, 8))
        with pytest.raises(ValueError, match=r"patches of 3 do not tile 8 pixels"):
            col_nn.PatchEmbedding2D(8, 3, 3, FEATURES)
        with pytest.raises(ValueError, match=r"the weight of PatchEmbedding2D: dimension 0 .* is 7"):
            col_nn.PatchEmbedding2D(8, 4, 3, 7)
        assert book.count() == 0


OF_ONE_MODE = {"1d": [initializers, the_limit], "3d": [initializers]}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["1d", "2d", *map(further, ("2.5d", "3d"))])  # 3d: tests/parity
def test_values_and_gradients(name):
    """And initializers, and the limit above which a vocabulary is cut."""
    errors, *_ = run_in_turn(MODES[name]["size"], name, all_cases, *OF_ONE_MODE.get(name, []))
    assert_small(errors)
