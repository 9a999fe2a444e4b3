"""Which of the papers' claims hold on the toy?  `python -m toy_tasks.claims`: seeds, differences, 95 % intervals, verdicts.

A claim compares two arms on the same seeds: mean difference, Student's t interval, and a verdict that was fixed before the runs.
Runs are kept in --out, so it can be interrupted and go on (after a change of settings name another folder, since they are known
by arm and seed); two of one thread are under way at a time.  The result is written to
toy_tasks/claims.json and claims.png and into the README's table, so that the three cannot disagree.  --quick re-tests the
two strongest with three seeds and writes nothing.
"""

import json
import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev

import torch

import hybrid_rl as H

ROOT = Path(__file__).resolve().parent.parent
SEEDS = range(10, 16)                   # not those on which settings were looked for (0 to 2)
WORKFLOW = "workflow --controls all"
ARMS = {                                # name: words of the command line
    "GRPO": "--method grpo",
    "naive GRPO+OPD": "--method grpo+opd",
    "OPD on negative groups": "--method grpo+opd-negative",
    "the same, constant weight": "--method grpo+opd-negative --opd-coef 0.1 --opd-coef-floor 0.1",
    "+ weighting": "--method rstg --no-sft --select-share 100",
    "+ selection": "--method rstg --no-sft",
    "RSTG": "--method rstg",
    "SFT on negative groups": "--method rstg --no-opd",
    "OPD": "--method opd",
    "hybrid": "--method hybrid --steps 200 --diagnose",
    "M3-Soft": "--method m3-soft --steps 200 --diagnose",
    "hybrid, addition": "--method hybrid --steps 50 --diagnose --task addition --eval-problems 0",
    "hybrid, lr 2e-3": "--method hybrid --steps 200 --lr 2e-3",
    "M3-Soft, lr 2e-3": "--method m3-soft --steps 200 --lr 2e-3",
    "hybrid, lr 3e-3": "--method hybrid --steps 200 --lr 3e-3",
    "M3-Soft, lr 3e-3": "--method m3-soft --steps 200 --lr 3e-3",
    WORKFLOW: WORKFLOW,
}
LOOKED_INTO = ("GRPO", "naive GRPO+OPD", "RSTG", "OPD")         # arms whose last model is compared with the teacher
# What a difference must reach to matter: two points of accuracy, a factor of 1.5, a fiftieth of a nat.
UNITS = {"accuracy": ("%", 2.0), "overlap": ("%", 1.0), "log10 kappa": ("", math.log10(1.5)), "conflict": ("%", 10.0),
         "collapsed": ("%", 20.0), "OPD advantage, negative": ("nats", 0.02)}


@dataclass(frozen=True)
class Claim:
    """left <sense> right, in a quantity; an arm of the workflow is named by its stage"""

    text: str
    paper: str
    left: str
    sense: str                          # ">", "<", ">=", "<=", "differs from", or "is near" a number
    right: str | float
    quantity: str = "accuracy"
    other: str = ""                     # quantity of the right side, where it is another one
    why: str = ""                       # why the toy may differ; kept beside a claim that fails


CLAIMS = (
    Claim("raw-teacher transfer < direct GRPO", "sparse to dense", "raw-opd", "<", "direct-rl"),
    Claim("direct GRPO < RL-teacher transfer, equal labels", "sparse to dense", "direct-rl", "<", "opd-all",
          why="GRPO is ahead on chains of 3 and 4, the bridge on 5 and 6, and the mean over all hides it."),
    Claim("raw-teacher transfer < RL-teacher transfer", "sparse to dense", "raw-opd", "<", "opd"),
    Claim("without warm-up < bridge (warm-up removed costs)", "sparse to dense", "opd-only", "<", "opd",
          why="the student knows the form of an answer before, so its own completions are worth grading from the "
              "start."),
    Claim("teacher-sample SFT < bridge (OPD removed costs)", "sparse to dense", "teacher-sft", "<", "opd",
          why="an answer has two to five tokens, so the teacher's own completions pass nearly all prefixes that the "
              "student's do."),
    Claim("held-out RL beats replay", "sparse to dense", "held-out-rl", ">", "replay-rl",
          why="the student does not learn 256 prompts by heart in 100 steps: a label used again is as good as a new "
              "one."),
    Claim("all four stages > direct GRPO, equal labels", "sparse to dense", "held-out-rl", ">", "direct-rl"),
    Claim("RSTG > GRPO", "RSTG", "RSTG", ">", "GRPO"),
    Claim("RSTG > naive GRPO+OPD", "RSTG", "RSTG", ">", "naive GRPO+OPD",
          why="this teacher is nearly always right, so hearing it everywhere does little harm."),
    Claim("naive GRPO+OPD does not beat GRPO", "RSTG", "naive GRPO+OPD", "<=", "GRPO",
          why="the same; in the paper it fails for two of three pairs of models in mathematics, not for code."),
    Claim("OPD on negative groups only >= on all", "RSTG", "OPD on negative groups", ">=", "naive GRPO+OPD",
          why="the same."),
    Claim("weighting helps", "RSTG", "+ weighting", ">", "OPD on negative groups",
          why="the teacher solves nearly every prompt, so its confidence is close to 1 everywhere."),
    Claim("token selection helps", "RSTG", "+ selection", ">", "+ weighting",
          why="an answer of two to five tokens has no filler that could be left out."),
    Claim("auxiliary SFT helps", "RSTG", "RSTG", ">", "+ selection"),
    Claim("RSTG > SFT on negative groups (ReLIFT-like)", "RSTG", "RSTG", ">", "SFT on negative groups",
          why="a trajectory of so few tokens says nearly all that the teacher knows."),
    Claim("annealed weight >= constant (OPD on negative groups)", "RSTG", "OPD on negative groups", ">=",
          "the same, constant weight"),
    Claim("OPD advantage lower on negative than on positive groups", "RSTG", "GRPO", "<", "GRPO",
          "OPD advantage, negative", "OPD advantage, positive"),
    Claim("RSTG nears the teacher more slowly than OPD (top-4 overlap)", "RSTG", "RSTG", "<", "OPD", "overlap"),
    Claim("kappa varies by task (chains, addition; log10)", "M3", "hybrid", "differs from", "hybrid, addition", "log10 kappa",
          why="both tasks have the same models, tokenizer and length of answers, the paper's have not."),
    Claim("M3-Soft >= naive hybrid", "M3", "M3-Soft", ">=", "hybrid"),
    Claim("M3-Soft avoids a collapse of the hybrid (lr 2e-3; % of seeds)", "M3", "M3-Soft, lr 2e-3", "<", "hybrid, lr 2e-3",
          "collapsed",
          why="at this rate GRPO alone breaks, too: it is the rate and not the teacher, and M3 does not mend it."),
    Claim("the same at lr 3e-3 (% of seeds)", "M3", "M3-Soft, lr 3e-3", "<", "hybrid, lr 3e-3", "collapsed",
          why="the same."),
    Claim("conflict rate near 40 % (% of scored tokens)", "M3", "hybrid", "is near", 40.0, "conflict",
          why="it depends on the task and on how far the teacher is: on addition it is higher, on chains lower."),
)
QUICK = (1, 17)                         # numbers of the two strongest, from 1


def of_two_models(folder: Path, seed: int) -> dict:
    """What takes the last model and the teacher: top-4 overlap, and the mean OPD advantage on all-wrong and all-right groups"""
    run, _, _ = H.prepare(H.Config(method="opd", student=str(folder / "final"), seed=seed), look=True)
    torch.manual_seed(seed)
    problems = run.problems[:128]
    batch = H.rollout(run.student, run.tokenizer, [run.task.prompt(p) for p in problems], 8, temperature=1.0, max_new_tokens=16,
                      micro_batch=256)
    rewards = H.rewards_of(run.task, problems, H.texts_of(run.tokenizer, batch))
    rows = torch.arange(len(batch.mask))
    with torch.no_grad():
        student, teacher = (torch.cat([run.forward(model, batch, some, H.completion_logits)[:, :-1].log_softmax(-1)
                                       for some in rows.split(len(rows))]) for model in (run.student, run.teacher))
    ids, mask = batch.completion_ids[:, :student.shape[1]], batch.mask[:, :student.shape[1]]
    tops = [x.topk(4, dim=-1).indices for x in (student, teacher)]
    shared = (tops[0][..., :, None] == tops[1][..., None, :]).any(-1).float().mean(-1)
    advantage = H.opd_advantages(*(x.gather(-1, ids[..., None]).squeeze(-1) for x in (student, teacher)))
    routes = H.route_groups(rewards.int()).repeat_interleave(8)[:, None]
    of = lambda route: advantage[(routes == route) & mask]
    return {"overlap": 100 * shared[mask].mean().item(),
            **{f"OPD advantage, {name}": of(route).mean().item() if len(of(route)) else None
               for name, route in (("negative", H.NEGATIVE), ("positive", H.POSITIVE))}}


ONE_AT_A_TIME = threading.Lock()        # torch's generator is one for all threads


def folder_of(arm: str, seed: int, out: Path) -> Path:
    return out / f"{arm} {seed}".replace(" ", "_").replace(",", "")


def run(arm: str, seed: int, out: Path) -> dict:
    """{arm or stage: {quantity: value}} of one run, trained if it is not there yet"""
    folder = folder_of(arm, seed, out)
    kept, words = folder / "claims.json", [*ARMS.get(arm, arm).split(), "--seed", seed, "--save-every", 0, "--out", folder]
    if kept.exists():
        return json.loads(kept.read_text())
    words.append("--resume" if arm.startswith("workflow") else "--overwrite")
    done = subprocess.run([sys.executable, str(ROOT / "hybrid_rl.py"), *map(str, words)], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{arm}, seed {seed}: exit code {done.returncode}\n{done.stderr[-500:]}")
    share = lambda answers: 100 * sum(right for right, _ in answers.values()) / sum(asked for _, asked in answers.values())
    if arm.startswith("workflow"):
        values = {row["stage"]: {"accuracy": share(row["after"])} for row in json.loads((folder / "workflow.json").read_text())}
    else:
        after = json.loads((folder / "evaluation.json").read_text())["after"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        known = lambda key: [line[key] for line in lines[:50] if line.get(key) is not None]      # as long as the shortest of them
        values = {arm: ({"accuracy": share(after)} if after else {})
                  | {"collapsed": 100.0 * H.collapsed([line["reward_mean"] for line in lines])}
                  | ({"log10 kappa": math.log10(median(known("kappa"))), "conflict": 100 * mean(known("conflict_rate_scored"))}
                     if known("kappa") else {})}
        if arm in LOOKED_INTO:
            with ONE_AT_A_TIME:
                values[arm] |= of_two_models(folder, seed)
    H.write_json(kept, values)
    return values


T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
         2.101, 2.093)


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t, n - 1 degrees of freedom (table up to 20 seeds)"""
    n, middle = len(differences), mean(differences)
    half = T_975[n - 2] * stdev(differences) / math.sqrt(n)
    return middle, middle - half, middle + half


def verdict(sense: str, low: float, high: float, margin: float) -> str:
    """holds, does not hold or undecided, from the interval of left - right

    ">" holds above 0 and does not hold where even the upper end lies below the margin; ">=" does not hold below 0
    and holds where even the lower end lies above -margin.  "is near" asks whether the interval lies within the margin.
    """
    if sense in ("<", "<="):
        return verdict(sense.replace("<", ">"), -high, -low, margin)
    if sense == ">":
        return "holds" if low > 0 else "does not hold" if high < margin else "undecided"
    if sense == ">=":
        return "does not hold" if high < 0 else "holds" if low > -margin else "undecided"
    inside, outside = -margin < low and high < margin, high < -margin or low > margin
    if sense == "is near":
        return "holds" if inside else "does not hold" if outside else "undecided"
    return "holds" if low > 0 or high < 0 else "does not hold" if inside else "undecided"       # differs from


def judge(claim: Claim, values: dict[int, dict]) -> dict:
    """One claim over the seeds: both sides, the paired difference and its interval, the verdict"""
    unit, margin = UNITS[claim.quantity]
    other = lambda v: claim.right if isinstance(claim.right, float) else v[claim.right][claim.other or claim.quantity]
    pairs = [(v[claim.left][claim.quantity], other(v)) for v in values.values()]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) < 2:
        raise H.UsageError(f"{claim.text}: the quantity has a value in {len(pairs)} seeds, and 2 are needed; give more --seeds")
    middle, low, high = interval([a - b for a, b in pairs])
    word = verdict(claim.sense, low, high, margin)
    if claim.quantity == "collapsed" and not any(b for _, b in pairs):
        word = "undecided"              # nothing collapsed that could have been avoided
    return asdict(claim) | {"unit": unit, "margin": margin, "seeds": len(pairs), "left_mean": mean(a for a, _ in pairs),
                            "right_mean": mean(b for _, b in pairs), "difference": middle, "low": low, "high": high,
                            "verdict": word}


def table(rows: list[dict]) -> str:
    """The claims as a Markdown table"""
    text = ["| claim | paper | left | right | difference | verdict |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = ".2f" if row["unit"] in ("", "nats") else ".1f"
        cell = lambda x: f"{x:{digits}}"
        difference = f"{row['difference']:+{digits}} [{cell(row['low'])}, {cell(row['high'])}] {row['unit']}".rstrip()
        text.append(f"| {row['text']} | {row['paper']} | {cell(row['left_mean'])} | {cell(row['right_mean'])} | {difference} | "
                    f"{row['verdict']} |")
    return "\n".join(text)


COLOURS = {"holds": "#2a7d4f", "does not hold": "#b3372f", "undecided": "#777777"}


def draw(rows: list[dict], target: Path) -> None:
    """A line a claim, turned so that right of 0 is as claimed; accuracy in points, everything else in margins"""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [[row for row in rows if (row["quantity"] == "accuracy") == points] for points in (True, False)]
    figure, axes = pyplot.subplots(2, figsize=(9, 1.5 + 0.3 * len(rows)), height_ratios=[len(part) + 1 for part in parts],
                                   layout="constrained")
    for axis, part, points in zip(axes, parts, (True, False)):
        margin = UNITS["accuracy"][1] if points else 1.0
        axis.axvspan(-margin, margin, color="#dfeaf5", linewidth=0)
        axis.axvline(0, color="black", linewidth=0.8)
        for y, row in enumerate(part):
            unit = (-1 if "<" in row["sense"] else 1) * (1.0 if points else row["margin"])
            axis.plot([row["low"] / unit, row["high"] / unit], [y, y], color=COLOURS[row["verdict"]], linewidth=2)
            axis.plot(row["difference"] / unit, y, "o", color=COLOURS[row["verdict"]], markersize=5)
        axis.set_yticks(range(len(part)), [f"{row['text']}  ({row['verdict']})" for row in part], fontsize=8)
        for tick, row in zip(axis.get_yticklabels(), part):
            tick.set_color(COLOURS[row["verdict"]])
        axis.set(ylim=(len(part) - 0.4, -0.6))
        axis.set_xlabel("points of accuracy, right: as claimed, blue: too small to matter" if points else
                        "other quantities: difference over what would matter (symmetric log scale)", fontsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[1].set_xscale("symlog", linthresh=1)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)


def in_readme(text: str, rows: list[dict]) -> str:
    """The README with this table between its two marks"""
    before, rest = text.split("<!-- claims -->")
    count = lambda word: sum(row["verdict"] == word for row in rows)
    head = (f"{max(row['seeds'] for row in rows)} seeds: {count('holds')} hold, {count('does not hold')} do not, "
            f"{count('undecided')} are undecided.\n\n")
    why = "".join(f"\n- *{row['text']}*: {row['why']}" for row in rows if row["verdict"] != "holds" and row["why"])
    why = f"Why the toy may differ; guesses, but for the first:\n{why}"
    return f"{before}<!-- claims -->\n{head}{table(rows)}\n\n{why}\n<!-- /claims -->{rest.split('<!-- /claims -->')[1]}"


def main() -> int:
    parser = H.OneLineParser(prog="python -m toy_tasks.claims", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="the two strongest claims, three seeds; minutes; writes no table")
    parser.add_argument("--seeds", type=H.number(int), default=len(SEEDS), metavar="N",
                        help=f"seeds, {SEEDS[0]} and on (default: {len(SEEDS)})")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="where the runs are kept (default: runs/claims)")
    parser.add_argument("--judge-only", action="store_true", help="train nothing: judge the seeds that are complete in --out")
    given = parser.parse_args()
    if given.quick and given.seeds != len(SEEDS):
        parser.error("--quick --seeds: choose one, --quick takes three")
    if not 2 <= given.seeds <= len(T_975) + 1:
        parser.error(f"--seeds {given.seeds}: must be 2 to {len(T_975) + 1}")
    from tqdm import tqdm

    torch.set_num_threads(1)
    claims = [CLAIMS[n - 1] for n in QUICK] if given.quick else CLAIMS
    seeds = SEEDS[:3] if given.quick else range(SEEDS[0], SEEDS[0] + given.seeds)
    sides = {side for claim in claims for side in (claim.left, claim.right)}
    arms = [arm for arm in ARMS if arm in sides] + (["workflow" if given.quick else WORKFLOW] if sides & set(H.STAGES) else [])
    out = given.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {given.out}: cannot be written ({error.strerror})")
    if given.judge_only:
        seeds = [seed for seed in seeds if all((folder_of(arm, seed, out) / "claims.json").exists() for arm in arms)]
    if len(seeds) < 2:
        parser.error(f"--judge-only: {len(seeds)} seeds are complete in --out {given.out}, and 2 are needed")
    values: dict[int, dict] = {seed: {} for seed in seeds}
    jobs = [(arm, seed) for seed in seeds for arm in reversed(arms)]            # the longest of a seed first
    with ThreadPoolExecutor(2) as pool, tqdm(total=len(jobs), unit="run") as bar:
        def work(job):
            values[job[1]] |= run(*job, out)
            bar.update()
        list(pool.map(work, jobs))
    try:
        rows = [judge(claim, values) for claim in claims]
    except H.UsageError as error:
        parser.error(str(error))
    print(table(rows))
    if given.quick:
        return 0
    H.write_json(ROOT / "toy_tasks/claims.json", {"arms": ARMS, "seeds": list(seeds), "values": values, "claims": rows})
    (ROOT / "README.md").write_text(in_readme((ROOT / "README.md").read_text(), rows))
    try:
        draw(rows, ROOT / "toy_tasks/claims.png")
    except ImportError:
        print("no figure: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
