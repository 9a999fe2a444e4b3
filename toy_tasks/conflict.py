"""Do reward and teacher fight on the toy?  `python -m toy_tasks.conflict`: kappa, conflict, drowning, collapse, over seeds.

Trains the naive mix and M3 in three regimes and prints three tables.  Runs are kept in --out, so it can be interrupted and go on.
Two runs of one thread are under way at a time.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

import hybrid_rl as H
from toy_tasks import MODELS

ROOT = Path(__file__).resolve().parent.parent
REGIMES = {"lr 1e-3": {"lr": 1e-3}, "teacher = student at step 0": {"lr": 1e-3, "teacher": str(MODELS / "student")},
           "lr 2e-3": {"lr": 2e-3}, "lr 3e-3": {"lr": 3e-3}}
ARMS = [(regime, method) for regime in REGIMES for method in ("hybrid --diagnose", "m3-soft --diagnose")]
ARMS += [("lr 1e-3", "m3-select --diagnose"), ("lr 1e-3", "m3-select --exact-gate --diagnose")]
ARMS += [(regime, "grpo") for regime in ("lr 1e-3", "lr 2e-3", "lr 3e-3")]      # the reward alone, for comparison


def run(arm: tuple[str, str], seed: int, steps: int, out: Path) -> dict:
    """Metrics and accuracy of one run, trained if it is not there yet"""
    regime, words = arm
    folder = out / f"{regime} {words} {seed} {steps}".replace(" --", "+").replace(" ", "-").replace("=", "is")
    if not (folder / "final").exists():
        flags = [f"{H.flag_of(k)}={v}" for k, v in (REGIMES[regime] | {"steps": steps, "seed": seed, "out": folder, "save_every": 0}).items()]
        done = subprocess.run([sys.executable, ROOT / "hybrid_rl.py", "--method", *words.split(), *flags, "--overwrite"],
                              cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{arm}, seed {seed}: exit code {done.returncode}\n{done.stderr[-500:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    after = json.loads((folder / "evaluation.json").read_text())["after"]
    return {"lines": lines, "accuracy": 100 * sum(right for right, _ in after.values()) / sum(asked for _, asked in after.values())}


def seeds_cell(values: list[float | None], digits: str = ".2f") -> str:
    """Mean over seeds and their range"""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return f"{mean(known):{digits}} [{min(known):{digits}}, {max(known):{digits}}]" if known else "-"


def over(lines: list[dict], key: str, how=mean) -> float | None:
    known = [line[key] for line in lines if line.get(key) is not None]
    return how(known) if known else None


def report(results: dict[tuple, list[dict]]) -> str:
    """The three tables; a cell is the mean over seeds and their range"""
    text = ["Over training: first and last fifth of the steps.  Mean over seeds [lowest, highest seed]; kappa is a median over steps.\n",
            f"{'regime':28}{'method':24}{'steps':7}{'reward':20}{'kappa':24}{'cos phi':22}{'conflict, all':20}{'conflict, scored':20}{'L_D':23}"]
    results = {(regime, method.replace(" --diagnose", "")): runs for (regime, method), runs in results.items()}
    watched = {arm: runs for arm, runs in results.items() if arm[1] != "grpo"}
    for (regime, method), runs in watched.items():
        fifth = len(runs[0]["lines"]) // 5
        for name, part in (("first", slice(0, fifth)), ("last", slice(-fifth, None))):
            cell = lambda key, digits=".2f", how=mean: seeds_cell([over(r["lines"][part], key, how) for r in runs], digits)
            text.append(f"{regime:28}{method:24}{name:7}{cell('reward_mean'):20}{cell('kappa', '.3g', median):24}{cell('cos_phi'):22}"
                        f"{cell('conflict_rate'):20}{cell('conflict_rate_scored'):20}{cell('distillation_loss', '.3f'):23}")
    text += ["\nDrowning: <g_D, g> < 0 predicts that the step raises L_D (a theorem for small plain steps; training is AdamW).",
             "Steps of all seeds; how often L_D on the step's completions really rose where it was predicted, and where it was not.\n",
             f"{'regime':28}{'method':24}{'steps':>6}{'predicted':>11}{'rose | predicted':>18}{'rose | not':>12}"]
    for (regime, method), runs in watched.items():
        steps = [line for r in runs for line in r["lines"] if line["drowning"] is not None]
        rose = lambda some: f"{100 * mean(line['distillation_change'] > 0 for line in some):.0f} %" if some else "-"
        yes, no = ([line for line in steps if line["drowning"] is wanted] for wanted in (True, False))
        text.append(f"{regime:28}{method:24}{len(steps):6}{100 * len(yes) / max(1, len(steps)):9.1f} %{rose(yes):>18}{rose(no):>12}")
    text += ["\nWhat came of it: accuracy on held-out problems, all difficulties; runs whose reward lay under 0.05 for ten steps in a row (collapse);",
             "share of scored tokens at which residual and exact K_DR have the same sign, first and last fifth (logged with --exact-gate).\n",
             f"{'regime':28}{'method':24}{'accuracy, %':22}{'collapsed':11}{'same sign, first':20}{'same sign, last':20}"]
    for (regime, method), runs in results.items():
        fifth = len(runs[0]["lines"]) // 5
        agreement = [seeds_cell([over(r["lines"][part], "kernel_agreement") for r in runs]) for part in (slice(0, fifth), slice(-fifth, None))]
        fell = sum(H.collapsed([line["reward_mean"] for line in r["lines"]]) for r in runs)
        text.append(f"{regime:28}{method:24}{seeds_cell([r['accuracy'] for r in runs], '.1f'):22}{f'{fell} of {len(runs)}':11}{agreement[0]:20}{agreement[1]:20}")
    return "\n".join(line.rstrip() for line in text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toy_tasks.conflict", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of an arm (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/conflict"), help="where the runs are kept (default: runs/conflict)")
    given = parser.parse_args()
    from tqdm import tqdm

    jobs = [(arm, seed) for seed in range(given.seeds) for arm in ARMS]
    with ThreadPoolExecutor(2) as pool, tqdm(total=len(jobs), unit="run") as bar:
        def work(job):
            result = run(*job, given.steps, given.out.resolve())
            bar.update()
            return result
        results = list(pool.map(work, jobs))
    print(report({arm: [r for (a, _), r in zip(jobs, results) if a == arm] for arm in ARMS}))


if __name__ == "__main__":
    main()
