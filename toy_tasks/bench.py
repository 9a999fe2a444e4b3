"""Seconds of a training step, beside its floor and beside TRL's: `python -m toy_tasks.bench [--parts methods growth trl]`

The floor is the bare model calls of the same step: generate, forward and backward of the completions that matter, the teacher
on those that hear it, forward and backward of the imitated trajectories.  A step may lie below it, since generate reads a prompt
once a completion and a step once a group; "x calls" is the ratio to the calls that a step makes.  The learning rate is next to
nothing, so all methods keep the same student and sample the same completions.  Everything is interleaved, so that whatever else
the machine does falls on all alike; quoted are medians, quartiles in brackets, and ratios taken step by step.
"""

import copy
import ctypes
import itertools
import statistics
import tempfile
import time
import warnings
from typing import Iterator

import torch

import hybrid_rl as H
from toy_tasks import memory


def bare(model, r: H.Rollouts, backward: bool) -> None:
    """One forward pass over some completions, and one back"""
    mask = torch.cat([r.prompt_mask, torch.ones_like(r.completion_ids)], dim=1)
    with torch.set_grad_enabled(backward):
        logits = model(input_ids=torch.cat([r.prompt_ids, r.completion_ids], dim=1), attention_mask=mask, use_cache=False,
                       logits_to_keep=r.completion_ids.shape[1] + 1).logits[:, :-1]
        if backward:
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), r.completion_ids.flatten()).backward()


def floor(run: H.Run, step: int, shared: bool) -> float:
    """Seconds of the bare model calls of a step; shared: each prompt is read once a group"""
    config, row = run.config, run.config.row
    torch.manual_seed(config.seed * 1_000_003 + step)
    problems = H.step_problems(run.problems, step, config.prompts_per_step, config.seed)
    batch, rewards = H.collect(run, problems)                   # which rows matter; not timed
    prompts, routes = [run.task.prompt(p) for p in problems], H.route_groups((rewards == 1).int())
    trust = torch.tensor([run.pool[p]["confidence"] if run.pool else 1.0 for p in prompts])
    signals, _ = H.listen(run, batch, rewards, trust, 1.0)
    live = signals.live(everything=False)
    heard = (signals.distillation != 0).any(dim=1)
    imitated = [p for p, route in zip(prompts, routes) if row.imitation == "negative" and route == H.NEGATIVE]
    trajectories = H.trajectories_of(run.pool, run.tokenizer, imitated, run.pad, run.student.device) if imitated else None
    asked = {"input_ids": batch.prompt_ids, "attention_mask": batch.prompt_mask}
    torch.manual_seed(config.seed * 1_000_003 + step)
    with H.sampling_from(run.student):
        began = time.perf_counter()
        cache = H.read_once(run.student, *(x[::config.group_size] for x in asked.values()), config.group_size) if shared else {}
        run.student.generate(**asked, **cache, do_sample=True, top_k=0, temperature=1.0, use_cache=True, pad_token_id=run.pad,
                             max_new_tokens=config.max_new_tokens, eos_token_id=H.eos_ids_of(run.student, run.tokenizer))
        seconds = time.perf_counter() - began
    parts = [(run.teacher, heard, False), (run.student, live, True)]
    work = [(model, batch.rows(index), backward) for model, rows, backward in parts for index in run.chunks(batch, rows)]
    work += [(run.student, trajectories, True)] if trajectories else []
    run.optimizer.zero_grad(set_to_none=True)
    began = time.perf_counter()
    for some in work:
        bare(*some)
    return seconds + time.perf_counter() - began


def measure(runs: dict[str, H.Run], repeats: int) -> dict[str, tuple]:
    """(seconds, seconds / floor, seconds / its own calls) of interleaved steps; one step each is taken before to warm up"""
    found = {name: [] for name in runs}
    for step in range(repeats + 1):
        for name, run in runs.items():
            bottoms = [floor(run, step, s) if run.config.row.rollouts == "student" else float("nan") for s in (False, True)]
            seconds = H.train_step(run, step)["seconds"]
            found[name].append((seconds, *(seconds / bottom for bottom in bottoms)))
    return {name: tuple(zip(*values[1:])) for name, values in found.items()}


def spread(values: tuple[float, ...], digits: int = 2) -> str:
    low, middle, high = (f"{q:.{digits}f}" for q in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({low} to {high})"


def methods(names: list[str], repeats: int) -> Iterator[str]:
    """Each method on the toy, beside its floor and beside the first"""
    with tempfile.TemporaryDirectory() as folder:
        runs = {m: H.prepare(H.Config(method=m, out=f"{folder}/{m}", train_prompts=64, lr=1e-12))[0] for m in names}
        found = measure(runs, repeats)
    yield f"{'method':18} {'s/step':>22} {'completions/s':>14} {'x floor':>20} {'x calls':>20} {'x first':>8}"
    for name, (seconds, floors, calls) in found.items():
        rate = runs[name].config.prompts_per_step * runs[name].config.group_size / statistics.median(seconds)
        first = statistics.median(s / t for s, t in zip(seconds, found[names[0]][0]))
        yield f"{name:18} {spread(seconds, 3):>22} {rate:14.0f} {spread(floors):>20} {spread(calls):>20} {first:8.2f}"


def growth(names: list[str], repeats: int) -> Iterator[str]:
    """The first method on two random models, as one size grows; the peak is what a step needs above weights and moments"""
    sizes = [(8, 16, 1000), (32, 16, 1000), (8, 64, 1000), (8, 16, 16_000), (8, 16, 64_000)]
    yield f"{names[0]:9} group  tokens  vocabulary {'s/step':>22}  us/token  x floor  peak MB"
    for group, tokens, vocabulary in sizes:
        run = memory.build(names[0], micro_batch=256, vocabulary=vocabulary, tokens=tokens, group=group)
        ctypes.CDLL(None).malloc_trim(0)        # what earlier rows left in the heap would hide the peak
        peak = memory.peak(run) / 1e6
        seconds, floors, _ = measure({"": run}, min(repeats, 5))[""]
        each = 1e6 * statistics.median(seconds) / (8 * group * tokens)
        yield (f"{group:15} {tokens:7} {vocabulary:11,} {spread(seconds, 3):>22} {each:9.1f} {statistics.median(floors):8.2f} "
               f"{peak:8.0f}")


class HalfRight:
    """Every group mixed: the first four of eight completions are right, whatever they say"""
    def __init__(self, task):
        self.prompt, self.rewards = task.prompt, itertools.cycle([1.0] * 4 + [0.0] * 4)

    def reward(self, problem, completion: str) -> float:
        return next(self.rewards)


def in_turns(run: H.Run, steps: int) -> list[tuple[float, float, float, float]]:
    """(our seconds, TRL's, share of mixed groups in ours, in theirs): our step is taken whenever TRL's trainer has taken one"""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, found, mixed = run.config, [], []
    asked = [p for step in range(steps) for p in H.step_problems(run.problems, step, config.prompts_per_step, config.seed)]
    problem_of, G = {run.task.prompt(p): p for p in asked}, config.group_size

    def reward(prompts, completions, **_):
        rewards = [run.task.reward(problem_of[p], text) for p, text in zip(prompts, completions)]
        mixed.append(statistics.mean(len(set(rewards[i:i + G])) > 1 for i in range(0, len(rewards), G)))
        return rewards

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, *_, **__):
            theirs = time.perf_counter() - self.began
            line = H.train_step(run, state.global_step - 1)
            found.append((line["seconds"], theirs, line["mixed_share"], mixed[-1]))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=len(asked) // steps * G, num_generations=G, max_steps=steps, beta=0.0,
            max_completion_length=config.max_new_tokens, learning_rate=1e-12, loss_type="grpo", use_cpu=True, bf16=False,
            gradient_checkpointing=False, shuffle_dataset=False, report_to="none", logging_steps=10**9, save_strategy="no",
            disable_tqdm=True)
        trainer = GRPOTrainer(copy.deepcopy(run.student), reward, settings, processing_class=run.tokenizer, callbacks=[Turns()],
                              train_dataset=Dataset.from_dict({"prompt": [run.task.prompt(p) for p in asked]}))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return found[2:]                    # both warm


def beside_trl(_names: list[str], repeats: int) -> Iterator[str]:
    """grpo beside TRL's GRPOTrainer: the same weights, prompts, reward and batch, in the same process, step by step in turns"""
    try:
        import trl
    except ImportError:
        yield "TRL's GRPOTrainer is left out, since trl is not installed: pip install trl==1.16.0, in an environment of its own"
        return
    theirs = f"TRL {trl.__version__}, s/step"
    yield f"{'student, groups':26} {'ours, s/step':>22} {theirs:>22} {'TRL / ours':>20} {'mixed groups':>13}"
    with tempfile.TemporaryDirectory() as folder:
        run = H.prepare(H.Config(method="grpo", out=folder))[0]
        stages = [("as shipped", 0, run.task), ("after 100 steps", 100, run.task), ("that, all mixed", 0, HalfRight(run.task))]
        for name, steps, run.task in stages:
            run.optimizer.param_groups[0]["lr"] = run.config.lr
            for step in range(steps):
                H.train_step(run, step)
            run.optimizer.param_groups[0]["lr"] = 1e-12
            ours, theirs, *mixed = zip(*in_turns(run, repeats + 2))
            yield (f"{name:26} {spread(ours, 3):>22} {spread(theirs, 3):>22} {spread([b / a for a, b in zip(ours, theirs)]):>20} "
                   f"{' / '.join(f'{statistics.mean(s):.2f}' for s in mixed):>13}")


PARTS = {"methods": methods, "growth": growth, "trl": beside_trl}

if __name__ == "__main__":
    parser = H.OneLineParser(prog="python -m toy_tasks.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--methods", nargs="+", choices=list(H.METHODS), default=list(H.METHODS),
                        help="the first is what the others are compared with, and what grows")
    parser.add_argument("--repeats", type=H.number(int), default=15, help="timed steps of each, 2 or more (default: 15)")
    given = parser.parse_args()
    if given.repeats < 2:
        parser.error(f"argument --repeats: {given.repeats} is too few for quartiles, give 2 or more")
    for part in given.parts:
        for line in PARTS[part](given.methods, given.repeats):
            print(line, flush=True)
        print()
