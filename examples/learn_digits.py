"""Learn the structure of a small vision transformer from scratch, at a fifth of its cost, on real images.

    python examples/learn_digits.py                 # dense, learned structure and low rank; a few minutes on two cores
    python examples/learn_digits.py --seeds 4       # means over seeds, as in docs/results/digits.json
    python examples/learn_digits.py --smoke         # one epoch, to see that it works

The images are scikit-learn's handwritten digits, which come with it (`pip install '.[demo,hf]'` in the folder of the
repository).
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import gblr
from gblr.data.digits import load_digits
from gblr.data.images import ImageBatches
from gblr.experiments.provenance import code_commit
from gblr.models.vit import ViT

COST = 0.2  # of the multiplications of the converted layers
CONVERTED = gblr.linear_layers(include=("query", "key", "value", "fc1", "fc2"))
METHODS: dict[str, Any] = {
    "dense": None,
    "learned structure": gblr.GaudiConfig(relative_cost=1.0, init="scratch"),  # starts at the cost of dense
    "low rank": gblr.LowRankConfig(relative_cost=COST),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--smoke", action="store_true", help="one epoch, one seed")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.seeds = 1, 1
    rows = [run(method, seed, args.epochs) for method in METHODS for seed in range(args.seeds)]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        mean = {key: statistics.mean(row[key] for row in mine) for key in ("accuracy", "relative_cost", "seconds")}
        print(f"{method:18} {mean['accuracy']:6.2f} % at cost {mean['relative_cost']:.3f}, {mean['seconds']:.0f} s")
    args.out.mkdir(parents=True, exist_ok=True)
    content = {
        "command": f"python examples/learn_digits.py --seeds {args.seeds}",
        "what": "test accuracy (360 images) of a ViT on scikit-learn's digits; costs of the converted layers",
        "commit": code_commit(),
        "torch": torch.__version__,
        "device": f"CPU, {torch.get_num_threads()} threads",
        "rows": rows,
    }
    (args.out / "digits.json").write_text(json.dumps(content, indent=1) + "\n")


def run(method: str, seed: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ViT(image_size=8, patch_size=2, in_channels=1, width=64, depth=3, num_heads=4, mlp_ratio=2)
    if METHODS[method] is not None:
        gblr.convert_(model, METHODS[method], where=CONVERTED)
    learns = method == "learned structure"
    config = gblr.TrainConfig(
        epochs=epochs, lr=3e-3, structure_lr=0.01, warmup=0.1, label_smoothing=0.1, seed=seed, eval_every=epochs,
        budget=gblr.Budget(relative_cost=COST) if learns else None,
        sigma=gblr.SigmaSchedule(1.0, 30.0) if learns else None,
    )  # fmt: skip
    train_images, test_images = load_digits()
    normal: dict[str, Any] = {"mean": (0.3,), "std": (0.37,)}
    train_data = ImageBatches(train_images, batch_size=64, train=True, seed=seed, **normal)
    test_data = ImageBatches(test_images, batch_size=360, train=False, **normal)
    begin = time.perf_counter()
    gblr.train(model, train_data, config=config)
    seconds = time.perf_counter() - begin
    if learns:
        gblr.harden_(model)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_data)
    row = {
        "method": method,
        "seed": seed,
        "accuracy": round(100 * right / len(test_images), 2),
        "relative_cost": round(gblr.cost(model, test_images.images[:1]).relative_cost, 4),
        "seconds": round(seconds, 1),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
