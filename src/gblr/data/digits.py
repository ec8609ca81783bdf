"""scikit-learn's digits: 1,797 real 8 x 8 images of handwritten digits that ship with the package."""

import torch
from torch import Tensor

from gblr.data.images import ImageSet

NUM_TEST = 360


def load_digits(seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Training and test images, (n, 1, 8, 8) with values of 0 to 1, split at random with `seed`."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'gblr[demo]'.") from error
    raw = datasets.load_digits()
    images: Tensor = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return ImageSet(images[train], labels[train]), ImageSet(images[test], labels[test])
