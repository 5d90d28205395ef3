"""ResNet of basic blocks.

He et al., "Deep Residual Learning for Image Recognition" (2015), sections 3.3 and 4.1. Each stage after the
first halves the image and doubles the channels; a shortcut that changes shape is a 1x1 convolution.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution; 2 halves the image.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to (batch, out_channels, height/stride, width/stride)."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """A residual network of basic blocks.

    Args:
        num_blocks: Number of blocks in each stage.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        small_input: Begin with a 3x3 convolution that keeps the size, for images of 32x32 and smaller,
            instead of a 7x7 one with pooling, which shrinks the image four times.
        width: Channels of the first stage.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        small_input: bool = False,
        width: int = 64,
    ) -> None:
        super().__init__()
        stem_kernel, stem_stride = (3, 1) if small_input else (7, 2)
        self.stem = nn.Sequential(
            nn.Conv2d(
                in_channels, width, stem_kernel, stride=stem_stride, padding=stem_kernel // 2, bias=False
            ),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Identity() if small_input else nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList()
        channels = width
        for stage, blocks_in_stage in enumerate(num_blocks):
            for index in range(blocks_in_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(BasicBlock(channels, width << stage, stride=stride))
                channels = width << stage
        self.classifier = nn.Linear(channels, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the convolutions as He et al. (2015), "Delving Deep into Rectifiers", do."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (batch, in_channels, height, width) to logits of shape (batch, num_classes)."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.classifier(hidden.mean(dim=(2, 3)))
        return logits


def resnet18(
    *, num_classes: int = 1000, in_channels: int = 3, small_input: bool = False, width: int = 64
) -> ResNet:
    """Build ResNet-18; the arguments are those of `ResNet`."""
    return ResNet(
        (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels, small_input=small_input, width=width
    )


def resnet34(
    *, num_classes: int = 1000, in_channels: int = 3, small_input: bool = False, width: int = 64
) -> ResNet:
    """Build ResNet-34; the arguments are those of `ResNet`."""
    return ResNet(
        (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels, small_input=small_input, width=width
    )
