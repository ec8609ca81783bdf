"""Layers whose structure learns: widths and locations are parameters, seen through Gaudi masks (paper Eq. 7)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.arguments import one_input
from gblr.layers.prepared import autocast_dtype
from gblr.layers.scratch import default_num_blocks, scratch_widths
from gblr.layers.smooth import SmoothMasks
from gblr.layers.structured import dense_linear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure
from gblr.ops.elements import elements
from gblr.ops.masked_content import masked_content_from

MASK_THRESHOLD = 1e-3  # hardening keeps the elements whose mask is above it
_TOO_COARSE = (torch.bfloat16, torch.float16)  # 8 and 11 bits for fractions of the axis


class GaudiModule(SmoothMasks):
    """What all Gaudi layers share: the trainable matrix, `num_blocks` blocks of rank `block_rank`, and a bias. A higher
    rank than the smaller axis has is lowered to that.

    `width_frac` and `location_frac` are (2, num_blocks), entry 0 for rows (outputs) and entry 1 for columns (inputs),
    as fractions of their axis; they stay float32 whatever the module is cast to. `u` and `v` hold the contents.
    Forward masks round widths and locations to multiples of `align` elements, straight through, unless `rounding` is
    off. `num_blocks` is min(out, in) // `block_rank` unless given. `relative_cost` is that of the blocks to start with;
    training moves it.
    """

    _structure_names = ("width_frac", "location_frac", "sigma", "_row_table", "_col_table")
    bias: nn.Parameter | None
    num_positions = 1  # input vectors of the last forward in training; cost weighs layers by it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_rank: int = 1,
        align: int = 1,
        rounding: bool = True,
        num_blocks: int | None = None,
        relative_cost: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1; got {value}.")
        if block_rank < 1 or align < 1:
            raise ValueError(f"`block_rank` and `align` must be at least 1; got {block_rank} and {align}.")
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"`num_blocks` must be at least 1 (None: by the smaller axis); got {num_blocks}.")
        self.in_features, self.out_features = in_features, out_features
        block_rank = min(block_rank, in_features, out_features)  # more would add nothing
        self.block_rank, self.align, self.rounding = block_rank, align, rounding
        if num_blocks is None:
            num_blocks = default_num_blocks(out_features, in_features, block_rank)
        self.num_blocks = num_blocks
        content = {"device": device, "dtype": dtype or torch.get_default_dtype()}
        structure = {"device": device, "dtype": torch.float32}
        # contents first: the first parameter of a model is taken for its dtype, and structure stays float32
        self.u = nn.Parameter(torch.empty(self.num_blocks, block_rank, out_features, **content))
        self.v = nn.Parameter(torch.empty(self.num_blocks, block_rank, in_features, **content))
        self.width_frac = nn.Parameter(torch.empty(2, self.num_blocks, **structure))
        self.location_frac = nn.Parameter(torch.empty(2, self.num_blocks, **structure))
        self.add_sigma(self.u.device)
        if self.u.device.type != "meta":
            self._start(relative_cost, generator)

    def add_bias(self, bias: bool, generator: torch.Generator | None) -> None:
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=self.u.device, dtype=self.u.dtype))
            if not self.bias.is_meta:
                self._reset_bias(generator)

    def _reset_bias(self, generator: torch.Generator | None) -> None:
        assert self.bias is not None
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.bias, -bound, bound, generator=generator)

    def reset_parameters(self, relative_cost: float = 1.0, generator: torch.Generator | None = None) -> None:
        """Scratch start: half of the cost in full blocks, the rest in short ones of equal width; costs `relative_cost`.

        Contents are scaled so that outputs have the variance that `nn.Linear` gives them, at any widths. All that the
        layer has is filled, sigma (infinite) and bias too, as after `to_empty`.
        """
        self._start(relative_cost, generator)
        self.set_sigma(math.inf)
        if getattr(self, "bias", None) is not None:
            self._reset_bias(generator)

    def _start(self, relative_cost: float = 1.0, generator: torch.Generator | None = None) -> None:
        """Widths, locations and contents alone."""
        with torch.no_grad():
            align = self.align if self.rounding else 0
            width = scratch_widths(self._axes, self.num_blocks, self.block_rank, relative_cost, align)
            self.width_frac.copy_(width)
            self.location_frac.zero_()
            # W_ij sums block_rank * row_width_frac * col_width_frac products per block on average; nn.Linear's entries
            # have variance 1/(3 in)
            terms = self.block_rank * float(width.prod(0).sum())
            std = (1 / (3 * self.in_features * terms)) ** 0.25
            for content in (self.u, self.v):
                content.normal_(0.0, std, generator=generator)

    @torch.no_grad()
    def take_variance(self, weight: Float[Tensor, "out in"]) -> None:
        """After a scratch start: outputs with the variance that `weight` gives them. Models choose it layer by
        layer, GPT-2 a far smaller one than `nn.Linear` where residual branches end. Weights that are not there, zeros
        or NaN say nothing.
        """
        variance = 0.0 if weight.is_meta else float(weight.float().square().mean())
        if 0 < variance < math.inf:
            for content in (self.u, self.v):
                content.mul_((3 * self.in_features * variance) ** 0.25)

    def load_matrix(self, matrix: GBLRMatrix) -> None:
        """Takes over structure and contents; blocks beyond those of `matrix` are dead but able to return.

        With `rounding` its widths and locations must be multiples of `align`, as those of the layer are.

        A dead block keeps one column of width and small contents: were both widths 0, all of its gradients would be
        too.
        """
        if matrix.shape != (self.out_features, self.in_features) or matrix.block_rank != self.block_rank:
            raise ValueError(
                f"`matrix` must have shape {(self.out_features, self.in_features)} and block_rank {self.block_rank}; "
                f"got {matrix.shape} and {matrix.block_rank}."
            )
        given = matrix.num_blocks
        if given > self.num_blocks:
            raise ValueError(f"the layer has {self.num_blocks} blocks; the matrix needs {given}. Raise `num_blocks`.")
        s = matrix.structure
        self._check_align(s)
        with torch.no_grad():
            self._start()
            self.u.mul_(_deviation(matrix.u) / max(_deviation(self.u), 1e-12))
            self.width_frac.zero_()
            self.width_frac[1] = self.align / self.in_features
            self.width_frac[:, :given] = self._fractions(s.row_width, s.col_width)
            self.location_frac[:, :given] = self._fractions(s.row_location, s.col_location)
            self.u[:given].copy_(matrix.u)
            self.v[:given].copy_(matrix.v)

    def _check_align(self, s: Structure) -> None:
        """Raises where rounding would change a live block."""
        if not self.rounding:
            return
        sides = (("row", s.row_width, s.row_location), ("col", s.col_width, s.col_location))
        for (side, width, location), n in zip(sides, self._axes, strict=True):
            width, location = width.long(), location.long() % n
            # a full block may begin anywhere
            other = (width < n) & ((width % self.align != 0) | (location % self.align != 0)) & s.live
            if bool(other.any()):
                k = int(other.nonzero()[0])
                raise ValueError(
                    f"`matrix` must have widths and locations at multiples of `align` = {self.align}, or full widths; "
                    f"block {k} has {side}_width {int(width[k])} and {side}_location {int(location[k])}. Fit with this "
                    "`align`, or make the layer with `align=1`."
                )

    def _fractions(self, row: Tensor, col: Tensor) -> Float[Tensor, "2 k"]:
        return torch.stack([row.float() / self.out_features, col.float() / self.in_features]).to(self.width_frac.device)

    def elements(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((row_width, row_location), (col_width, col_location)) in elements, rounded straight through, so that they
        are differentiable.
        """
        if self.width_frac.dtype in _TOO_COARSE:
            raise TypeError(
                f"widths and locations of a Gaudi layer must be in float32; got {self.width_frac.dtype}, in which "
                "places on the axis cannot be told apart. FSDP's MixedPrecisionPolicy(param_dtype=...) casts all "
                "parameters: use torch.autocast in its place."
            )
        if self.rounding:
            row_width, col_width, row_location, col_location = elements(
                self.width_frac, self.location_frac, self._axes, self.align
            )
            return (row_width, row_location), (col_width, col_location)
        row_width, col_width = (w * n for w, n in zip(self.width_frac.clamp(0, 1).unbind(), self._axes, strict=True))
        row_location, col_location = (l * n for l, n in zip(self.location_frac.unbind(), self._axes, strict=True))
        return (row_width, row_location), (col_width, col_location)

    def factors(self, dtype: torch.dtype | None = None) -> tuple[Float[Tensor, "k r out"], Float[Tensor, "k r in"]]:
        """Masked contents: W = sum_k u_k^T v_k of these; in the contents' dtype unless another is given."""
        self.follow_sigma()
        (row_width, row_location), (col_width, col_location) = self.elements()
        u = masked_content_from(self._row_table, self.u, row_width, row_location, dtype)
        v = masked_content_from(self._col_table, self.v, col_width, col_location, dtype)
        return u, v

    def flat_factors(self) -> tuple[Float[Tensor, "ranks out"], Float[Tensor, "ranks in"]]:
        """The factors of W = u^T v, with ranks = num_blocks * block_rank; in autocast's dtype at once."""
        u, v = self.factors(autocast_dtype(self.u))
        return u.flatten(0, 1), v.flatten(0, 1)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """W itself, composed anew at each access, differentiable."""
        u, v = self.flat_factors()
        return u.T @ v

    def composed(self, u: Float[Tensor, "ranks out"], v: Float[Tensor, "ranks in"]) -> Float[Tensor, "out in"]:
        """W of its factors for a product with inputs. In an autocast region without gradients (a refit, an evaluation)
        they are taken anew, and multiplied in their own precision: those of fits that will not be trained may be
        hundreds of times as large as W and cancel, and rounded to half of the bits they would leave another W.
        """
        if torch.is_grad_enabled() or autocast_dtype(self.u) is None:
            return u.T @ v
        with torch.autocast(self.u.device.type, enabled=False):
            u, v = (t.flatten(0, 1) for t in self.factors())
            return u.T @ v

    def composes(self, positions: int) -> bool:
        """Whether composing W takes no more multiplications than chaining the factors, for that many input vectors.

        Where an exported program leaves that number open: whether it holds for every one.
        """
        dense, ranks = self.out_features * self.in_features, self.num_blocks * self.block_rank
        fewer = (ranks + positions) * dense <= positions * ranks * (self.out_features + self.in_features)
        if not torch.compiler.is_exporting():
            return fewer
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # slower to import than all of gblr

        # a branch on the number itself would bind the program to the sizes on one side of it
        return statically_known_true(fewer)

    def _count(self, positions: int) -> None:
        if self.training and not torch.compiler.is_exporting():  # there it may be a symbol
            self.num_positions = positions

    def to_matrix(self) -> GBLRMatrix:
        """The layer with its masks folded into the contents, cropped to where they matter, without dead blocks."""
        self.renew_other_tables()
        with torch.no_grad():
            u, v = self.factors()
            masks_u, masks_v = self._masks()
            row_start, row_size = covering_interval(masks_u.abs() > MASK_THRESHOLD)
            col_start, col_size = covering_interval(masks_v.abs() > MASK_THRESHOLD)
            (row_width, _), (col_width, _) = self.elements()
            live = (row_size > 0) & (col_size > 0) & (row_width > 0) & (col_width > 0)
            structure = Structure(row_size[live], row_start[live], col_size[live], col_start[live])
            return GBLRMatrix(structure, u[live], v[live])

    def _masks(self) -> tuple[Tensor, Tensor]:
        (row_width, row_location), (col_width, col_location) = self.elements()
        row_ones, col_ones = (torch.ones((), device=row_width.device).expand(self.num_blocks, n) for n in self._axes)
        return (
            masked_content_from(self._row_table, row_ones, row_width, row_location),
            masked_content_from(self._col_table, col_ones, col_width, col_location),
        )

    @property
    def structure(self) -> Structure:
        """Present widths and locations, rounded to elements."""
        with torch.no_grad():
            (row_width, row_location), (col_width, col_location) = self.elements()
            rows = row_width.round(), row_location.round() % self.out_features
            cols = col_width.round(), col_location.round() % self.in_features
            return Structure(*(value.long() for value in (*rows, *cols)))

    @property
    def num_mults(self) -> int:
        s = self.structure
        return self.block_rank * int(((s.row_width + s.col_width) * s.live).sum())

    def structure_parameters(self) -> Iterator[nn.Parameter]:
        yield self.width_frac
        yield self.location_frac

    def content_parameters(self) -> Iterator[nn.Parameter]:
        yield self.u
        yield self.v

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves with the module; casts reach the contents only."""
        self.renew_other_tables()  # what comes out of this is marked anew
        kept = {name: getattr(self, name).detach() for name in self._structure_names}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                grad = None if after.grad is None else after.grad.to(before.dtype)
                after.grad = None
                after.data = before.to(after.device)
                after.grad = grad
        self.mark_tables()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Structure is float32 again where it was assigned in another dtype."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, parameter in (("width_frac", self.width_frac), ("location_frac", self.location_frac)):
            if parameter.dtype != torch.float32:
                setattr(self, name, nn.Parameter(parameter.detach().float(), parameter.requires_grad))
        if self.sigma.dtype != torch.float32:
            self.sigma = self.sigma.float()
        if prefix + "sigma" in state_dict and not self.sigma.is_meta:
            self.renew_tables()

    def extra_repr(self) -> str:
        text = f"{self.out_features} x {self.in_features}, block_rank={self.block_rank}, blocks={self.num_blocks}"
        if self.align != 1:
            text += f", align={self.align}"
        if self.width_frac.is_meta:
            return text
        relative = self.num_mults / (self.out_features * self.in_features)
        live = int(self.structure.live.sum())
        cost = f"live={live}, sigma={float(self.sigma):g}, relative_cost={relative:.3f}"
        return f"{text}, {cost}, bias={self.bias is not None}"


class GaudiLinear(GaudiModule):
    """A linear layer that learns where its weight needs parameters: a drop-in for `nn.Linear`.

    `options` are those of `GaudiModule`: `rounding`, `num_blocks`, `relative_cost` (at the start), `device`, `dtype`,
    `generator`.

    >>> layer = GaudiLinear(8, 12, block_rank=2)
    >>> layer(torch.randn(5, 8)).shape
    torch.Size([5, 12])
    >>> layer
    GaudiLinear(12 x 8, block_rank=2, blocks=4, live=4, sigma=inf, relative_cost=1.000, bias=True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        block_rank: int = 1,
        align: int = 1,
        **options: Any,
    ):
        super().__init__(in_features, out_features, block_rank, align, **options)
        self.add_bias(bias, options.get("generator"))

    def forward(
        self, input: Float[Tensor, "*b in"] | None = None, *, x: Float[Tensor, "*b in"] | None = None
    ) -> Float[Tensor, "*b out"]:
        """W x + bias, by composing W or by chaining the factors, whichever takes fewer multiplications for this x."""
        x = one_input(input, x)
        u, v = self.flat_factors()
        positions = x.numel() // self.in_features
        self._count(positions)
        bias = None if self.bias is None else self.bias.to(u.dtype)  # within the product: a pass over y less
        if self.composes(positions):
            return nn.functional.linear(x, self.composed(u, v), bias)
        return nn.functional.linear(x @ v.T, u.T, bias)

    def to_dense_layer(self) -> nn.Linear:
        """The same layer, as it is now, as a plain `nn.Linear`."""
        return dense_linear(self.weight, self.bias)


def _deviation(content: Tensor) -> float:
    """1 where there is but one number."""
    return float(content.float().std()) if content.numel() > 1 else 1.0


def covering_interval(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Start and size of the shortest cyclic interval that covers the True elements of each row: the complement of the
    longest run of False.
    """
    length = inside.shape[-1]
    position = torch.arange(2 * length, device=inside.device)
    twice = torch.cat([inside, inside], dim=-1)
    last_true = torch.where(twice, position, -1).cummax(-1).values  # of the elements up to here
    gap = torch.where(last_true >= 0, position - last_true, position + 1).clamp(max=length)
    longest, end = gap[..., length:].max(-1)  # a run of False ends here, counted around the circle
    empty = ~inside.any(-1)
    start = (end + 1) % length
    return start.masked_fill(empty, 0), (length - longest).masked_fill(empty, 0)
