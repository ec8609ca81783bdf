"""A plain vision transformer: pre-norm blocks, class token, separate q, k and v."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ViT(nn.Module):
    """Images (*, channels, size, size) to class scores. Our own 50 lines rather than transformers' model, so that the
    demo needs no download and no further package. `drop_path` is the share of left-out branches in the last block.

    >>> ViT(image_size=8, patch_size=2, in_channels=1, width=32, depth=2, num_heads=4)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        width: int = 384,
        depth: int = 8,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        num_classes: int = 10,
        drop_path: float = 0.0,
    ):
        super().__init__()
        if image_size % patch_size or width % num_heads:
            raise ValueError(
                f"`patch_size` must divide `image_size` and `num_heads` must divide `width`; got {patch_size}, "
                f"{image_size}, {num_heads}, {width}."
            )
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image_size // patch_size) ** 2 + 1, width))
        hidden, last = int(width * mlp_ratio), max(1, depth - 1)
        self.blocks = nn.ModuleList(Block(width, num_heads, hidden, drop_path * i / last) for i in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        x = self.patches(images).flatten(2).mT
        token = self.class_token.expand(x.shape[0], -1, -1).to(x.dtype)
        x = torch.cat([token, x], 1) + self.positions.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int, drop_path: float = 0.0):
        super().__init__()
        self.drop_path = drop_path
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self._kept(self.attention(self.norm1(x)))
        return x + self._kept(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))

    def _kept(self, branch: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Stochastic depth: in training the branch is left out for a share of the samples, and the rest made larger."""
        if not self.training or self.drop_path == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        projections = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in projections)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))
