"""Seconds of a training step, method beside method: `python -m toy_tasks.bench [--methods hybrid m3-soft] [--repeats 15]`

Every method starts from the same student.  The steps are interleaved, so that whatever else the machine does falls on all alike;
quoted are medians, and the ratio of each method's steps to the first one's, step by step.
"""

import argparse
import statistics
import tempfile

import hybrid_rl as H


def measure(methods: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of `repeats` interleaved steps of each method; one step each is taken before to warm up"""
    with tempfile.TemporaryDirectory() as folder:
        runs = {m: H.prepare(H.Config(method=m, out=f"{folder}/{m}", train_prompts=64))[0] for m in methods}
        seconds = {m: [] for m in methods}
        for step in range(repeats + 1):
            for method, run in runs.items():
                seconds[method].append(H.train_step(run, step)["seconds"])
    return {m: values[1:] for m, values in seconds.items()}


def table(seconds: dict[str, list[float]], completions: int) -> str:
    """Median, quartiles, completions a second, and the median ratio to the first method, paired by step"""
    first = next(iter(seconds.values()))
    lines = [f"{'method':18} {'s/step':>7} {'quartiles':>17} {'completions/s':>14} {'ratio':>6}"]
    for method, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(a / b for a, b in zip(values, first))
        lines.append(f"{method:18} {middle:7.3f} {f'{low:.3f} to {high:.3f}':>17} {completions / middle:14.0f} {ratio:6.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m toy_tasks.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=list(H.METHODS), default=list(H.METHODS), help="the first is what the others are compared with")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each method (default: 15)")
    given = parser.parse_args()
    config = H.Config()
    print(table(measure(given.methods, given.repeats), config.prompts_per_step * config.group_size))
