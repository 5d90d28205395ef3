"""The Evoformer in tensor mode "dap": training, dropout, bytes, memory, and refusals."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.esm.configuration_esm import TrunkConfig
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.communication import ledger
from colossalai.context import Config, ConfigException
from colossalai.core import global_context as gpc
from colossalai.model_zoo.evoformer import Evoformer, inject_fastnn, remove_fastnn
from colossalai.nn.dap import init_dap
from colossalai.nn.layer.axial import (
    DapGroup,
    SharedDropout,
    TriangleAttention,
    TriangleMultiplication,
    dap_group,
)
from colossalai.runtime import Plan
from colossalai.tensor import built_for
from tests.harness.fake_job import fake_job
from tests.model_zoo.test_esmfold import esmfold, output_of_residues
from tests.model_zoo.test_evoformer import SMALL, drawn
from tests.parity.tasks import Batch, rebuilt
from tests.parity.training import Run, Task, grouped_runs
from tests.parity.training import check_runs as check_parity_of
from tests.ranks import run_ranks
from tests.tiers import further


def dap(size: int) -> dict[str, Any]:
    return {"tensor": {"size": size, "mode": "dap"}}


class Contacts(nn.Module):
    """Classes of pairs of residues, by layers around an Evoformer."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, SMALL.c_m)
        self.pair_embedding = nn.Linear(4, SMALL.c_z)
        self.evoformer = Evoformer(SMALL, msa_dropout=0.0, pair_dropout=0.0, **options)
        self.head = nn.Linear(SMALL.c_z + SMALL.c_m, 3)
        drawn(self)

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> Tensor:
        """Return (batch * residues * residues, 3)."""
        msa, pair = self.embedding(msa), self.pair_embedding(pair)
        msa, pair = self.evoformer(msa, pair, msa_mask, pair_mask)
        first = msa[:, 0].unsqueeze(1).expand(-1, pair.shape[1], -1, -1)
        logits: Tensor = self.head(torch.cat([pair, first], -1))
        return logits.flatten(0, 2)


def batches(num_sequences: int, residues: int) -> list[Batch]:
    """Return alignments with missing positions, and a class for each pair."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        msa = torch.randn(8, num_sequences, residues, 4, generator=generator)
        pair = torch.randn(8, residues, residues, 4, generator=generator)
        msa_mask = torch.rand(msa.shape[:-1], generator=generator).gt(0.2).float()
        msa_mask[:, 0] = 1
        pair_mask = torch.rand(pair.shape[:-1], generator=generator).gt(0.2)
        pair_mask[:, :, -1] = pair_mask[:, -1] = False  # a residue without pairs
        labels = torch.randint(3, (8, residues, residues), generator=generator)
        found.append((msa, pair, msa_mask, pair_mask, labels))
    return found


def flat_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: nn.functional.cross_entropy(logits, labels.flatten())


def contacts(num_sequences: int, residues: int, **options: bool) -> Task:
    """Return the task of a small Evoformer."""
    build = partial(Contacts, **options)
    return Task(
        build=build,
        place=rebuilt(build),
        batches=partial(batches, num_sequences, residues),
        criterion=flat_loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
    )


class Folding(nn.Module):
    """Classes of pairs of residues, by blocks of ESMFold."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        widths = {"sequence_head_width": 8, "pairwise_head_width": 4}
        config = TrunkConfig(sequence_state_dim=16, pairwise_state_dim=8, dropout=dropout, **widths)
        self.embedding = nn.Linear(4, 16)
        self.pair_embedding = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(EsmFoldTriangularSelfAttentionBlock(config) for _ in range(3))
        self.head = nn.Linear(8 + 16, 3)
        inject_fastnn(drawn(self))

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor | None = None) -> Tensor:
        """Return (batch * residues * residues, 3)."""
        sequence, pair = self.embedding(msa[:, 0]), self.pair_embedding(pair)
        for block in self.blocks:
            sequence, pair = block(sequence, pair, mask=msa_mask[:, 1])
        logits: Tensor = self.head(
            torch.cat([pair, sequence.unsqueeze(2).expand(-1, -1, pair.shape[2], -1)], -1)
        )
        return logits.flatten(0, 2)


def folding(residues: int) -> Task:
    """Return the task of blocks of ESMFold, with missing residues."""
    return replace(contacts(2, residues), build=Folding, place=rebuilt(Folding))


EVEN, ODD = contacts(4, 8), contacts(3, 5)
PIPELINE: dict[str, Any] = {"pipeline": {"size": 2, "partition": "balanced"}}
RUNS = [
    Run(task=EVEN, num_ranks=2, config={"parallel": dap(2)}, max_norm=0.5),
    Run(task=ODD, num_ranks=2, config={"parallel": dap(2), "recompute": True}, accumulation=2),
    Run(task=ODD, num_ranks=2, config={"parallel": dap(2), "zero": {"stage": 1}}, max_norm=0.5),
    Run(
        task=contacts(4, 4, is_multimer=True),
        num_ranks=2,
        config={"parallel": dap(2)},
        plugin=partial(HybridParallelPlugin, tp_size=2, tp_mode="dap"),
    ),
    Run(task=contacts(3, 4, is_global=True), num_ranks=4, config={"parallel": dap(4)}),
    Run(
        task=ODD,
        num_ranks=2,
        config={"parallel": dap(2), "gradient_handler": [{"type": "DataParallelGradientHandler"}]},
    ),
    Run(task=ODD, num_ranks=4, config={"parallel": {"data": 2, **dap(2)}, "zero": {"stage": 1}}),
    Run(task=folding(5), num_ranks=2, config={"parallel": dap(2), "zero": {"stage": 1}}, max_norm=0.5),
    Run(task=folding(8), num_ranks=4, config={"parallel": dap(4), "recompute": True}),
    Run(task=ODD, num_ranks=4, config={"parallel": {**PIPELINE, **dap(2)}, "NUM_MICRO_BATCHES": 2}),
    *map(
        further,
        (
            Run(task=ODD, num_ranks=3, config={"parallel": dap(3), "recompute": True}, max_norm=0.5),
            Run(task=EVEN, num_ranks=2, config={"parallel": dap(2), "zero": {"stage": 2}}, accumulation=2),
            Run(task=EVEN, num_ranks=2, config={"parallel": dap(2), "zero": {"stage": 3}}),
            Run(task=folding(7), num_ranks=3, config={"parallel": dap(3)}, accumulation=2),
            Run(
                task=EVEN,
                num_ranks=2,
                config={"parallel": dap(2), "gemini": {"precision": "fp32", "min_chunk_size_mb": 0.002}},
            ),
            Run(
                task=contacts(5, 7, is_multimer=True),
                num_ranks=4,
                config={"parallel": {**PIPELINE, **dap(2)}, "NUM_MICRO_BATCHES": 4, "zero": {"stage": 1}},
            ),
        ),
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RUNS))
def test_training_is_that_of_one_process(num_ranks: int, runs: list[tuple[Run]]) -> None:
    check_parity_of(num_ranks, runs)


@pytest.mark.mesh
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_multimer", [False, True])
def test_sent_bytes_are_those_of_the_docstrings(size: int, is_multimer: bool) -> None:
    """Of whole tensors with 4 bytes for an element; axis "dap" alone is used."""
    b, s, n, e = 2, 8, 16, 4
    share = (size - 1) / size
    msa_bytes, pair_bytes = b * s * n * SMALL.c_m * e, b * n * n * SMALL.c_z * e
    biases = (SMALL.msa_heads + 2 * SMALL.pair_heads) * b * n * n * e
    columns = b * s * n * (SMALL.outer_dim + 1) * e
    triangles = b * n * n * SMALL.triangle_dim * e
    with fake_job({"parallel": dap(size)}, size, rank=size - 1):
        model = Evoformer(SMALL, is_multimer=is_multimer, msa_dropout=0.0, pair_dropout=0.0)
        msa = torch.randn(b, s, n, SMALL.c_m, requires_grad=True)
        pair = torch.randn(b, n, n, SMALL.c_z, requires_grad=True)
        with ledger() as forward:
            output = model(msa, pair)
        with ledger() as backward:
            sum(x.sum() for x in output).backward()
    num_blocks = SMALL.num_blocks
    for book in (forward, backward):
        assert book.num_bytes() == book.num_bytes(axis="dap")
        found = book.num_bytes("all_to_all")
        assert found == pytest.approx(num_blocks * share * 2 * (msa_bytes + pair_bytes) / size)
        assert book.count("all_to_all") == num_blocks * 4
    ends, gathered = share * (msa_bytes + pair_bytes), num_blocks * share * (biases + columns)
    assert forward.num_bytes("all_gather") == pytest.approx(gathered + ends)
    assert backward.num_bytes("all_gather") == pytest.approx(ends)
    assert backward.num_bytes("reduce_scatter") == pytest.approx(gathered)
    assert forward.num_bytes("shift") == pytest.approx(num_blocks * share * 2 * triangles)
    assert backward.num_bytes("shift") == pytest.approx(num_blocks * share * 3 * triangles)


@pytest.mark.mesh
def test_sent_bytes_of_blocks_of_esmfold() -> None:
    b, n, e, size, num_blocks = 2, 8, 4, 4, 3
    share, pair_bytes = (size - 1) / size, b * n * n * 8 * e
    biases, triangles = (2 + 2 * 2) * b * n * n * e, pair_bytes  # heads of the sequence, and of pairs
    hidden = b * n * 4 * e  # projections of the sequence to pairs
    with fake_job({"parallel": dap(size)}, size, rank=1):
        model = Folding()
        with ledger() as forward:
            output = model(torch.randn(b, 2, n, 4), torch.randn(b, n, n, 4), torch.ones(b, 2, n))
        with ledger() as backward:
            output.sum().backward()
    for book in (forward, backward):
        assert book.num_bytes() == book.num_bytes(axis="dap")
        assert book.num_bytes("all_to_all") == pytest.approx(num_blocks * 2 * share * pair_bytes / size)
    assert forward.num_bytes("all_gather") == pytest.approx(share * (num_blocks * biases + pair_bytes))
    assert forward.num_bytes("all_reduce") == 0
    assert backward.num_bytes("reduce_scatter") == pytest.approx(share * num_blocks * biases)
    assert backward.num_bytes("all_gather") == pytest.approx(share * (num_blocks * hidden + pair_bytes))
    assert backward.num_bytes("all_reduce") == pytest.approx(2 * share * num_blocks * hidden)
    assert forward.num_bytes("shift") == pytest.approx(num_blocks * share * 2 * triangles)
    assert backward.num_bytes("shift") == pytest.approx(num_blocks * share * 3 * triangles)


def outputs_of_ranks() -> dict[str, Tensor]:
    colossalai.launch_from_torch({"parallel": dap(2)}, verbose=False)
    model = inject_fastnn(esmfold(num_blocks=3))
    model.trunk.set_chunk_size(3)
    return {name: output.detach() for name, output in output_of_residues(model).items()}


@pytest.mark.dist
def test_an_esmfold_is_that_of_one_process() -> None:
    """A whole ESMFold under DAP, whose 7 residues two ranks do not divide."""
    wanted = output_of_residues(esmfold(num_blocks=3))
    for found in run_ranks(outputs_of_ranks, 2):
        for name, output in found.items():
            torch.testing.assert_close(output, wanted[name], rtol=1e-10, atol=1e-10)


@pytest.mark.mesh
def test_blocks_of_esmfold_that_are_refused() -> None:
    model = Folding()
    with fake_job({"parallel": dap(2)}, 2):
        remove_fastnn(model)
        model.blocks[2] = model.blocks[0]
        with pytest.raises(ValueError, match=r"has a block twice; in tensor mode 'dap' its first and last"):
            inject_fastnn(model)
        first = Folding().blocks[0]
        with pytest.raises(ValueError, match=r"2 ranks pad 5 residues, which all blocks mask: pass a mask"):
            first(torch.ones(1, 5, 16), torch.ones(1, 5, 5, 8))
    with pytest.raises(ValueError, match=r"cut_dim must then be the dimension that is cut under DAP"):
        SharedDropout(0.1, None)


@pytest.mark.mesh
def test_each_rank_keeps_its_share_of_the_activations() -> None:
    """Tensors that a block saves for its backward, without parameters; 3 % are for gathered ones."""

    def saved_bytes() -> int:
        torch.manual_seed(0)
        widths = {"c_m": 64, "c_z": 32, "outer_dim": 8, "triangle_dim": 32, "pair_heads": 1, "msa_heads": 2}
        block = Evoformer(num_blocks=1, **widths)
        params = {param.untyped_storage().data_ptr() for param in block.parameters()}
        found: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in params:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or save(x), lambda x: x):
            output = block(torch.randn(1, 32, 64, 64), torch.randn(1, 64, 64, 32))
        del output
        return sum(found.values())

    whole = saved_bytes()
    for size in (2, 4):
        with fake_job({"parallel": dap(size)}, size):
            assert saved_bytes() == pytest.approx(whole / size, rel=0.03)


def outputs_with_dropout() -> list[Tensor]:
    """Return outputs of blocks in training and of single dropouts, from one random state."""
    torch.manual_seed(0)
    group = dap_group()
    model = drawn(Evoformer(SMALL, msa_dropout=0.4, pair_dropout=0.3)).double()
    generator = torch.Generator().manual_seed(1)
    msa = torch.randn(2, 4, 6, SMALL.c_m, generator=generator, dtype=torch.float64)
    pair = torch.randn(2, 6, 6, SMALL.c_z, generator=generator, dtype=torch.float64)
    torch.manual_seed(2)
    found = [*model(msa, pair), Folding(dropout=0.3).double()(msa[..., :4], pair[..., :4], msa[..., 0] > 0)]
    for dim, cut_dim in ((1, 1), (1, 2), (2, 1), (2, 2), (None, 1)):
        dropout = SharedDropout(0.5, dim, cut_dim=cut_dim)
        found.append(group.gather(dropout(group.scatter(torch.ones(2, 4, 6, 3), cut_dim)), cut_dim))
    return [*found, torch.rand(3)]  # later draws, too


def dropout_of_ranks() -> list[Tensor]:
    colossalai.launch_from_torch({"parallel": dap(2)}, verbose=False)
    return [x.detach() for x in outputs_with_dropout()]


@pytest.mark.dist
def test_dropout_is_that_of_one_process() -> None:
    wanted = outputs_with_dropout()
    assert len({x.std().item() for x in wanted[2:]}) > 1
    for found in run_ranks(dropout_of_ranks, 2):
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def group_of_a_user() -> None:
    """Exchanges of a user's axial model, each equal to a slice of the whole, and its errors."""
    init_dap()
    assert gpc.tensor_mode == "dap"
    init_dap(2)
    with pytest.raises(ConfigException, match="laid out so by a plugin"):
        init_dap(1)
    group, rank = dap_group(), gpc.mesh.axis_rank("dap")
    assert (group.size, pickle.loads(pickle.dumps(group)).size) == (2, 2)
    x = torch.arange(2 * 4 * 6.0).reshape(2, 4, 6)
    rows, columns = x.chunk(2, 1)[rank], x.chunk(2, 2)[rank]
    assert torch.equal(group.scatter(x, 1), rows)
    assert torch.equal(group.part(x, 2), columns)
    assert torch.equal(group.to_columns(rows), columns)
    assert torch.equal(group.to_rows(columns), rows)
    assert torch.equal(group.to_rows_async(columns).wait(), rows)
    assert torch.equal(group.gather(rows, 1), x)
    assert torch.equal(group.whole_async(columns, 2).wait(), x)
    assert torch.equal(group.replicate(x), x)
    padded = group.pad(torch.ones(2, 3, 5), (1, 2))
    assert (padded.shape, padded.sum()) == ((2, 4, 6), 30)
    cut = r"dim 1 of a tensor of shape \(2, 3, 6\) cannot be cut over 2 ranks: pad it"
    for call in (group.scatter, group.part):
        with pytest.raises(ValueError, match=cut):
            call(x[:, :3], 1)
    with pytest.raises(ValueError, match=cut):
        group.to_rows(x[:, :3])
    with pytest.raises(ValueError, match=cut):
        group.to_rows_async(x[:, :3])
    wrong = [
        (TriangleAttention(4, 1, 4, starting=True), (1, 6, 6, 4), 1),
        (TriangleAttention(4, 1, 4, starting=False), (1, 6, 6, 4), 2),
        (TriangleMultiplication(4, outgoing=False), (1, 2, 5, 4), 1),
    ]
    for layer, shape, dim in wrong:
        right = f"it must be a slice along dim {dim} of (batch, residues, residues, 4) over 2 ranks"
        with pytest.raises(ValueError, match=re.escape(f"{shape}; in tensor mode 'dap' {right}")):
            layer(torch.ones(shape))
    torch.manual_seed(0)
    for starting, shape in ((True, (1, 3, 6, 4)), (False, (1, 6, 3, 4))):
        layer = TriangleAttention(4, 2, 4, starting=starting).double()
        drawn(layer)
        pair = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(layer(pair, chunk_size=2), layer(pair), rtol=1e-12, atol=1e-12)


@pytest.mark.dist
def test_a_group_of_a_user() -> None:
    run_ranks(group_of_a_user, 2)


def refused_models() -> None:
    early = Evoformer(SMALL)
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tp_mode="dap"))
    with pytest.raises(ValueError, match="it, a Evoformer, was built for dap 1, and the plan has 2"):
        booster.boost(early)
    booster.boost(Evoformer(SMALL))
    booster.boost(nn.Linear(2, 2))


@pytest.mark.dist
def test_other_models(capfd: pytest.CaptureFixture[str]) -> None:
    """One of another layout is refused, and one without axial layers logged."""
    run_ranks(refused_models, 2)
    written = capfd.readouterr().out
    assert "tensor mode 'dap' cuts nothing of Linear, and each of 2 ranks computes" in written
    assert "Evoformer, and each" not in written


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("parallel", "what"), [({"sequence": 2}, "sequence ring"), ({"data": 2, "moe": 2}, "experts")]
)
def test_refused_pairs(parallel: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigException, match=f"tensor dap and {what} cannot be combined"):
        Plan.from_config(Config(parallel={**parallel, **dap(2)}))


@pytest.mark.mesh
def test_a_model_that_was_saved_whole_belongs_to_the_current_job() -> None:
    with fake_job({"parallel": dap(2)}, 2):
        saved = pickle.dumps(Evoformer(SMALL))
        assert pickle.loads(saved).group.size == 2
    loaded = pickle.loads(saved)
    assert loaded.group.size == 1
    assert all(extents == {"dap": 1} for _, _, extents in built_for(loaded))


@pytest.mark.unit
def test_one_rank_has_the_whole() -> None:
    group = DapGroup()
    x = torch.ones(2, 3, 4)
    assert all(call(x, 1) is x for call in (group.scatter, group.gather, group.part))
    assert group.replicate(x) is x
    assert all(call(x) is x for call in (group.to_rows, group.to_columns))
    assert group.to_rows_async(x).wait() is group.whole_async(x, 1).wait() is x
    assert group.pad(x, (1, 2)) is x
    assert dap_group().size == 1
