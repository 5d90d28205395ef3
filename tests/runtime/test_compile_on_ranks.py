"""A compiled model trains as it does without: data, tensor, ZeRO, by both doors, with generated kernels."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.testing import Subject, check_parity, full_gradients, full_parameters
from tests.parity.subjects.doors import make_case, through_engine
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

NO_KERNELS = {"backend": "aot_eager"}  # everything but the code generator, which takes most of the time
SHAPE = {"hidden_size": 8, "num_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
RATES = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout"), 0.0)


def compiled(plugin, case, model):
    """The plugin door; gradients are compared where a rank has them."""
    booster = Booster(plugin=plugin, compile=NO_KERNELS)
    optimizer = case.build_optimizer(model.parameters())
    boosted, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.functional.cross_entropy)

    def step(batch):
        optimizer.zero_grad()
        loss = criterion(boosted(batch[0]), batch[1])
        booster.backward(loss, optimizer)
        optimizer.step()
        return loss.detach()

    def gradients():
        if isinstance(plugin, LowLevelZeroPlugin):
            whole = optimizer.masters.whole_grads()
            return {name: whole[param] for name, param in model.named_parameters() if param in whole}
        return full_gradients(boosted)

    return Subject(step=step, gradients=gradients, parameters=lambda: full_parameters(boosted))


def with_data_and_zero(plugins, in_config):
    """Train through the plugin door, and with a config through the other one, too."""
    colossalai.launch_from_torch({"compile": NO_KERNELS, "recompute": True}, verbose=False)
    case = make_case()
    losses = [check_parity(case, lambda model: through_engine(case, 1, model))] if in_config else []
    for plugin in plugins:
        losses.append(check_parity(case, lambda model, plugin=plugin: compiled(plugin, case, model)))
    gpc.destroy()
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


SHARDED = TorchFSDPPlugin()
REDUCED = LowLevelZeroPlugin(stage=2, precision="fp32")


@pytest.mark.parametrize(
    ("plugins", "in_config"), [([REDUCED], False), further([SHARDED, REDUCED], True)], ids=["ZeRO", "all"]
)
def test_data_parallelism_and_zero_against_one_process(plugins, in_config):
    for losses, num_graphs in run_ranks(with_data_and_zero, 2, plugins, in_config):
        assert [len(of_method) for of_method in losses] == [3] * (in_config + len(plugins))
        assert num_graphs > 0


def train_gpt(compile):
    torch.manual_seed(0)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2), compile=compile)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **RATES, max_position_embeddings=4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    boosted, optimizer, criterion, *_ = booster.boost(model, optimizer, GPTLMLoss())
    for step in range(2):
        ids = torch.randint(16, (3, 4), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        booster.backward(criterion(boosted(ids), ids), optimizer)
        optimizer.step()
    assert not any("_orig_mod" in name for name in boosted.state_dict())
    return list(model.parameters())


def with_tensors():
    colossalai.launch_from_torch({}, verbose=False)
    pairs = list(zip(train_gpt(False), train_gpt(NO_KERNELS), strict=True))
    gpc.destroy()
    return len(pairs), max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.long
def test_tensor_parallelism_against_itself_without():
    for num_params, difference in run_ranks(with_tensors, 2):
        assert num_params > 20
        assert difference < 1e-12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        return torch.tanh(x * self.weight) + 1


def with_kernels():
    colossalai.launch_from_torch({}, verbose=False)
    results = []
    for compile in (False, True):
        model = nn.Sequential(Block(), Block())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, optimizer, *_ = Booster(compile=compile).boost(model, optimizer)
        boosted(torch.arange(6.0).view(2, 3)).sum().backward()
        optimizer.step()
        results.append(torch.stack(list(model.parameters())))
    gpc.destroy()
    return (results[0] - results[1]).abs().max().item()


@pytest.mark.long
def test_generated_kernels_give_the_same(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (difference,) = run_ranks(with_kernels, 1)
    assert difference < 1e-6
