"""Seconds of a training step, beside its floor: `python -m toy_tasks.bench [--methods grpo rstg] [--repeats 15]`

The floor is the bare model calls of the same step: generate, forward and backward of the completions that matter, the teacher on
those that hear it, forward and backward of the imitated trajectories.  The learning rate is next to nothing, so all methods
keep the same student and sample the same completions.  Everything is interleaved, so that whatever else the machine does falls on
all alike; quoted are medians, and ratios taken step by step.
"""

import argparse
import statistics
import tempfile
import time

import torch

import hybrid_rl as H


def bare(model, r: H.Rollouts, backward: bool) -> None:
    """One forward pass over some completions, and one back"""
    mask = torch.cat([r.prompt_mask, torch.ones_like(r.completion_ids)], dim=1)
    with torch.set_grad_enabled(backward):
        logits = model(input_ids=torch.cat([r.prompt_ids, r.completion_ids], dim=1), attention_mask=mask, use_cache=False,
                       logits_to_keep=r.completion_ids.shape[1] + 1).logits[:, :-1]
        if backward:
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), r.completion_ids.flatten()).backward()


def floor(run: H.Run, step: int) -> float:
    """Seconds of the bare model calls of a step"""
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
    asked = {"input_ids": batch.prompt_ids[::config.group_size], "attention_mask": batch.prompt_mask[::config.group_size]}
    torch.manual_seed(config.seed * 1_000_003 + step)
    with H.sampling_from(run.student):
        began = time.perf_counter()
        run.student.generate(**asked, num_return_sequences=config.group_size, do_sample=True, top_k=0, temperature=1.0, use_cache=True,
                             max_new_tokens=config.max_new_tokens, eos_token_id=H.eos_ids_of(run.student, run.tokenizer), pad_token_id=run.pad)
        seconds = time.perf_counter() - began
    parts = [(run.teacher, heard, False), (run.student, live, True)]
    work = [(model, batch.rows(index), backward) for model, rows, backward in parts for index in run.chunks(batch, rows)]
    work += [(run.student, trajectories, True)] if trajectories else []
    run.optimizer.zero_grad(set_to_none=True)
    began = time.perf_counter()
    for some in work:
        bare(*some)
    return seconds + time.perf_counter() - began


def measure(methods: list[str], repeats: int, **settings) -> dict[str, list[tuple[float, float]]]:
    """(seconds, floor) of `repeats` interleaved steps of each method; one step each is taken before to warm up"""
    with tempfile.TemporaryDirectory() as folder:
        runs = {m: H.prepare(H.Config(method=m, out=f"{folder}/{m}", train_prompts=64, lr=1e-12, **settings))[0] for m in methods}
        found = {m: [] for m in methods}
        for step in range(repeats + 1):
            for method, run in runs.items():
                bottom = floor(run, step) if run.config.row.rollouts == "student" else float("nan")
                found[method].append((H.train_step(run, step)["seconds"], bottom))
    return {m: values[1:] for m, values in found.items()}


def table(found: dict[str, list[tuple[float, float]]], completions: int) -> str:
    """Median, quartiles, completions a second; the median ratio to the floor and to the first method, paired by step"""
    first = next(iter(found.values()))
    lines = [f"{'method':18} {'s/step':>7} {'quartiles':>17} {'completions/s':>14} {'x floor':>8} {'x first':>8}"]
    for method, values in found.items():
        low, middle, high = statistics.quantiles((s for s, _ in values), n=4)
        floors, firsts = (statistics.median(pairs) for pairs in ([s / f for s, f in values], [s / t for (s, _), (t, _) in zip(values, first)]))
        lines.append(f"{method:18} {middle:7.3f} {f'{low:.3f} to {high:.3f}':>17} {completions / middle:14.0f} {floors:8.2f} {firsts:8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m toy_tasks.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=list(H.METHODS), default=list(H.METHODS), help="the first is what the others are compared with")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each method (default: 15)")
    given = parser.parse_args()
    config = H.Config()
    print(table(measure(given.methods, given.repeats), config.prompts_per_step * config.group_size))
