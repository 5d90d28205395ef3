"""Models of our own and made-up ones cut into stages, chained in one process, against the whole model."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io._model import model_state
from colossalai.lazy import LazyInitContext
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.pipeline.stages._chunks import ChunkList
from colossalai.pipeline.stages._split_model import cut_model
from colossalai.pipeline.stages._stage import tied_parameters
from colossalai.runtime.recomputation._recompute import apply_recompute, find_blocks
from tests.pipeline.stages.chain import check_cut, check_stages, cut_all, run_chain
from tests.pipeline.stages.models import TEXT, ZOO, Case, seeded

pytestmark = pytest.mark.unit


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ZOO)
def test_model_zoo_is_the_same_in_stages(name, num_stages):
    stages = check_cut(ZOO[name], num_stages)
    if num_stages > 1:
        tied = {"gpt": ["embedding.tokens.weight", "head.weight"], "vit": []}.get(name)
        assert tied is None or [n for tie in stages[0].ties for n in tie.names] == tied
        assert all(tie.stages == (0, num_stages - 1) for tie in stages[0].ties)


class Block(nn.Module):
    """A block that hands on a tuple: its output, something that it never returns, and a running sum."""

    attention_type = "full"

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden, total, *, scale):
        hidden = torch.tanh(self.linear(hidden)) * scale
        return hidden, None, total + hidden


class Made(nn.Module):
    """Everything that a forward may do around its blocks."""

    def __init__(self, width=6, num_blocks=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)  # registered before the blocks, runs after them
        self.token = nn.Parameter(torch.randn(width))  # of the container itself
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.gate = nn.Linear(width, width)  # runs between the blocks
        self.scales = torch.linspace(1, 2, num_blocks).tolist()
        self.start = nn.Linear(width, width)  # registered after the blocks, runs before them

    def forward(self, x):
        hidden = self.start(self.stem(x) + self.token)
        total = torch.zeros_like(hidden)
        for number, block in enumerate(self.blocks):
            assert block.attention_type == "full"
            out = block(hidden, total, scale=self.scales[number])
            hidden, total = out[0] + self.gate(out[0]), out[2]
        return self.norm(hidden + total)


def made_data():
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


MADE = Case(seeded(Made), lambda: {"x": made_data()}, lambda output: output)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_what_happens_around_and_between_blocks_is_kept(num_stages):
    stages = check_cut(MADE, num_stages, sample=made_data())
    assert "norm.weight" not in dict(stages[0].named_parameters())
    assert "start.weight" not in dict(stages[-1].named_parameters())
    everyone = tuple(range(num_stages))
    shared = {tie.names[0]: tie.stages for tie in stages[0].ties}
    assert shared == dict.fromkeys(["gate.bias", "gate.weight", "token"], everyone)


def test_without_a_trial_the_order_of_registration_counts_and_is_checked(caplog):
    stages = cut_all(MADE, 2, everywhere=["gate"])
    with pytest.raises(RuntimeError, match=r"'start'.*calls it before its blocks.*first=\['start'\]"):
        run_chain(stages, MADE)
    stages = cut_all(MADE, 2, first=["start"], everywhere=["gate"])
    with pytest.raises(RuntimeError, match=r"'norm'.*calls it after its blocks.*last=\['norm'\]"):
        run_chain(stages, MADE)
    check_cut(MADE, 2, first=["start"], last=["norm"], everywhere=["gate"])


def test_a_sequential_stack_and_data_as_tensor_or_tuple():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(3, 4)
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.layers(self.stem(x)))

    model = Plain().double()
    twin = copy.deepcopy(model)
    first, last = (cut_model(copy.deepcopy(model), 2, [i]) for i in (0, 1))
    assert list(first.state_dict()) == ["stem.weight", "stem.bias", "layers.0.weight", "layers.0.bias"]
    x = made_data()
    assert torch.equal(last(first(None, x), (x,)), twin(x))


def test_the_rest_of_the_model_loses_its_memory():
    model = ZOO["gpt"].build()
    whole = sum(param.nbytes for param in model.parameters())
    stage = cut_model(model, 3, [1])
    assert {n for n, _ in stage.named_parameters()} == {
        n for n, p in model.named_parameters() if not p.is_meta
    }
    assert all(name.startswith(("blocks.1.", "blocks.2.")) for name, _ in stage.named_parameters())
    assert 0 < sum(param.nbytes for param in stage.parameters()) < whole / 2
    assert set(model_state(stage).tensors) == set(stage.state_dict()) == set(dict(stage.named_parameters()))
    assert stage.get_parameter("blocks.2.mlp.expansion.weight").shape == (64, 16)
    assert len(find_blocks(stage)) == 2


def test_attributes_of_a_stage_are_set_on_the_model():
    stage = cut_model(ZOO["gpt"].build(), 2, [0])
    stage.scale, stage.training = 3.0, False
    assert (stage.model.scale, stage.model.training, "scale" in vars(stage)) == (3.0, False, False)
    del stage.scale
    assert "scale" not in vars(stage.model)


def test_forward_frees_what_it_does_not_send():
    stage = cut_model(ZOO["vit"].build(), 2, [0])
    seen = []
    stage.embedding.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        with torch.no_grad():
            stage(None, ZOO["vit"].data())
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("placement", [([0, 2], [1, 3]), ([0, 3], [1, 2])])
def test_several_stages_on_a_rank(placement):
    case = ZOO["gpt"]
    ranks = []

    def in_order():
        ranks.extend(cut_model(case.build(), 4, list(stages)) for stages in placement)
        return sorted((stage for rank in ranks for stage in rank), key=lambda stage: stage.index)

    check_stages(case, in_order)
    assert all(isinstance(rank, ChunkList) for rank in ranks)
    assert not any(param.is_meta for rank in ranks for param in rank.parameters())
    ((param, stages),) = tied_parameters(ranks[0])
    assert stages == (0, 3)
    assert param is ranks[0].get_parameter("embedding.tokens.weight")
    if placement == ([0, 3], [1, 2]):
        assert param is ranks[0].get_parameter("head.weight")
        assert tied_parameters(ranks[1]) == []


def test_balance():
    def held(stage):
        return list(stage.blocks._modules)

    def cut(index, **options):
        return cut_model(ZOO["gpt"].build(), 2, [index], **options)

    assert held(cut(0)) == ["0", "1"]
    assert held(cut(1, balance=[9, 1, 1, 1, 1])) == ["1", "2", "3", "4"]
    wide = GPT(GPTConfig(**{**TEXT, "max_position_embeddings": 2000}))
    assert held(cut_model(wide, 2, [0], balance="parameters")) == ["0"]


def test_lazily_built_only_the_stage_gets_memory():
    torch.manual_seed(0)
    with LazyInitContext():
        model = GPT(GPTConfig(**TEXT))
    torch.manual_seed(0)
    whole = GPT(GPTConfig(**TEXT))
    stage = cut_model(model, 3, [2])
    assert all(param.is_meta for param in stage.parameters())
    LazyInitContext.materialize(stage)
    for name, param in stage.named_parameters():
        assert torch.equal(param, whole.get_parameter(name)), name
    assert model.embedding.positions.weight.is_meta
    ((tied, stages),) = tied_parameters(stage)
    assert tied is stage.get_parameter("head.weight")
    assert stages == (0, 2)


def test_a_stage_follows_type_mode_and_copies():
    case = ZOO["gpt"]
    stage = cut_model(case.build(), 2, [1]).float().eval()
    assert not any(module.training for module in stage.modules())
    twin = copy.deepcopy(stage)
    received = torch.randn(4, 8, 16)
    assert torch.equal(stage(received, case.data()), twin(received, case.data()))
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in stage.parameters()})
    assert stage.embedding.tokens.weight.dtype == torch.float32
    assert stage.config.num_layers == 5
    state = stage.state_dict()
    with torch.no_grad():
        twin.get_parameter("norm.weight").zero_()
    twin.load_state_dict(state)
    assert torch.equal(twin.get_parameter("norm.weight"), stage.get_parameter("norm.weight"))


def test_recomputed_blocks_of_a_stage():
    case = ZOO["vit"]
    check_stages(case, lambda: [apply_recompute(stage, True) for stage in cut_all(case, 2)])


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(2, 2, 2) for _ in range(3))

    def forward(self, x):
        a = self.blocks[0](x, x)
        b = self.blocks[1](a, a)
        return self.blocks[2](b, a)


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[0]
        return x


class Cached(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x), "a cache"


class LeavesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x):
        return self.blocks[0](x)


X = torch.randn(1, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cut_model(nn.Linear(2, 2), 2, [0]), ValueError, "has no nn.ModuleList or nn.Sequential"),
        (lambda: cut_model(Made(), 5, [0]), ValueError, "'blocks' has 4 blocks, fewer than 5 stages"),
        (lambda: cut_model(Made(), 2, [2]), ValueError, r"stages=\[2\]: name stages from 0 to 1"),
        (lambda: cut_model(Made(), 2, []), ValueError, r"stages=\[\]"),
        (lambda: cut_model(Made(), 2, [0], stack="norm"), ValueError, "'norm' is not an nn.ModuleList"),
        (lambda: cut_model(Made(), 2, [0], first=["nrom"]), ValueError, "first names 'nrom'"),
        (lambda: cut_model(Made(), 2, [0], balance=[1.0]), ValueError, "a weight for each of 4 blocks"),
        (
            lambda: cut_model(Skips(), 2, [0], sample=X),
            ValueError,
            "block 2 of 'blocks' takes a result of block 0",
        ),
        (lambda: cut_model(Caches(), 2, [0])(None, X), ValueError, "'blocks.0' returns a tuple of .*'str'"),
        (lambda: cut_model(LeavesOut(), 2, [0])(None, X), RuntimeError, "without calling block 'blocks.1'"),
        (lambda: cut_model(Made(), 2, [1])(None, X), RuntimeError, "received nothing"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
