"""`load_task`: whatever a user calls data, as a task for a model."""

from gblr.data.digits import load_digits
from gblr.models.load import LoadedModel
from gblr.workflows.image_task import ImageData, image_task
from gblr.workflows.task import Task

__all__ = ["Task", "load_task"]

FORMS = (
    "digits, cifar10:DIR, a folder of images (one subfolder a class), a text file or folder (.txt, .jsonl), a parquet "
    "file or folder, or the id of a Hugging Face data set"
)


def load_task(
    source: str,
    loaded: LoadedModel,
    *,
    seed: int = 0,
    max_train: int | None = None,
    max_eval: int | None = None,
) -> Task:
    """The task that `source` is for the model `loaded`; at most `max_train` and `max_eval` samples of it."""
    if source == "digits":
        return _digits(source, loaded, seed, max_train, max_eval)
    raise ValueError(f"no data {source!r}. Data is {FORMS}.")


def _digits(source: str, loaded: LoadedModel, seed: int, max_train: int | None, max_eval: int | None) -> Task:
    train, test = load_digits()  # one split for all seeds: scores stay comparable
    train, test = type(train)(*train[:max_train]), type(test)(*test[:max_eval])
    return image_task(ImageData(train, test, 10, mean=(0.3,), std=(0.37,)), source, loaded, seed)
