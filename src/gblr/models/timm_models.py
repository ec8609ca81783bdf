"""timm, also where its torchvision was built for CUDA and torch is a CPU build: that pair fails to import."""

import importlib
import sys
from typing import Any

import torch

_SCHEMAS: list[torch.library.Library] = []  # a schema lives as long as its library object


def import_timm() -> Any:
    """The module `timm`. The two operators that a CUDA torchvision lacks beside a CPU torch are declared, not defined:
    nothing in timm's models calls them.
    """
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install -c constraints.txt 'gblr[timm]'. Without the constraints pip "
            "may replace torch."
        ) from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] in ("torchvision", "timm")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _SCHEMAS.append(library)
    return importlib.import_module("timm")
