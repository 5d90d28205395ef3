"""The Evoformer: order of its layers, masks, precision, and training with and without parallel methods."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster.plugin import GeminiPlugin
from colossalai.model_zoo.evoformer import Evoformer, EvoformerConfig
from tests.parity.tasks import Batch
from tests.parity.training import Run, Task, check_runs

BATCH, SEQUENCES, RESIDUES = 2, 3, 5
SMALL = EvoformerConfig(
    c_m=8,
    c_z=6,
    num_blocks=2,
    msa_heads=2,
    msa_head_dim=4,
    pair_heads=2,
    pair_head_dim=3,
    outer_dim=3,
    triangle_dim=5,
    transition_factor=2,
)


def drawn(model: nn.Module) -> nn.Module:
    """Give all parameters random values, as new blocks are the identity."""
    for param in model.parameters():
        nn.init.normal_(param, std=0.4)
    return model


def small(**options: object) -> Evoformer:
    torch.manual_seed(0)
    model = Evoformer(SMALL, **options).double().eval()
    drawn(model)
    return model


def inputs(residues: int = RESIDUES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    msa = torch.randn(BATCH, SEQUENCES, residues, SMALL.c_m, generator=generator, dtype=torch.float64)
    pair = torch.randn(BATCH, residues, residues, SMALL.c_z, generator=generator, dtype=torch.float64)
    return msa, pair


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.unit
def test_the_documented_model() -> None:
    with torch.device("meta"):
        model = Evoformer(c_m=256, c_z=128, num_blocks=48)
    assert model.config == EvoformerConfig()
    assert sum(param.numel() for param in model.blocks[0].parameters()) == 1_829_952
    with pytest.raises(TypeError, match="num_layers"):
        Evoformer(num_layers=3)
    with pytest.raises(ValueError, match="msa_heads is 0; it must be positive"):
        Evoformer(msa_heads=0)


@pytest.mark.unit
@pytest.mark.parametrize("is_multimer", [False, True])
@pytest.mark.parametrize("is_global", [False, True])
def test_order_of_layers(is_multimer: bool, is_global: bool) -> None:
    """The outer product mean follows the layers of the alignment, or comes first (multimer)."""
    block = small(is_multimer=is_multimer, is_global=is_global).blocks[0]
    msa, pair = inputs()
    found = block(msa, pair)
    if is_multimer:
        pair = pair + block.outer_product_mean(msa)
    msa = msa + block.row_attention(msa, pair)
    msa = msa + block.column_attention(msa)
    msa = msa + block.msa_transition(msa)
    if not is_multimer:
        pair = pair + block.outer_product_mean(msa)
    for layer in (block.outgoing, block.incoming, block.starting, block.ending, block.pair_transition):
        pair = pair + layer(pair)
    check(found[0], msa)
    check(found[1], pair)


@pytest.mark.unit
@pytest.mark.parametrize("options", [{}, {"is_global": True}, {"is_multimer": True}])
def test_padding_has_no_effect(options: dict[str, bool]) -> None:
    """Positions that do not exist, in any number and with any values, change no other position."""
    model = small(**options)
    msa, pair = inputs()
    exists = torch.ones(BATCH, SEQUENCES, RESIDUES)
    pairs_exist = torch.ones(BATCH, RESIDUES, RESIDUES)
    wanted = model(msa, pair, exists, pairs_exist)
    for own, other in zip(wanted, model(msa, pair), strict=True):
        check(own, other)
    pad = partial(nn.functional.pad, mode="constant")
    found = model(
        pad(msa, (0, 0, 0, 3, 0, 2), value=7.0),
        pad(pair, (0, 0, 0, 3, 0, 3), value=-9.0),
        pad(exists, (0, 3, 0, 2)),
        pad(pairs_exist, (0, 3, 0, 3)),
    )
    check(found[0][:, :SEQUENCES, :RESIDUES], wanted[0])
    check(found[1][:, :RESIDUES, :RESIDUES], wanted[1])


@pytest.mark.unit
def test_low_precision() -> None:
    model = small()
    wanted = model(*inputs())
    found = model.bfloat16()(*(x.bfloat16() for x in inputs()))
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own - other).norm() < 0.03 * other.norm()


@pytest.mark.unit
def test_dropout_of_a_training_block() -> None:
    """Each dropout has the probability of the config, and none is applied in evaluation."""
    model = small(msa_dropout=0.5, pair_dropout=0.0)
    msa, pair = inputs()
    assert torch.equal(model(msa, pair)[1], model(msa, pair)[1])
    block = model.train().blocks[0]
    assert (block.msa_dropout.p, block.row_dropout.p, block.column_dropout.p) == (0.5, 0.0, 0.0)
    assert (block.msa_dropout.dim, block.row_dropout.dim, block.column_dropout.dim) == (1, 1, 2)
    called = []
    dropouts = (block.msa_dropout, block.row_dropout, block.column_dropout)
    for module in (*block.children(),):
        module.register_forward_hook(lambda module, args, output: called.append(module))
    assert not torch.equal(block(msa, pair)[0], block(msa, pair)[0])
    order = [
        (called[i - 1], module) for i, module in enumerate(called[: len(called) // 2]) if module in dropouts
    ]
    layers = (block.row_attention, block.outgoing, block.incoming, block.starting, block.ending)
    row = block.row_dropout
    assert order == [*zip(layers, (block.msa_dropout, row, row, row, block.column_dropout), strict=True)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda msa, pair: (msa[0], pair),
            r"msa has the shape \(3, 5, 8\); it must be \(batch, sequences, residues, 8\)",
        ),
        (
            lambda msa, pair: (msa, pair[:, :4]),
            r"pair has the shape \(2, 4, 5, 6\); it must be \(2, 5, 5, 6\)",
        ),
        (
            lambda msa, pair: (msa, pair, msa[..., 0, 0]),
            r"msa_mask has the shape \(2, 3\); it must be \(2, 3, 5\)",
        ),
        (
            lambda msa, pair: (msa, pair, None, pair),
            r"pair_mask has the shape \(2, 5, 5, 6\); it must be \(2, 5, 5\)",
        ),
    ],
)
def test_shapes_are_checked(change: Callable[..., tuple[Tensor, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(*change(*inputs()))


class Classifier(nn.Module):
    """Classes of pairs, by an Evoformer."""

    def __init__(self) -> None:
        super().__init__()
        self.evoformer = Evoformer(SMALL, msa_dropout=0.0, pair_dropout=0.0)
        self.head = nn.Linear(SMALL.c_z, 3)
        drawn(self)

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> Tensor:
        """Return (batch * residues * residues, 3)."""
        logits: Tensor = self.head(self.evoformer(msa, pair, msa_mask, pair_mask)[1])
        return logits.flatten(0, 2)


def batches() -> list[Batch]:
    """Return alignments with missing positions, and a class for each pair."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        msa = torch.randn(8, SEQUENCES, RESIDUES, SMALL.c_m, generator=generator)
        pair = torch.randn(8, RESIDUES, RESIDUES, SMALL.c_z, generator=generator)
        msa_mask = torch.rand(msa.shape[:-1], generator=generator).gt(0.2).float()
        msa_mask[:, 0] = 1
        labels = torch.randint(3, (8, RESIDUES, RESIDUES), generator=generator)
        found.append((msa, pair, msa_mask, torch.ones(pair.shape[:-1]), labels))
    return found


def flat_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: nn.functional.cross_entropy(logits, labels.flatten())


TASK = Task(
    build=Classifier,
    batches=batches,
    criterion=flat_loss,
    optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
)
RUNS = [
    Run(task=TASK, num_ranks=2, config={}, max_norm=0.5),
    Run(task=TASK, num_ranks=2, config={"recompute": True, "zero": {"stage": 2}}, accumulation=2),
    Run(task=TASK, num_ranks=2, config={"zero": {"stage": 3}}),
    Run(task=TASK, num_ranks=2, plugin=partial(GeminiPlugin, precision="fp32")),
]


@pytest.mark.dist
def test_training_is_that_of_one_process() -> None:
    check_runs(2, [(run,) for run in RUNS])
