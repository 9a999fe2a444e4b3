"""Draws a run: reward and the shares of the three kinds of groups over the steps.  Needs matplotlib, which is optional."""

import json
from pathlib import Path


def plot_run(folder: Path, target: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for key, label in (("reward_mean", "reward"), ("negative_share", "all-wrong groups"), ("mixed_share", "mixed groups"),
                       ("positive_share", "all-right groups")):
        axis.plot([line["step"] for line in lines], [line.get(key) for line in lines], label=label, linewidth=1)
    axis.set(xlabel="step", ylabel="share", ylim=(0, 1))
    axis.legend(frameon=False)
    figure.savefig(target, dpi=150, bbox_inches="tight")
