"""`gblr compress --stream`: a model of Hugging Face that is larger than memory, fitted without ever loading it, and
refitted by `--heal`.

out/settings.json       what was asked for; the same command continues, another one is refused
out/model/              the result, as `gblr.save_pretrained` writes it, and the tokenizer
"""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gblr.conversion.model_files import open_model_files
from gblr.conversion.report import Report
from gblr.conversion.streaming import convert_streaming
from gblr.data.splits import train_and_test
from gblr.data.text import is_text, read_texts
from gblr.models.hugging_face import describe
from gblr.models.load import LoadedModel
from gblr.workflows.block_ranks import with_block_rank
from gblr.workflows.language_task import language_task
from gblr.workflows.listing import list_layers
from gblr.workflows.measuring import measuring, note_on
from gblr.workflows.settings import Settings, claimed
from gblr.workflows.task import Request, Task
from gblr.workflows.text_choice import check_reads_text, reads_lines
from gblr.workflows.text_tasks import some_of, text_set
from gblr.workflows.variants import Say, config_of, where_of


class Weightless(LoadedModel):
    """A model whose weights are on the meta device; its data is on the CPU all the same."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def stream(settings: Settings, out: Path, say: Say = print) -> Report:
    """Converts block by block into `out/model`; goes on where it was when called again with the same settings."""
    check(settings)
    first = int(os.environ.get("RANK", 0)) == 0
    say = say if first else lambda line: None
    source = Path(settings.model).expanduser()
    model, _ = open_model_files(source)
    loaded = Weightless(**vars(describe(model, settings.model, str(source))))
    batches = None
    if settings.calibration:
        say(f"reading {settings.calibration} samples of {settings.data} for calibration")
        batches = calibration_batches(settings, loaded)
    settings = with_block_rank(settings, model)
    say(list_layers(model, settings))
    config = config_of(settings, settings.method)
    if note := note_on(settings.precision, device := "cuda" if torch.cuda.is_available() else "cpu"):
        say(note)
    with claimed(out, settings) if first else nullcontext(), measuring(settings.precision, device):
        report = convert_streaming(source, out / "model", config, where_of(settings), batches, refit=settings.heal)
    if first and loaded.tokenizer is not None and hasattr(loaded.tokenizer, "save_pretrained"):
        loaded.tokenizer.save_pretrained(out / "model")
    return report


def check(settings: Settings) -> None:
    if settings.epochs or settings.baselines or settings.sensitivity:
        raise ValueError("--stream fits, and refits by --heal: leave out --train, --sensitivity and --baseline.")
    if settings.max_eval is not None:
        raise ValueError("--stream measures nothing: leave out --max-eval.")
    if not Path(settings.model).expanduser().is_dir():
        raise FileNotFoundError(
            f"--stream reads the directory of a Hugging Face model; there is none at {settings.model}. Download the "
            f"model first: huggingface-cli download {shlex.quote(settings.model)} --local-dir DIR."
        )


def calibration_batches(settings: Settings, loaded: LoadedModel) -> list[Any]:
    """Windows of text for a language model, the same as without --stream; for an encoder texts of any part."""
    path = Path(settings.data).expanduser()
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    if not any(is_text(file) for file in files):
        raise ValueError(
            f"--stream reads texts for calibration (.txt, .jsonl, .xz or .gz behind it allowed); {settings.data} has "
            "none. Use --calibration 0, or `gblr.conversion.streaming.convert_streaming` with batches of your own."
        )
    check_reads_text(loaded, settings.data)
    splits = read_texts(path, by_line=reads_lines(loaded))
    train, test = train_and_test(splits)
    if train is None:
        train, test = next(iter(splits.values())), None
    request = Request(settings.data, loaded, settings.seed, settings.max_train, settings.max_eval)
    if loaded.kind == "causal language model":
        return language_task(train, test, request).calibration(settings.calibration)
    texts = text_set(some_of(train, settings.max_train or settings.calibration, settings.seed), loaded)
    task = Task("outputs of the dense model", settings.data, "", "", "", True, texts, lambda model: 0.0)
    return task.calibration(settings.calibration)
