"""What a run leaves to read: a row per evaluation in memory and in `history.jsonl`, and curves for TensorBoard."""

import json
import os
from pathlib import Path
from typing import Any

from gblr.progress import duration

Row = dict[str, Any]
_FIRST = ("train_loss", "loss", "accuracy", "perplexity", "relative_cost")
_UNSHOWN = ("step", "epoch", "seconds", "lr", "live_blocks", "mean_width", "sigma", "threshold")


class Records:
    """Rows of this run, those before an interruption included. Without `out` they stay in memory."""

    def __init__(self, out: Path | None, tensorboard: bool, rows: list[Row]):
        self.rows = rows
        self._file = out / "history.jsonl" if out else None
        self._board = _board(out) if tensorboard else None
        if self._file:
            self._rewrite(self._file)

    def _rewrite(self, file: Path) -> None:
        """Rows after the checkpoint, if there were any, will be made again."""
        new = file.with_name(f".{file.name}.new")
        new.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(new, file)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self._board:
            for name in row.keys() - {"step"}:
                self._board.add_scalar(name, row[name], row["step"])
            self._board.flush()

    def close(self) -> None:
        if self._board:
            self._board.close()


def line_of(row: Row, total_steps: int) -> str:
    """One line per evaluation.

    >>> line_of({"step": 40, "epoch": 2.0, "seconds": 61.0, "train_loss": 0.51234, "accuracy": 0.9}, 200)
    'epoch 2, step 40 of 200, 61 s: train_loss 0.5123, accuracy 0.9000'
    """
    others = [name for name in row if name not in (*_FIRST, *_UNSHOWN)]
    values = ", ".join(f"{name} {row[name]:.4f}" for name in (*_FIRST, *others) if name in row)
    return (
        f"epoch {round(row['epoch'], 2):g}, step {row['step']} of {total_steps}, {duration(row['seconds'])}: {values}"
    )


def _board(out: Path | None) -> Any:
    if out is None:
        raise ValueError("`tensorboard=True` needs a folder to write to; give `out`.")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("`tensorboard=True` needs TensorBoard: pip install tensorboard") from error
    return SummaryWriter(str(out / "tensorboard"))
