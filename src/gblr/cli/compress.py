"""`gblr compress` and `gblr train`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gblr.cli import show
from gblr.cli.app import AsJson, Debug, app, example
from gblr.cli.recipe import read_recipe

Model = Annotated[
    str,
    typer.Argument(
        help="Hugging Face directory or id, a .gguf file, a folder of gblr, timm:NAME, python:module:function, or "
        "vit:digits.",
        show_default=False,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="digits, cifar10:DIR, an image folder, a text file or folder, a parquet file, or a Hugging Face data set.",
        show_default=False,
    ),
]
_COST = "Share of the dense multiplications that the converted layers may keep"
Costs = Annotated[
    list[float] | None, typer.Option("--cost", help=f"{_COST}; may be repeated, for a run at each. [default: 0.3]")
]
Method = Annotated[str, typer.Option(help="gaudi, low-rank, monarch, pixelfly or blast.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the run; runs/MODEL-METHOD-COST if not given. Of several costs, each has a folder in it."
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        help="Rank of a block: 1 as in the paper, 16 or more for GPUs and wide layers; by the layers if not given."
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Name or pattern of layers to convert; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Name or pattern of layers to leave dense; may be repeated.")]
MaxTrain = Annotated[int | None, typer.Option(help="Use at most so many training samples.")]
MaxEval = Annotated[int | None, typer.Option(help="Use at most so many test samples.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the CPU; small models are faster with 1 or 2.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate; by model and data if not given.")]
StructureRate = Annotated[
    float | None,
    typer.Option(
        help="Learning rate of widths and locations, in fractions of an axis; by model and data if not given."
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples of a training step; by model and data if not given.")]
Baselines = Annotated[
    list[str] | None,
    typer.Option("--baseline", help="A method to compare with, of the same cost and training; may be repeated."),
]


@app.command(epilog=example("gblr compress vit:digits --data digits --cost 0.3 --train 1 --out runs/try"))
def compress(
    model: Model,
    data: Data,
    cost: Costs = None,
    method: Method = "gaudi",
    train: Annotated[float | None, typer.Option("--train", help="Epochs of training after the fit.")] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="Fit only (the default without --train).")] = False,
    calibration: Annotated[int, typer.Option(help="How many inputs weigh the errors of the fit; 0 for none.")] = 256,
    heal: Annotated[
        bool, typer.Option("--heal", help="Refit the layers in order, each on what the compressed model gives it.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Spend the cost where the model's outputs depend on it.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32 or bfloat16: of the model while its fit is prepared; fits stay in float32.")
    ] = "float32",
    distill: Annotated[
        float | None,
        typer.Option(
            help="Share of the training loss, 0 to 1, that aims at the dense model's scores; 0 for labels alone."
        ),
    ] = None,
    out: Out = None,
    block_rank: Rank = None,
    include: Include = None,
    exclude: Exclude = None,
    convolutions: Annotated[bool, typer.Option(help="Convert convolutions too.")] = False,
    baseline: Baselines = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Never load the whole model: block by block, from files to files.")
    ] = False,
    lr: Rate = None,
    structure_lr: StructureRate = None,
    batch_size: BatchSize = None,
    max_train: MaxTrain = None,
    max_eval: MaxEval = None,
    seed: int = 0,
    threads: Threads = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Replace the layers of a trained model by structured ones of a given cost.

    Shows the layers first, then fits, trains if asked, hardens and measures. Ctrl-C keeps what is done, and the same
    command continues.
    """
    if no_train and train:
        raise typer.BadParameter("--train and --no-train exclude each other.")
    costs = list(dict.fromkeys(cost or [0.3]))
    if stream and len(costs) > 1:
        raise typer.BadParameter("--stream makes one model: give one --cost.")
    run = _stream if stream else _run
    run(
        {
            "model": model, "data": data, "cost": costs, "method": method, "epochs": train or 0.0,
            "calibration": calibration, "heal": heal, "sensitivity": sensitivity, "precision": precision,
            "distill": distill, "block_rank": block_rank, "include": tuple(include or ()),
            "exclude": tuple(exclude or ()), "convolutions": convolutions, "baselines": tuple(baseline or ()),
            "lr": lr, "structure_lr": structure_lr, "batch_size": batch_size, "max_train": max_train,
            "max_eval": max_eval, "seed": seed,
        },
        out, threads, as_json,
    )  # fmt: skip


@app.command(epilog=example("gblr train vit:digits --data digits --epochs 2 --out runs/dense"))
def train(
    model: Annotated[str | None, Model.__metadata__[0]] = None,
    data: Annotated[str | None, Data.__metadata__[0]] = None,
    recipe: Annotated[Path | None, typer.Option(help="JSON or TOML file with the options below.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; by model and data if not given.")] = None,
    method: Annotated[str, typer.Option(help="dense, gaudi, low-rank, monarch, pixelfly or blast.")] = "dense",
    cost: Annotated[float | None, typer.Option(help=f"{_COST}; 0.3 if not given, with a method.")] = None,
    out: Out = None,
    block_rank: Rank = None,
    include: Include = None,
    exclude: Exclude = None,
    lr: Rate = None,
    structure_lr: StructureRate = None,
    batch_size: BatchSize = None,
    max_train: MaxTrain = None,
    max_eval: MaxEval = None,
    seed: int = 0,
    threads: Threads = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a model from the weights it has, dense or while its structure is learned from scratch."""
    options: dict[str, Any] = {
        "model": model, "data": data, "cost": cost, "method": method, "epochs": epochs,
        "block_rank": block_rank, "include": tuple(include or ()), "exclude": tuple(exclude or ()), "lr": lr,
        "structure_lr": structure_lr, "batch_size": batch_size, "max_train": max_train, "max_eval": max_eval,
        "seed": seed, "from_scratch": True, "calibration": 0,
    }  # fmt: skip
    options |= read_recipe(recipe) if recipe else {}
    options["cost"] = [(1.0 if options["method"] == "dense" else 0.3) if options["cost"] is None else options["cost"]]
    missing = [name for name in ("model", "data") if not options[name]]
    if missing:
        raise typer.BadParameter(f"give {' and '.join(missing)}, as arguments or in the recipe.")
    _run(options, out, threads, as_json)


def _run(options: dict[str, Any], out: Path | None, threads: int | None, as_json: bool) -> None:
    import torch

    from gblr.training.rng import seed_all
    from gblr.workflows.compress import compress as run
    from gblr.workflows.compress import hint
    from gblr.workflows.listing import list_layers
    from gblr.workflows.model_source import open_model
    from gblr.workflows.settings import check_free
    from gblr.workflows.several import SeveralCosts
    from gblr.workflows.tasks import load_task

    several = [_settings({**options, "cost": cost}) for cost in options["cost"]]
    settings = several[0]
    if threads:
        torch.set_num_threads(threads)
    out = out or Path("runs") / default_name(settings.model, settings.method, *options["cost"])
    costs = SeveralCosts.of(several, out) if len(several) > 1 else None
    if costs is None:
        check_free(out, settings)
    show.say(f"loading {settings.model}")
    seed_all(settings.seed)  # a model may come with random weights
    loaded = open_model(settings.model)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    if settings.from_scratch:
        loaded.pretrained = False  # rates and augmentation for training, not for tuning
    elif loaded.note:
        show.say(f"note: {loaded.note}")
    show.say(f"loading {settings.data}")
    limits = {"max_train": settings.max_train, "max_eval": settings.max_eval}
    task = load_task(settings.data, loaded, seed=settings.seed, **limits)
    show.say(f"{task.name}: {task.what}")
    if task.note:
        show.say(task.note)
    if settings.method != "dense":
        show.say(list_layers(loaded.model, settings, task.example))
    command = shlex.join(["gblr", *sys.argv[1:]])
    if costs is not None:
        _show_several(costs, costs.compress(loaded, task, command, show.say), as_json)
        return
    record = run(settings, loaded, task, out, command, show.say)
    if as_json:
        show.as_json(record)
        return
    show.out.print(show.results(record))
    show.out.print(f"model:  {out / 'model'}\nrecord: {out / 'run.json'}\npage:   gblr report {out}")
    if hint(settings):
        show.say(hint(settings))


def _show_several(costs: Any, records: list[dict[str, Any]], as_json: bool) -> None:
    from gblr.workflows.several import merged

    if as_json:
        show.as_json({"runs": records})
        return
    folders = shlex.join(map(str, costs.folders))
    show.out.print(show.results(merged(records)))
    show.out.print(f"models: {costs.out}/COST/model\npage:   gblr report {folders}", soft_wrap=True)


def _stream(options: dict[str, Any], out: Path | None, threads: int | None, as_json: bool) -> None:
    import os

    import torch

    from gblr.workflows.settings import check_free
    from gblr.workflows.stream import stream

    settings = _settings({**options, "cost": options["cost"][0]})
    if threads:
        torch.set_num_threads(threads)
    out = out or Path("runs") / default_name(settings.model, settings.method, settings.cost)
    check_free(out, settings)
    report = stream(settings, out, show.say)
    if int(os.environ.get("RANK", 0)):
        return
    if as_json:
        show.as_json(report.to_dict())
        return
    show.out.print(report)
    show.out.print(f"model: {out / 'model'}")


def _settings(options: dict[str, Any]) -> Any:
    from gblr.workflows.settings import Settings, check_used

    try:
        settings = Settings(**options)
        check_used(settings)
        return settings
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def default_name(model: str, method: str, *costs: float) -> str:
    """Several costs have a folder each in that.

    >>> default_name("sentence-transformers/all-MiniLM-L6-v2", "gaudi", 0.5)
    'all-MiniLM-L6-v2-gaudi-0.5'
    """
    stem = model.rstrip("/").replace(":", "-").split("/")[-1]
    return f"{stem}-{method}" + ("" if method == "dense" or len(costs) > 1 else f"-{costs[0]:g}")
