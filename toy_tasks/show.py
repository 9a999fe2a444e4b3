"""One batch explained, token by token: python -m toy_tasks.show   (--html FILE for a page to print and to hang on the wall)

Takes the models, questions and settings that `python hybrid_rl.py train` takes, samples the batch that the step would train on,
and answers for one completion of each kind of group (all wrong, mixed, all right): who trains this token, and why?
Every number comes from hybrid_rl.py.  A kind that the batch lacks is looked for in the steps that follow, taken in memory as
the method takes them.  RSTG's omega is sampled anew for these prompts alone (--teacher-pool takes a run's).  No run folder is written.
"""

import argparse
import html
import os
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from string import Template

import torch

import hybrid_rl as H

WIDTH = 100
KINDS = {H.NEGATIVE: "ALL WRONG", H.MIXED: "MIXED", H.POSITIVE: "ALL RIGHT"}
ROUTES = {H.NEGATIVE: "negative", H.MIXED: "mixed", H.POSITIVE: "positive"}
RUN_ONLY = ("steps", "eval_problems", "out", "save_every", "overwrite", "resume", "plot", "probe", "diagnose")

# Key, heading, width, what it is.  The last column has no width: it takes what is left of the line.
COLUMNS = (
    ("token", "token", 10, "y_t, the token that was sampled"),
    ("p_s", "p_S", 5, "the student's probability of it, after all that stands before"),
    ("p_t", "p_T", 5, "the teacher's"),
    ("entropy", "H", 4, "entropy of p_S over the vocabulary, nats: is the student unsure?"),
    ("a_opd", "A_opd", 6, "log p_T(y) - log p_S(y): does the teacher like it better (+) or less (-) than the student?"),
    ("score", "score", 5, "Soft-OR h + d - h d of min-max scaled h = H, d = |A_opd|, over the tokens that hear the teacher"),
    ("selected", "sel", 3, "among the best-scored tokens of its completion"),
    ("a_grpo", "A_grpo", 6, "(r - mean r) / (std r + eps) of its group: the reward's word, the same for every token"),
    ("k_dr", "K_DR", 4, "sign of delta_D . delta_R, teacher's pull p_S - p_T and reward's -A_grpo (e_y - p_S); minus: they conflict, 0: one is silent"),
    ("cosine", "cos", 5, "cosine of the two"),
    ("gate", "gate", 4, "the teacher's share alpha, "),
    ("stream", "trained by", 0, "reward, teacher, both or nobody, and why"),
)


@dataclass
class Seen:
    """What there is to see of one step's batch; `tokens` are columns {name: (B, T) as lists}"""

    step: int
    prompts: list[str]
    rollouts: H.Rollouts
    rewards: torch.Tensor               # (N, G)
    routes: list[int]                   # (N,)
    confidence: list[float]             # (N,)
    opd_coef: float
    tokens: dict[str, list]
    summary: str


def looking_run(run: H.Run) -> H.Run:
    """The run itself where its method reads tau; else one that lets every token be seen, however far away the teacher is."""
    readers = lambda name: H.users_of(H.Config.__dataclass_fields__[name])
    if run.config.method in readers("divergence_clip"):
        return run
    common = {f.name: getattr(run.config, f.name) for f in fields(H.Config) if len(readers(f.name)) == len(H.METHODS) and f.name != "method"}
    return replace(run, config=H.Config(**common, method="hybrid", divergence_clip=0.7))


def sample(run: H.Run, step: int) -> tuple[list[str], H.Rollouts, torch.Tensor, list[float]]:
    """The batch that train_step(run, step) trains on, with the teacher's confidence in its prompts alone."""
    config, row = run.config, run.config.row
    problems = H.step_problems(run.problems, step, config.prompts_per_step, config.seed)
    prompts = [run.task.prompt(p) for p in problems]
    if (row.imitation or row.weighted) and (new := [p for p in problems if run.task.prompt(p) not in run.pool]):
        run.pool |= H.make_pool(run.teacher, run.tokenizer, run.task, new, config)
    torch.manual_seed(config.seed * 1_000_003 + step)       # as train_step
    if row.rollouts == "pool":          # sft samples nothing; the student's own answers say which kind a prompt is of
        made = H.rollout(run.student, run.tokenizer, prompts, config.group_size, temperature=config.temperature,
                         max_new_tokens=config.max_new_tokens, micro_batch=config.micro_batch)
        rewards = H.rewards_of(run.task, problems, H.texts_of(run.tokenizer, made)).to(made.mask.device)
    else:
        made, rewards = H.collect(run, problems)
    return prompts, made, rewards, [run.pool[p]["confidence"] if run.pool else 1.0 for p in prompts]


def summary_of(step: int, routes: list[int], mask: torch.Tensor, k_dr: torch.Tensor, kernel: torch.Tensor | None) -> str:
    """One sentence about a batch: groups by kind, conflicts, and how the residual form of K_DR compares with the exact one if given"""
    rate, scored_rate = H.conflict_rate(k_dr, mask)
    percent = lambda x: f"{100 * x:.0f} %"
    groups = f"Step {step}: {len(routes)} groups, " + ", ".join(f"{routes.count(r)} {kind.lower()}" for r, kind in KINDS.items())
    if scored_rate.isnan():
        return f"{groups}; at no token do both reward and teacher speak."
    agree = ""
    if kernel is not None:
        scored = (kernel[0] != 0) & mask
        same = (kernel[0].sign() == k_dr.sign())[scored].float().mean()
        agree = f"; residual and exact K_DR have the same sign at {percent(same)} of the {int(scored.sum())} former"
    return f"{groups}; reward and teacher conflict (K_DR < 0) at {percent(scored_rate)} of the tokens where both speak, {percent(rate)} of all tokens{agree}."


def look(run: H.Run, step: int, exact: bool = False) -> Seen:
    """Samples the batch of a step and computes all that is shown of it; nothing is trained."""
    config, row, looking = run.config, run.config.row, looking_run(run)
    prompts, made, rewards, trust = sample(run, step)
    hybrid = config.method in H.users_of(H.Config.__dataclass_fields__["opd_coef"])
    opd_coef = H.anneal(step, config.opd_coef, config.opd_coef_slope, config.opd_coef_floor) if hybrid else 1.0
    confidence, outcomes = torch.tensor(trust, device=rewards.device), (rewards == 1).int()
    signals, _ = H.listen(run, made, rewards, confidence, opd_coef)
    mask = signals.weights != 0
    grpo = H.group_advantages(rewards, scale=config.advantage_scale, ddof=config.advantage_ddof, eps=config.advantage_eps,
                              baseline=config.baseline).reshape(-1, 1).expand(mask.shape).masked_fill(~mask, 0.0)
    everyone = made.mask.any(dim=1)
    (logp, entropy), (logp_t, _) = (run.score_all(model, made, everyone) for model in (run.student, run.teacher))
    k_dr, cosine, far = torch.zeros(3, *mask.shape, device=mask.device)
    for index in run.chunks(made, everyone):
        with torch.no_grad():
            student, teacher = (H.upcast(z) / config.temperature for z in H.aligned_logits(run, made, index))
        cut = lambda x: x[index, :student.shape[1]]
        pair = H.two_residuals(looking.config, student, teacher, cut(made.completion_ids), cut(grpo), cut(mask))
        for whole, part in ((k_dr, H.cross_signal_ntk(*pair)), (cosine, H.cross_signal_ntk(*map(H.unit_residual, pair))),
                            (far, H.generalized_jsd(student, teacher, config.jsd_share) > looking.config.divergence_clip)):
            whole[index, :student.shape[1]] = part.to(whole.dtype)
    a_opd = H.opd_advantages(logp, logp_t)
    hears = (H.listening(outcomes, row.where) & ((confidence > 0)[:, None] | (not row.weighted))).reshape(-1, 1) & mask
    scores = H.token_scores(entropy, a_opd.abs(), hears)
    chosen = H.select_tokens(scores, hears, config.select_share) if row.selected and row.distillation else hears
    routes, kernel = H.route_groups(outcomes).tolist(), H.exact_kernel(looking, made, replace(signals, reward=grpo)) if exact else None
    summary = summary_of(step, routes, mask, k_dr, kernel)
    if exact:
        k_dr, cosine = kernel
    gate = (H.select_gate(k_dr, config.max_teacher_share) if row.join in ("select", "eg") else
            H.soft_gate(cosine, config.max_teacher_share, config.gate_sharpness))
    columns = {"p_s": logp.exp(), "p_t": logp_t.exp(), "entropy": entropy, "a_opd": a_opd, "score": scores, "selected": chosen, "a_grpo": grpo,
               "k_dr": k_dr, "cosine": cosine, "gate": gate, "hears": hears, "far": far.bool(), "live": mask, "reward": signals.reward,
               "teacher": signals.distillation}
    return Seen(step, prompts, made, rewards, routes, trust, opd_coef, {name: x.tolist() for name, x in columns.items()}, summary)


def stream_of(config: H.Config, route: int, omega: float, token: dict) -> tuple[str, str]:
    """Who trains a token under this method, "reward", "teacher", "both" or "nobody", and why"""
    row, gate = config.row, token["gate"]
    pg, direction = row.distillation == "pg", lambda x: "up" if x > 0 else "down"
    reward, teacher = (token[name] if token["live"] and row.rollouts != "pool" else 0.0 for name in ("reward", "teacher"))
    clipped, shut = bool(teacher and row.reward and not pg and token["far"]), row.m3 and gate == 0
    if clipped or shut:
        teacher = 0.0
    share = gate if row.m3 else config.teacher_share
    if reward:
        word = f"reward {direction(reward)}" if teacher else direction(reward)
        if teacher:
            return "both", f"{word}, " + (f"teacher {direction(teacher)}" if pg else f"ahead {share:.2f}" if row.join == "eg" else f"teacher {share:.2f}")
        left = f" x{1 - gate:.2f}" if row.m3 and row.join != "eg" and gate else ""       # the gate takes from the reward all the same
        return "reward", word + left + (", teacher far" if clipped else ", teacher opposes" if shut else "")
    if teacher:
        if pg:
            return "teacher", direction(teacher) + (f", omega {omega:.2f}" if row.weighted else "")
        return "teacher", "whole distribution" if not row.reward else "look-ahead only" if row.join == "eg" else f"share {share:.2f}"
    why = ("it never ended" if not token["live"] else "trajectory only" if row.rollouts == "pool" or (
               row.imitation and not row.distillation and route == H.NEGATIVE) else
           "teacher far" if clipped else "teacher never right" if row.weighted and route == H.NEGATIVE and not omega else
           "not selected" if pg and token["hears"] and not token["selected"] else "teacher agrees" if pg and token["hears"] else
           {H.NEGATIVE: "silent, all wrong", H.MIXED: "advantage 0", H.POSITIVE: "silent, all right"}[route])
    return "nobody", why


def sentence_of(config: H.Config, route: int, omega: float, opd_coef: float, trajectory: bool) -> str:
    """What the method does with a group, in plain words"""
    row = config.row
    imitates = row.imitation == "all" or (row.imitation and route == H.NEGATIVE)
    copy = "the teacher's shortest correct trajectory is imitated" if trajectory else "there is none of its trajectories to imitate, since none was right and ended"
    if row.rollouts == "pool":
        return f"The student's own completions are not trained on: {copy}."
    reward = ("This method does not read the reward" if not row.reward else "GRPO pushes the tokens of right completions up and of wrong ones down"
              if route == H.MIXED else "Equal rewards leave GRPO silent")
    if row.distillation is None:
        teacher = f"the teacher is not heard{'' if row.imitation else ' by this method, its columns are for comparison'}"
    elif (row.where, route) in (("negative", H.MIXED), ("negative", H.POSITIVE), ("failed", H.POSITIVE)):
        teacher = "the teacher is not heard here"
    elif row.weighted and not omega:
        teacher = "the teacher never solves it either, so it is not heard"
    elif row.distillation == "pg":
        weight = " x ".join([f"{opd_coef:.3g}"] * row.reward + [f"omega {omega:.2f}"] * row.weighted) 
        teacher = (f"the teacher grades {'the tokens of wrong completions' if row.where == 'failed' else 'the tokens'} by A_opd{', times ' * bool(weight)}{weight}" +
                   (f", on the {config.select_share:g} % with the highest score" if row.selected else ""))
    elif not row.reward:
        teacher = "the teacher's whole distribution pulls at every token"
    else:
        teacher = f"the teacher pulls wherever it is within {config.divergence_clip:g} nats of the student ({row.summary})"
    return f"{reward}; {teacher}" + (f", and {copy}." if imitates else ".")


def tokens_of(seen: Seen, config: H.Config, b: int) -> list[dict]:
    """The tokens of a completion: its columns by name, and the stream that trains each"""
    group = b // seen.rewards.shape[1]
    tokens = [{name: column[b][t] for name, column in seen.tokens.items()} for t in range(int(seen.rollouts.mask[b].sum()))]
    return [token | {"stream": stream_of(config, seen.routes[group], seen.confidence[group], token)} for token in tokens]


def pick(seen: Seen, config: H.Config, route: int) -> int:
    """The row to show of a kind: the one whose tokens meet the most different fates, in the fewest tokens, so that one page shows
    as many reasons as it can (of a mixed group one where both signs of K_DR occur)."""
    def worth(b: int) -> tuple[int, int]:
        tokens = tokens_of(seen, config, b)
        return len({(t["stream"][0], t["selected"], t["k_dr"] > 0, t["k_dr"] < 0, t["a_opd"] > 0) for t in tokens}), -len(tokens)

    return max((b for b in range(len(seen.rollouts.mask)) if seen.routes[b // seen.rewards.shape[1]] == route), key=worth)


def plain(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey"""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fit(text: str, width: int) -> str:
    """Cut or filled to so many columns, of which an East Asian character takes two"""
    size = lambda s: sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in s)
    if size(text) > width:
        while size(text) > width - 1:
            text = text[:-1]
        text += "~"
    return text + " " * (width - size(text))


def cells(token: dict, config: H.Config) -> list[tuple[str, str]]:
    """Text and class of every column but the first: plus, minus or nil with a strength, on or off, or who trains"""
    tone = lambda x, strong=1.0: ("plus" if x > 0 else "minus") + f" s{min(3, 1 + int(abs(x) / strong))}" if x else "nil"
    chance = lambda p: f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
    signed = lambda x: f"{x:+.2f}" if abs(x) < 100 else f"{x:+.0f}"
    chooses, conflict, (who, why) = config.row.selected and config.row.distillation and token["hears"], tone(token["cosine"], 0.3), token["stream"]
    apart = tone(token["a_opd"]) if abs(token["a_opd"]) >= 0.1 else ""
    return [(chance(token["p_s"]), ""), (chance(token["p_t"]), apart), (f"{token['entropy']:.2f}", ""), (signed(token["a_opd"]), apart),
            (f"{token['score']:.2f}" if token["hears"] else ".", ""),
            (("yes", "on") if token["selected"] else ("no", "off")) if chooses else (".", "nil"),
            (signed(token["a_grpo"]) if token["a_grpo"] else "0", ""), ("+" if token["k_dr"] > 0 else "-" if token["k_dr"] < 0 else "0", conflict),
            (f"{token['cosine']:+.2f}" if token["cosine"] else ".", conflict), (f"{token['gate']:.2f}", ""), (f"{who}: {why}", who)]


def panel(run: H.Run, seen: Seen, b: int, when: str) -> dict:
    """All that is shown of one completion, as text"""
    config, size = run.config, seen.rewards.shape[1]
    n, decode = b // size, lambda i: plain(run.tokenizer.decode([i]))
    word = lambda i: decode(i) if "\ufffd" not in decode(i) else plain(run.tokenizer.convert_ids_to_tokens(i))     # part of a character
    prompt, omega, route, ids = seen.prompts[n], seen.confidence[n], seen.routes[n], seen.rollouts.completion_ids[b][seen.rollouts.mask[b]].tolist()
    own, reads_pool = run.pool.get(prompt, {}), config.row.imitation or config.row.weighted
    facts = [("prompt", plain(prompt)), ("completion", plain(run.tokenizer.decode(ids, skip_special_tokens=True))),
             ("reward", f"{seen.rewards[n, b % size]:g}, in a group of {' '.join(f'{r:g}' for r in seen.rewards[n].tolist())}; route {ROUTES[route]}" +
              (f"; omega {omega:.2f}" if reads_pool else ""))]
    if config.row.imitation and (config.row.imitation == "all" or route == H.NEGATIVE) and own.get("trajectory"):
        shown = H.trajectories_of(run.pool, run.tokenizer, [prompt], run.pad, run.student.device)
        logp, _ = run.score_all(run.student, shown, shown.mask.any(dim=1))
        facts.append(("imitated", "with p_S  " + " ".join(f"{word(i)} ({p:.2f})" for i, p in zip(own["trajectory"], logp[0].exp().tolist()))))
    rows = [[(word(i), "token"), *cells(token, config)] for i, token in zip(ids, tokens_of(seen, config, b))]
    return {"kind": KINDS[route], "when": when, "facts": facts, "rows": rows,
            "sentence": sentence_of(config, route, omega, seen.opd_coef, bool(own.get("trajectory")))}


def explain(run: H.Run, step: int, search: int, exact: bool) -> tuple[list[dict | str], str]:
    """A panel of each kind, or a line that says that there is none, and the sentence about the batch"""
    first = seen = look(run, step, exact)
    found, last = {}, step
    for last in range(step, step + search + 1):
        if last > step:                 # the step is taken, so that what follows is the batch that the run would see
            H.train_step(run, last - 1)
            seen = look(run, last)
        missing = [route for route in KINDS if route not in found and route in seen.routes]
        if missing and exact and last > step:
            seen = look(run, last, exact)
        for route in missing:
            b = pick(seen, run.config, route)
            found[route] = panel(run, seen, b, f"step {last}" + (f", the first that has one, after {last - step} update{'s' * (last - step > 1)}" if last > step else ""))
        if len(found) == len(KINDS):
            break
    return [found.get(r, f"{KINDS[r]}: no such group in {'step' if last == step else 'steps'} {step}{f' to {last}' * (last > step)}.") for r in KINDS], first.summary


def legend(config: H.Config, exact: bool) -> list[tuple[str, str]]:
    """(heading, what it is) of every column, as this method uses it"""
    row, own = config.row, {}
    tau = f", or the teacher is further away than {config.divergence_clip:g} nats (far)" if row.distillation == "jsd" and row.reward else ""
    own["k_dr"] = tau + ("; exact, through the student's Jacobian" if exact else "; residual form")
    own["gate"] = (f"{config.max_teacher_share:g} where K_DR >= 0, else 0" if row.join in ("select", "eg") else
                   f"{config.max_teacher_share:g} x sigmoid({config.gate_sharpness:g} x cos)" + ", as M3-Soft would have it" * (not row.m3))
    own["selected"] = "" if row.selected and row.distillation else " (this method does not select)"
    own["a_grpo"] = "" if row.reward else " (this method does not read it)"
    return [(heading, text + own.get(key, "")) for key, heading, _, text in COLUMNS] + [(".", "does not apply here")]


ANSI = {"plus": "32", "minus": "31", "on": "1", "off": "2", "nil": "2", "reward": "34", "teacher": "35", "both": "36", "nobody": "2"}


def as_text(title: str, panels: list, summary: str, legend: list, colour: bool) -> str:
    paint = lambda text, cls: f"\033[{ANSI[cls.split()[0]]}m{text}\033[0m" if colour and cls.split()[:1] and cls.split()[0] in ANSI else text
    widths = [w or WIDTH - sum(c[2] + 1 for c in COLUMNS[:-1]) - 1 for *_, w, _ in COLUMNS]
    line = lambda row: " ".join(paint(fit(text, w) if i in (0, len(row) - 1) else fit(text.rjust(w), w), cls)
                                for i, (w, (text, cls)) in enumerate(zip(widths, row))).rstrip()
    wrap = lambda text, name="": textwrap.fill(text.replace(" %", "\0%"), WIDTH, initial_indent=f"{name:12}"[:12 * bool(name)],
                                               subsequent_indent=" " * 12 * bool(name)).replace("\0", " ")
    out = [title]
    for p in panels:
        if isinstance(p, str):
            out += ["", p]
            continue
        out += ["", fit(f"-- {p['kind']}, {p['when']} " + "-" * WIDTH, WIDTH - 1)[:-1], *(fit(f"{name:12}{text}", WIDTH).rstrip() for name, text in p["facts"]),
                wrap(p["sentence"]), "", line([(c[1], "") for c in COLUMNS]), *map(line, p["rows"])]
    out += ["", *(wrap(text, name) for name, text in legend), "", wrap(summary)]
    return "\n".join(out)


def as_page(title: str, panels: list, summary: str, legend: list) -> str:
    """The same as one HTML page that needs nothing from outside"""
    e, hints = lambda text: html.escape(text).replace(" %", "&nbsp;%"), [f"{name}: {text}" for name, text in legend]
    body = [f"<h1>{e(title)}</h1>"]
    for p in panels:
        if isinstance(p, str):
            body.append(f"<p>{e(p)}</p>")
            continue
        head = "".join(f'<th title="{e(hint)}">{e(column[1])}</th>' for hint, column in zip(hints, COLUMNS))
        rows = "".join("<tr>" + "".join(f'<td class="{column[0]} {cls}" data-name="{e(column[1])}" title="{e(hint)}"><span>{e(text)}</span></td>'
                       for hint, column, (text, cls) in zip(hints, COLUMNS, row)) + "</tr>\n" for row in p["rows"])
        facts = "".join(f"<dt>{e(name)}</dt><dd>{e(text)}</dd>" for name, text in p["facts"])
        body.append(f"<section><h2>{e(p['kind'].capitalize())} <small>{e(p['when'])}</small></h2><dl class=facts>{facts}</dl><p>{e(p['sentence'])}</p>\n"
                    f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></section>")
    body.append('<p class=key><span class="plus s2">teacher likes the token better; pulls agree</span><span class="minus s2">teacher likes it less; pulls conflict</span>'
                + "".join(f'<b class="stream {who}"><span>{who}</span></b>' for who in ("reward", "teacher", "both", "nobody")) + "</p>")
    body.append("<dl class=legend>" + "".join(f"<dt>{e(name)}</dt><dd>{e(text)}</dd>" for name, text in legend) + f"</dl><p>{e(summary)}</p>")
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(title=e(title), body="\n".join(body))


class Parser(H.OneLineParser):
    def error(self, message: str):
        word = message.removeprefix("unrecognized arguments: ").split()[0]
        raise H.UsageError(message.removeprefix("argument ") if word == message.split()[0] else
                           f"{word}: show takes no such word{H.did_you_mean(word, self._option_string_actions)}; --help lists the flags")


def build_parser() -> Parser:
    shared = H.build_parser()
    for action in shared._actions:
        if action.dest in RUN_ONLY:
            action.help = argparse.SUPPRESS
    parser = Parser(prog="python -m toy_tasks.show", description=__doc__.split("\n\n")[1], parents=[shared], add_help=False, allow_abbrev=False,
                    formatter_class=shared.formatter_class, epilog=shared.epilog.split("\n\n")[0])
    count = H.number(int)
    parser.add_argument("--step", type=count, default=0, metavar="N", help="the step whose prompts and seed are taken; >= 0 (default: 0)")
    parser.add_argument("--search", type=count, default=30, metavar="N", help="steps to go on while a kind of group is missing; >= 0 (default: 30)")
    parser.add_argument("--exact", action="store_true", help="K_DR and its cosine from exact Jacobians; M3 then takes its gate from them, as with --exact-gate")
    parser.add_argument("--html", default="", metavar="FILE", help="write a self-contained page there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = vars(build_parser().parse_args(argv))
        step, search, exact, page = (given.pop(name) for name in ("step", "search", "exact", "html"))
        for name in RUN_ONLY:
            if name in given:
                raise H.UsageError(f"{H.flag_of(name)}: belongs to a run; show looks at one batch and leaves nothing behind")
        for name, value in (("--step", step), ("--search", search)):
            if value < 0:
                raise H.UsageError(f"{name} {value}: must be >= 0")
        if page and (Path(page).is_dir() or not os.access(Path(page).parent, os.W_OK)):
            raise H.UsageError(f"--html {page}: cannot be written; name a file in a folder that exists")
        config = H.Config(**given)
        if config.teacher_pool and not Path(config.teacher_pool).is_file():
            raise H.UsageError(f"--teacher-pool {config.teacher_pool}: no such file; show reads the pool of a run and writes none")
        if config.row.m3 and exact:
            config = replace(config, exact_gate=True)
        exact = exact or config.exact_gate
        run, _, _ = H.prepare(config, look=True)
        if config.teacher_pool:
            run.pool = H.load_pool(config, Path(), run.teacher, run.tokenizer, run.task, run.problems)
        panels, summary = explain(run, step, search, exact)
        parts = f"{config.method} on {run.task.name}, seed {config.seed}: who trains which token, and why", panels, summary, legend(config, exact)
        if page:
            Path(page).write_text(as_page(*parts), encoding="utf-8")
    except H.UsageError as error:
        print(f"toy_tasks.show: error: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"toy_tasks.show: error: {error}", file=sys.stderr)
        return 1
    print(as_text(*parts, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")                # a token may be in a script that the terminal cannot write
    sys.exit(main())
