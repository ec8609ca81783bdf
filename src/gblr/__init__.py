"""gblr: neural networks that learn where each weight matrix needs its parameters."""

from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support
from gblr.matrices.structure import Structure, interpolate
from gblr.ops.masked_content import masked_content
from gblr.ops.masks import boxcar_mask, gaudi_mask, round_ste
from gblr.ops.prox import soft_shrink

__version__ = "0.1.0"

__all__ = [
    "BlastMatrix",
    "GBLRMatrix",
    "LowRankMatrix",
    "MonarchMatrix",
    "PixelflyMatrix",
    "Structure",
    "boxcar_mask",
    "butterfly_support",
    "gaudi_mask",
    "interpolate",
    "masked_content",
    "round_ste",
    "soft_shrink",
]
