"""gblr: neural networks that learn where each weight matrix needs its parameters."""

import gblr.fitting.blast
import gblr.fitting.gblr
import gblr.fitting.low_rank
import gblr.fitting.monarch
import gblr.fitting.pixelfly  # noqa: F401  each registers how its config is fitted
from gblr.conversion.calibration import Calibration, calibrate
from gblr.conversion.checkpoint import from_pretrained, load_, save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.cost import cost
from gblr.conversion.export_onnx import export_onnx
from gblr.conversion.filters import conv_layers, linear_layers
from gblr.conversion.harden import densify_, harden_
from gblr.fitting.config import BlastConfig, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.fitting.fit import fit
from gblr.layers.conv import GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support
from gblr.matrices.structure import Structure, interpolate
from gblr.ops.masked_content import masked_content
from gblr.ops.masks import boxcar_mask, gaudi_mask, round_ste
from gblr.ops.prox import soft_shrink
from gblr.training.budget import Budget
from gblr.training.distillation import TaughtLoss
from gblr.training.heal import HealResult, heal_
from gblr.training.learner import StructureLearner
from gblr.training.loop import TrainResult, train
from gblr.training.param_groups import param_groups
from gblr.training.schedules import SigmaSchedule
from gblr.training.train_config import TrainConfig

__version__ = "0.1.0"

__all__ = [
    "BlastConfig",
    "BlastMatrix",
    "Budget",
    "Calibration",
    "GBLRMatrix",
    "GaudiConfig",
    "GaudiConv2d",
    "GaudiLinear",
    "HealResult",
    "LowRankConfig",
    "LowRankMatrix",
    "MonarchConfig",
    "MonarchMatrix",
    "PackedGBLR",
    "PixelflyConfig",
    "PixelflyMatrix",
    "SigmaSchedule",
    "Structure",
    "StructureLearner",
    "StructuredConv2d",
    "StructuredLinear",
    "TaughtLoss",
    "TrainConfig",
    "TrainResult",
    "boxcar_mask",
    "butterfly_support",
    "calibrate",
    "conv_layers",
    "convert_",
    "cost",
    "densify_",
    "export_onnx",
    "fit",
    "from_pretrained",
    "gaudi_mask",
    "harden_",
    "heal_",
    "interpolate",
    "linear_layers",
    "load_",
    "masked_content",
    "param_groups",
    "round_ste",
    "save_pretrained",
    "soft_shrink",
    "train",
]
