"""What the runs of the parity table train: models, batches, losses."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.nn.layer import restart
from colossalai.nn.layer.sequence_parallel import ring_attention, zigzag_positions
from colossalai.tensor import spec_of
from tests.model_zoo import tiny
from tests.parity.training import Batch, Task
from tests.shardformer import models

WIDTH, NUM_FEATURES = 7, 5


class Block(nn.Module):
    """A residual block whose width no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    """A stack of blocks between tied weights, with a frozen parameter.

    Args:
        num_blocks: How many there are.
    """

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(NUM_FEATURES, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.head.weight) * self.scale


def vectors(num_samples: int = 16, num_classes: int = NUM_FEATURES, num_steps: int = 3) -> list[Batch]:
    """Return batches of vectors and classes."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(num_samples, NUM_FEATURES, generator=generator),
            torch.randint(num_classes, (num_samples,), generator=generator),
        )
        for _ in range(num_steps)
    ]


NET = Task(
    build=Net,
    batches=vectors,
    optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01),
)
DEEP_NET = Task(build=partial(Net, 8), batches=vectors, optimizer=NET.optimizer)
"""Blocks enough for two chunks on each of four ranks."""


def rebuilt(build: Callable[[], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return `place` of a task whose layers are cut as they are built; they must start as the twin's."""
    return partial(_build_again, build)


def _build_again(build: Callable[[], nn.Module], twin: nn.Module) -> nn.Module:
    model = build()
    for name, param in model.named_parameters():
        spec = spec_of(param)
        found = param if spec is None else spec.whole(param.detach())
        assert torch.equal(found, twin.get_parameter(name)), name
    return model


def zoo(
    name: str, *, num_samples: int = 16, vocab: int = tiny.VOCAB, cuts_vocabulary: bool = True, **sizes: Any
) -> Task:
    """Return the task of a transformer of the zoo: "gpt", "bert" or "vit"."""
    if name != "vit":
        sizes = {"vocab_size": vocab, **sizes}
    limit = {"vocab_parallel_limit": 1 if cuts_vocabulary else None}
    return Task(
        build=partial(tiny.build, name, **sizes),
        place=rebuilt(partial(tiny.build, name, **limit, **sizes)),
        batches=partial(_zoo_batches, name, num_samples, vocab),
        criterion=partial(tiny.criterion_of, name),
        # Keys have a bias whose gradient is 0 but for rounding: Adam divides that by eps.
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
    )


def _zoo_batches(name: str, num_samples: int, vocab: int) -> list[Batch]:
    return [tiny.make_batch(name, num_samples, seed, vocab) for seed in range(3)]


SEQ = 16


def masked_zoo(name: str, num_samples: int = 4, **sizes: Any) -> Task:
    """Return the task of a transformer whose sequences have their own lengths: ranks can share them."""
    build = partial(tiny.build, name, max_position_embeddings=SEQ, vocab_parallel_limit=1, **sizes)
    return Task(
        build=build,
        place=rebuilt(build),
        batches=partial(_masked_batches, name, num_samples),
        criterion=partial(tiny.criterion_of, name),
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
    )


def masked_batch(name: str, seed: int, num_samples: int = 4) -> Batch:
    """Return ids, mask and labels; as many labels count in each sample, but not on each rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(tiny.VOCAB, (num_samples, SEQ), generator=generator)
    lengths = torch.tensor([SEQ, SEQ - 5, SEQ - 1, SEQ // 2]).repeat(num_samples // 4)
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    counts = torch.tensor([1, 2, 3, 5, 7])  # none of them in the last half
    labels = torch.full_like(ids, -100)
    labels[:, counts] = ids[:, counts]
    if name == "bert":
        ids = ids.index_fill(1, counts, 0)
    return ids, mask, labels


def _masked_batches(name: str, num_samples: int) -> list[Batch]:
    return [masked_batch(name, seed, num_samples) for seed in range(3)]


VOCAB, HIDDEN = 16, 8
TORCH = types.SimpleNamespace(
    Embedding=lambda *sizes, vocab_parallel_limit: nn.Embedding(*sizes),
    Linear=nn.Linear,
    LayerNorm=nn.LayerNorm,
)


class LayerBlock(nn.Module):
    """A residual block of the layers of a namespace, `torch.nn` or `colossalai.nn`."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(HIDDEN)
        self.up = layers.Linear(HIDDEN, 4 * HIDDEN)
        self.down = layers.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class LayerNet(nn.Module):
    """Tokens in, logits out, with the head's weight tied to the embedding's or not.

    Args:
        layers: The namespace of the layers.
        tied: Whether the head has the embedding's weight.
        cuts_vocabulary: Whether the vocabulary is cut.
    """

    def __init__(self, layers: Any, *, tied: bool, cuts_vocabulary: bool) -> None:
        super().__init__()
        limit = 1 if cuts_vocabulary else 10**6
        self.embedding = layers.Embedding(VOCAB, HIDDEN, vocab_parallel_limit=limit)
        self.blocks = nn.ModuleList(LayerBlock(layers) for _ in range(2))
        self.norm = layers.LayerNorm(HIDDEN)
        if layers is TORCH:
            self.head = nn.Linear(HIDDEN, VOCAB)
            if tied:
                self.head.weight = self.embedding.weight
        else:
            weight = self.embedding.weight if tied else None
            self.head = layers.Classifier(HIDDEN, VOCAB, weight, vocab_parallel_limit=limit)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def layer_net(*, tied: bool, cuts_vocabulary: bool) -> Task:
    """Return the task of a net of layers of `colossalai.nn`, whose twin has layers of torch."""
    options = {"tied": tied, "cuts_vocabulary": cuts_vocabulary}
    return Task(
        build=partial(_torch_layers, **options),
        place=partial(_layers_in_mode, options),
        batches=partial(tokens, VOCAB, 16, 3),
        criterion=partial(col_nn.CrossEntropyLoss, label_smoothing=0.1),
        loss=_smoothed_loss,
    )


def _torch_layers(**options: bool) -> nn.Module:
    return LayerNet(TORCH, **options)


def _layers_in_mode(options: dict[str, bool], twin: LayerNet) -> nn.Module:
    restart(gpc.tensor_mode)
    model = LayerNet(col_nn, **options)
    if options["tied"]:  # torch draws a weight for the head before it is tied, ours draws none
        with torch.no_grad():
            model.head.bias.copy_(spec_of(model.head.bias).slice_of(twin.head.bias))
    return _build_again(lambda: model, twin)


def _smoothed_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def tokens(vocab: int, num_samples: int, length: int, seed: int = 1) -> list[Batch]:
    """Return batches of ids and of other ids as labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(vocab, (num_samples, length), generator=generator) for _ in range(2))
        for _ in range(3)
    ]


NUM_IDS, NUM_HEADS = 5, 2


class RingBlock(nn.Module):
    """A causal pre-norm block; whole attention until it is given a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 3 * 12)
        self.out = nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.ring: Any = None
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.ring is None:
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        else:
            mixed = ring_attention(*heads, axis=self.ring, causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class RingNet(nn.Module):
    """Such blocks behind ids and their positions, as a user writes them who calls the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(NUM_IDS, 12), nn.Embedding(SEQ, 12)
        self.blocks = nn.ModuleList(RingBlock() for _ in range(2))
        self.head = nn.Linear(12, NUM_IDS)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def with_ring(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    """Give the blocks of a net the ranks that share its sequences, in the mode "sequence"."""
    for block in model.blocks:
        block.ring, block.dropout = gpc.axis(ParallelMode.SEQUENCE), dropout
    return model


def own_positions_of(batch: Batch) -> Batch:
    """Return the ids of this rank, their positions and their labels."""
    at = zigzag_positions(SEQ, gpc.axis(ParallelMode.SEQUENCE))
    return batch[0][:, at], at, batch[1][:, at]


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _token_loss() -> Callable[..., Tensor]:
    return token_loss


def _whole_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model(batch[0], torch.arange(SEQ)), batch[1])


RING = Task(
    build=RingNet,
    place=with_ring,
    batches=partial(tokens, NUM_IDS, 4, SEQ, 2),
    cut=own_positions_of,
    criterion=_token_loss,
    loss=_whole_token_loss,
    optimizer=partial(torch.optim.AdamW, lr=0.01),
)


def language(build: Callable[[], nn.Module], *, lazily: bool = False, **changes: Any) -> Task:
    """Return the task of a language model of transformers.

    Args:
        build: Returns the model.
        lazily: Whether the model of the ranks is built lazily.
        changes: Other fields of the task.
    """
    options: dict[str, Any] = {
        "batches": partial(_shifted_ids, models.VOCAB, 8, 6),
        "criterion": _language_loss,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "place": partial(_build_lazily, build) if lazily else None,
        "context": models.InDouble,
    }
    return Task(build=build, **{**options, **changes})


def _language_loss() -> Callable[..., Tensor]:
    return models.language_loss


def _shifted_ids(vocab: int, num_samples: int, length: int) -> list[Batch]:
    ids = torch.randint(vocab, (3, num_samples, length), generator=torch.Generator().manual_seed(1))
    return [(part, part.roll(-1, dims=1)) for part in ids]


def _build_lazily(build: Callable[[], nn.Module], twin: nn.Module) -> nn.Module:
    with LazyInitContext():
        return build()


def fused(build: Callable[[], nn.Module], vocab: int, *, is_rebuilt: bool = False) -> Task:
    """Return the task of a language model that computes its loss itself, in chunks; the twin's is whole."""
    return Task(
        build=build,
        place=rebuilt(build) if is_rebuilt else None,
        batches=partial(_ids_with_ignored_labels, vocab),
        criterion=None,
        loss=_loss_of_next_tokens,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
    )


def _ids_with_ignored_labels(vocab: int) -> list[Batch]:
    ids = torch.randint(vocab, (3, 16, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :, 2] = -100  # as many on each rank and in each microbatch
    return [*zip(ids, labels, strict=True)]


def _loss_of_next_tokens(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


UNEVEN_VOCAB = 21


def fused_gpt() -> nn.Module:
    """Return a GPT whose vocabulary is cut where there are tensor-parallel ranks, which do not divide it."""
    sizes = {"vocab_size": UNEVEN_VOCAB, "max_position_embeddings": 8, "hidden_size": 8}
    options = {"num_attention_heads": 2, "num_layers": 2, "init_std": 0.3, "vocab_parallel_limit": 8}
    return GPT(GPTConfig(**tiny.NO_DROPOUT, **sizes, **options))
