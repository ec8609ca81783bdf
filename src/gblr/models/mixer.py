"""MLP-Mixer (Tolstikhin et al. 2021): MLPs along the patches and along the channels, in turn; no attention."""

from jaxtyping import Float
from torch import Tensor, nn


class Mixer(nn.Module):
    """Images (*, channels, size, size) to class scores.

    `token_ratio` and `channel_ratio` are hidden units of the two MLPs over `width`, as in the authors' CIFAR runs.

    >>> import torch
    >>> Mixer(image_size=8, patch_size=2, width=16, depth=1)(torch.zeros(3, 3, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        width: int = 512,
        depth: int = 8,
        token_ratio: float = 0.5,
        channel_ratio: float = 4.0,
        num_classes: int = 10,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"`patch_size` must divide `image_size`; got {patch_size} and {image_size}.")
        num_patches = (image_size // patch_size) ** 2
        hidden = int(width * token_ratio), int(width * channel_ratio)
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.blocks = nn.ModuleList(Block(num_patches, width, *hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nn.Module):
    def __init__(self, num_patches: int, width: int, token_hidden: int, channel_hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = Mlp(num_patches, token_hidden), Mlp(width, channel_hidden)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.fc2(nn.functional.gelu(self.fc1(x)))
