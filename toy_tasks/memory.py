"""Peak memory of one step with a large vocabulary: `python -m toy_tasks.memory [--method rstg] [--micro-batch 4]`

Two tiny models (hidden 64) with 151,936 tokens, 64 completions of 128 tokens.  Measured is the process's peak resident size
during the step (Linux's VmHWM, set back before it) minus the resident size when weights, gradients and moments are in place.
The unit is the logits of one micro-batch: micro_batch x 129 x vocabulary x 4 bytes.  About a minute on an idle core.
"""

import argparse
from pathlib import Path

import torch

import hybrid_rl as H
from toy_tasks.pretrain import build_tokenizer


def resident(what: str) -> int:
    """Bytes, from /proc: VmRSS is now, VmHWM the highest since it was set back"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


class Any:
    """Prompts of 16 numbers.  A quarter of the groups is all wrong, so that every part of a method has work."""
    def prompt(self, problem) -> str:
        return f"{problem} " + "5 " * 15

    def reward(self, problem, completion: str) -> float:
        return float(problem % 4 > 0 and len(completion) % 2)


def build(method: str, micro_batch: int, vocabulary: int, tokens: int, group: int = 8) -> H.Run:
    from transformers import LlamaConfig, LlamaForCausalLM
    make = lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    config = H.Config(method=method, prompts_per_step=8, group_size=group, max_new_tokens=tokens, micro_batch=micro_batch)
    student, task, tokenizer = make(), Any(), build_tokenizer()
    pool = {task.prompt(n): {"confidence": 1.0, "trajectory": [3 + i % 100 for i in range(tokens - 1)] + [1]} for n in range(8)}
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.lr, weight_decay=0.0)
    run = H.Run(config, task, tokenizer, student, make(), make() if config.kl_coef else None, optimizer, list(range(8)), pool)
    for p in student.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()                    # makes the moments
    return run


def peak(run: H.Run) -> int:
    """Bytes by which a step rises above what the process holds before it"""
    own = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    H.train_step(run, 0)
    return resident("VmHWM") - own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m toy_tasks.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=list(H.METHODS), default="rstg")
    for flag, default in (("--micro-batch", 4), ("--vocabulary", 151_936), ("--tokens", 128)):
        parser.add_argument(flag, type=int, default=default)
    given = parser.parse_args()
    run = build(**vars(given))
    own, unit = resident("VmRSS"), given.micro_batch * (given.tokens + 1) * given.vocabulary * 4
    above = peak(run)
    print(f"{given.method}: {above / 1e6:.0f} MB above the models' own {own / 1e6:.0f} MB, {above / unit:.2f} x the "
          f"{unit / 1e6:.0f} MB of one micro-batch's logits")
