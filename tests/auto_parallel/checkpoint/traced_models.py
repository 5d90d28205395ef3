"""Small models with chains of blocks, what they are given, and their training as it is counted."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.fx import TracedModule, metainfo_trace, symbolic_trace
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.resnet import ResNet
from tests.nn.live_bytes import LiveBytes

VOCAB, LENGTH, WIDTH = 60, 16, 24


class Mlp(nn.Module):
    """Draws a mask of dropout."""

    def __init__(self, width: int = WIDTH, rate: float = 0.2) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.dropout = nn.Dropout(rate)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.down(self.dropout(torch.tanh(self.up(x)))))
        return x if mask is None else x * mask


class Masked(nn.Module):
    """Gives all blocks a mask, and may stop short of the gradient in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor, is_gated: bool = False) -> Tensor:
        hidden = self.stem(x)
        mask = torch.sigmoid(self.gate(x)) if is_gated else mask * 2
        for block in self.blocks:
            hidden = block(hidden, mask)
        return hidden


def stack() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(*(Mlp() for _ in range(9))).double(), {"input": torch.randn(32, WIDTH).double()}


def masked() -> tuple[nn.Module, dict[str, Tensor]]:
    x = torch.randn(32, WIDTH, dtype=torch.float64)
    return Masked().double(), {"x": x, "mask": (x > 0).double()}


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": WIDTH, "num_layers": 6, "num_attention_heads": 2}
    model = GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes))  # rates of dropout: 0.1
    return model.double(), {"input_ids": torch.randint(VOCAB, (8, LENGTH))}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    model = ResNet((2, 2, 2), num_classes=10, small_input=True, width=8)
    return model.double(), {"images": torch.randn(8, 3, 16, 16, dtype=torch.float64)}


BUILDERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    each.__name__: each for each in (stack, masked, gpt, resnet)
}


def traced(name: str) -> tuple[TracedModule, nn.Module, dict[str, Tensor]]:
    """Return a model with its graph and costs, a plain copy of it, and the arguments of its forward."""
    torch.manual_seed(7)
    model, arguments = BUILDERS[name]()
    twin = copy.deepcopy(model)
    meta = {key: value.to("meta") for key, value in arguments.items()}
    return metainfo_trace(symbolic_trace(model, meta_args=meta), *arguments.values()), twin, arguments


class Loss(torch.autograd.Function):
    """Takes no memory besides a gradient of the output, which is that of another loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return output.cos()


def train(model: nn.Module, arguments: dict[str, Tensor], num_steps: int = 3) -> list[Tensor]:
    """Return losses, all gradients of all steps, and parameters and buffers in the end."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = Loss.apply(model(**arguments))
        loss.backward()
        found += [
            loss.detach(),
            *(param.grad.clone() for param in model.parameters() if param.grad is not None),
        ]
        optimizer.step()
    return [*found, *(value.clone() for value in model.state_dict().values()), torch.rand(2)]


def counted_bytes(model: nn.Module, arguments: dict[str, Tensor]) -> int:
    """Return the peak of live bytes of one forward and backward that add to gradients that are there."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    held = [*model.parameters(), *model.buffers(), *(param.grad for param in model.parameters())]
    with LiveBytes(*arguments.values(), *(each for each in held if each is not None)) as live:
        Loss.apply(model(**arguments)).backward()
    return live.peak
