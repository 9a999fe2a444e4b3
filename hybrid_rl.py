"""Sparse reward and dense teacher guidance for language models, in one file that is meant to be read.

A language model answers a prompt several times.  A checker says right or wrong: that reward is honest, but it is one bit
for a whole completion, and nothing at all where every answer is wrong.  A stronger model, the teacher, can grade every
token, but it pulls everywhere, also where the student is already right.  Three papers join the two; this file states
them as equations that run:

    GRPO                    DeepSeekMath                 arXiv:2402.03300    sections 3, 4
    RSTG                    where to listen to a teacher arXiv:2608.00782    sections 5, 6, 7
    sparse to dense         which label for which model  arXiv:2605.12483    section 12 (to come)
    M3, cross-signal NTK    why the two collide          arXiv:2609.34849    section 8  (to come)

One view of all of it.  Every signal is a residual in logit space, delta_t = dLoss/dz_t, pushed through the same Jacobian:
gradient = sum_t J_t delta_t.  Methods differ in the residual and in nothing else (p_S student, p_T teacher, e_y one-hot of
the sampled token y, both probabilities over the whole vocabulary; rho = p_S(y) / p_old(y), here at rho = 1):

    signal                      advantage A_t in the loss -rho_t A_t                residual delta_t
    GRPO                        (r - mean r) / (std r + eps), every token alike     -A (e_y - p_S)
    PG-style OPD                log p_T(y_t) - log p_S(y_t), detached               -A_t (e_y - p_S)
    SFT, teacher's trajectory   1, in the form -log p_S(y)                          -(e_y - p_S)
    reverse KL(p_S, p_T)        none: all tokens at once                            p_S (log(p_S / p_T) - KL(p_S, p_T))
    forward KL(p_T, p_S)        none: all tokens at once                            p_S - p_T
    JSD, m = l p_T + (1-l) p_S  none: all tokens at once                            (1-l) p_S (log(p_S / m) - KL(p_S, m))

Shapes: N prompts, G completions a prompt (a group), B = N G rollouts, row b = n G + g; T completion tokens, L = P + T all
tokens, V vocabulary.  Names: logp = log-probability of the sampled token under the student now, logp_old = under the policy
that sampled it, logp_ref, logp_teacher likewise; action_mask (mask for short) = the tokens that the policy chose; outcome =
right or wrong; route = what a group's outcomes say; `*_terms` = one number a token, before any reduction.

Order: 1 config, 2 masks, sums, log-probs, 3 advantages, 4 GRPO, 5 distillation, 6 imitation, 7 RSTG, 9 the objective, where
4-7 meet; then THE LINE: above it pure functions of tensors, below it models, sampling, files, the loop, the command line.
`CHOICE:` marks a value that the papers leave open, `DEVIATES:` a knowing departure; each names the test that pins it.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# 1  Config.  What can be set, between which bounds, and which method is which row of choices?
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """One row of the table of methods: which of the three streams are on, where, and whose completions are trained on."""

    summary: str
    reward: bool = False                # stream 1: GRPO advantages
    distillation: str | None = None     # stream 2: "pg" (OPD advantages), "reverse_kl", "forward_kl" or "jsd"
    where: str = "all"                  # completions that hear the teacher: "all", "failed", or those of "negative" groups
    weighted: bool = False              # by the teacher's confidence on the prompt (RSTG's omega)
    selected: bool = False              # on the top-scoring tokens only (RSTG's Soft-OR)
    imitation: str | None = None        # stream 3: prompts whose teacher trajectory is imitated: "all" or "negative" groups
    rollouts: str = "student"           # whose completions: "student", "teacher", or "pool" = its shortest correct ones


METHODS = {
    "grpo": Method("sparse reward alone", reward=True),
    "opd": Method("PG-style on-policy distillation", distillation="pg"),
    "reverse-kl": Method("full-vocabulary KL(student, teacher) on student rollouts", distillation="reverse_kl"),
    "jsd": Method("full-vocabulary generalised JSD on student rollouts, as GKD", distillation="jsd"),
    "forward-kl": Method("full-vocabulary KL(teacher, student) on teacher rollouts", distillation="forward_kl", rollouts="teacher"),
    "sft": Method("cross-entropy on correct teacher trajectories", imitation="all", rollouts="pool"),
    "grpo+opd": Method("naive hybrid: OPD on every completion", reward=True, distillation="pg"),
    "grpo+opd-failed": Method("naive hybrid: OPD on failed completions", reward=True, distillation="pg", where="failed"),
    "grpo+opd-negative": Method("OPD on all-wrong groups only", reward=True, distillation="pg", where="negative"),
    "rstg": Method("routed, weighted, token-selected OPD and SFT on all-wrong groups", reward=True, distillation="pg",
                   where="negative", weighted=True, selected=True, imitation="negative"),
}

LEGAL: dict[str, Callable[[float], bool]] = {
    "> 0": lambda v: v > 0, ">= 0": lambda v: v >= 0, ">= 1": lambda v: v >= 1, ">= 2": lambda v: v >= 2, "> 1": lambda v: v > 1,
    "in (0, 100]": lambda v: 0 < v <= 100, "in [0, 1)": lambda v: 0 <= v < 1, "in (0, 1)": lambda v: 0 < v < 1,
}


class UsageError(ValueError):
    """Something the caller gave cannot be used; the message is one line that says what, what would do, and why."""


def knob(default, help: str, legal: str | tuple = "", used_by: str = "all") -> dataclasses.Field:
    """A setting with its help text, its legal range (a key of LEGAL, or the choices), and who reads it (see users_of)."""
    return dataclasses.field(default=default, metadata={"help": help, "legal": legal, "used_by": used_by})


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def did_you_mean(word, legal: Iterable) -> str:
    near = difflib.get_close_matches(str(word), map(str, legal), 1)
    return f"; did you mean {near[0]}?" if near else ""


def users_of(field: dataclasses.Field) -> list[str]:
    """The methods that a setting belongs to; another method refuses it, because a flag without effect misleads."""
    reads = {"all": lambda row: True, "reward": lambda row: row.reward, "ratio": lambda row: row.reward or row.distillation == "pg",
             "hybrid": lambda row: row.reward and row.distillation, "jsd": lambda row: row.distillation == "jsd",
             "pool": lambda row: row.imitation or row.weighted, "rstg": lambda row: row.selected}
    return [name for name, row in METHODS.items() if reads[field.metadata["used_by"]](row)]


_TOY = Path(__file__).resolve().parent / "toy_tasks" / "models"


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked when it is made: what is impossible is refused, nothing is clamped.

    The defaults that carry no mark are those of papers or of common use; those of the toy were tried on it.
    """

    method: str = knob("rstg", "what to train with", tuple(METHODS))
    task: str = knob("chain_sum", "toy task", ("chain_sum", "addition"))
    data: str = knob("", "JSON-lines file with prompt and answer on each line, instead of a toy task")
    student: str = knob(str(_TOY / "student"), "model to train: a Hugging Face folder or hub name")
    teacher: str = knob(str(_TOY / "teacher"), "frozen teacher with the same tokenizer: a folder or hub name")

    steps: int = knob(300, "optimizer steps, each on fresh rollouts", ">= 1")
    prompts_per_step: int = knob(32, "prompts of a step (N)", ">= 1")
    group_size: int = knob(8, "completions sampled for each prompt (G)", ">= 2")
    updates: int = knob(1, "optimizer updates on each batch of rollouts; the ratio leaves 1 from the second on", ">= 1")
    lr: float = knob(1e-3, "AdamW learning rate, constant (papers: 1e-6 for 1-8B models)", "> 0")
    max_grad_norm: float = knob(1.0, "gradient norm above which the gradient is scaled down", "> 0")
    temperature: float = knob(1.0, "sampling temperature; divides every model's logits in the losses too", "> 0")
    max_new_tokens: int = knob(16, "longest completion, in tokens", ">= 1")
    train_prompts: int = knob(512, "distinct training prompts, repeated over epochs", ">= 1")
    eval_problems: int = knob(800, "held-out problems to measure on before and after; 0 = do not", ">= 0")
    seed: int = knob(0, "seed of prompt order and sampling", ">= 0")
    device: str = knob("auto", "where to run; auto takes a GPU if there is one", ("auto", "cpu", "cuda", "mps"))
    dtype: str = knob("float32", "of the forward passes; weights and losses stay float32", ("float32", "bfloat16"))
    micro_batch: int = knob(256, "completions in one forward pass; changes memory and speed, not the gradient", ">= 1")

    advantage_scale: str = knob("group_std", "divisor of an advantage; none = Dr. GRPO", ("group_std", "batch_std", "none"), "reward")
    advantage_ddof: int = knob(0, "std divides by G - ddof; TRL and verl use 1", (0, 1), "reward")
    advantage_eps: float = knob(1e-4, "added to the std, outside the root", ">= 0", "reward")
    baseline: str = knob("mean", "what a reward is compared with; leave_one_out = RLOO", ("mean", "leave_one_out"), "reward")
    aggregation: str = knob("seq_mean_token_mean", "mean over tokens: GRPO's, DAPO's, Dr. GRPO's",
                            ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"))
    aggregation_length: int = knob(0, "constant token divisor of seq_mean_token_sum_norm; 0 = max_new_tokens", ">= 0")
    empty_rows: str = knob("skip", "does a completion without tokens count in a mean over completions; count = as TRL", ("skip", "count"))
    skip_truncated: bool = knob(False, "leave completions that never ended out of the loss")
    clip_low: float = knob(0.2, "lower clip of the ratio: 1 - this", "in [0, 1)", "ratio")
    clip_high: float = knob(0.2, "upper clip of the ratio: 1 + this", ">= 0", "ratio")
    dual_clip: float | None = knob(None, "bound on the loss of a negative advantage, in units of it", "> 1", "ratio")
    ratio_level: str = knob("token", "one ratio a token, or one a sequence = GSPO", ("token", "sequence"), "ratio")
    kl_coef: float = knob(0.0, "weight of the KL to the student as it was at the start", ">= 0", "reward")
    kl_kind: str = knob("k3", "estimator of that KL", ("k1", "k2", "k3"), "reward")
    kl_gradient: str = knob("estimator", "differentiate the estimator itself, or the estimator times the ratio", ("estimator", "ratio"), "reward")

    opd_coef: float = knob(0.1, "weight of the teacher in a hybrid at step 0 (RSTG's beta; paper 5e-3)", ">= 0", "hybrid")
    opd_coef_slope: float = knob(1e-3, "what it loses each step (paper 5e-5)", ">= 0", "hybrid")
    opd_coef_floor: float = knob(0.02, "where it stops (paper 1e-3)", ">= 0", "hybrid")
    jsd_share: float = knob(0.5, "the teacher's share l of the JSD mixture", "in (0, 1)", "jsd")
    teacher_samples: int = knob(8, "teacher completions a prompt, for its confidence and its trajectories", ">= 1", "pool")
    teacher_pool: str = knob("", "file to keep those in and to take them from; default: in the run's folder", "", "pool")
    select_share: float = knob(50.0, "percent of a completion's tokens that hear the teacher", "in (0, 100]", "rstg")
    no_weighting: bool = knob(False, "do not weight by the teacher's confidence", "", "rstg")
    no_opd: bool = knob(False, "RSTG without its distillation: SFT on all-wrong groups, as ReLIFT", "", "rstg")
    no_sft: bool = knob(False, "RSTG without its imitation", "", "rstg")

    out: str = knob("", "folder of the run; default: a fresh runs/<method>-<number>")
    save_every: int = knob(100, "steps between checkpoints; 0 = only at the end", ">= 0")
    overwrite: bool = knob(False, "replace a run that is already in --out (a teacher pool there stays)")
    resume: bool = knob(False, "go on from the newest checkpoint in --out")
    plot: str = knob("", "PNG to draw reward and group shares to, after the run; needs matplotlib")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            flag, value = flag_of(field.name), getattr(self, field.name)
            legal, users = field.metadata["legal"], users_of(field)
            if isinstance(legal, tuple):
                if value not in legal:
                    raise UsageError(f"{flag} {value}: must be one of {', '.join(map(str, legal))}{did_you_mean(value, legal)}")
            elif legal and value is not None and not (math.isfinite(value) and LEGAL[legal](value)):
                raise UsageError(f"{flag} {value}: must be {legal}, for instance {flag} {field.default or 2}")
            if value != field.default and self.method not in users:
                raise UsageError(f"{flag} {value}: --method {self.method} does not read it; it belongs to {', '.join(users)}")
        if self.opd_coef_floor > self.opd_coef and self.method in users_of(type(self).__dataclass_fields__["opd_coef"]):
            raise UsageError(f"--opd-coef-floor {self.opd_coef_floor}: lies above --opd-coef {self.opd_coef}, from where it is "
                             "annealed down; for a constant weight give both the same value")
        if self.resume and self.overwrite:
            raise UsageError("--resume --overwrite: choose one, go on from the run in --out or replace it")

    @property
    def row(self) -> Method:
        """The method's row, with the parts that were switched off taken out of it."""
        row = METHODS[self.method]
        return dataclasses.replace(row, weighted=row.weighted and not self.no_weighting, imitation=None if self.no_sft else row.imitation,
                                   distillation=None if self.no_opd else row.distillation)


# ---------------------------------------------------------------------------------------------------------------------
# 2  Masks, sums, log-probs.  Which tokens did the policy choose, how likely were they, and what is a mean over them?
# ---------------------------------------------------------------------------------------------------------------------


def upcast(x: Tensor) -> Tensor:
    """float32 at least: bfloat16 keeps 8 bits, and a log-softmax over 150,000 tokens needs more.  float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def same_shape(**tensors: Tensor) -> None:
    """Raises ValueError that names every tensor and its shape; broadcasting by accident is the silent fault of this field."""
    if len({x.shape for x in tensors.values()}) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items()))


def token_logps(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """logp[b,t] = log softmax(logits[b,t] / temperature)[ids[b,t+1]]                  (B, L, V), (B, L) -> (B, L-1)

    In nats.  The logits at position t predict the id at t + 1, so column t scores ids[:, t+1] and the first id has no score.
    Raises ValueError where logits and ids differ in B or L.
    """
    same_shape(**{"logits (without vocabulary)": logits[..., 0], "ids": ids})
    logp_all = (upcast(logits[:, :-1]) / temperature).log_softmax(dim=-1)        # (B, L-1, V)
    return logp_all.gather(-1, ids[:, 1:, None]).squeeze(-1)                     # (B, L-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H[b,t] = -sum_v p_v log p_v,  p = softmax(logits[b,t] / temperature)            (B, L, V) -> (B, L)

    In nats.  A logit of -inf is a token that cannot come: it adds 0 to H, and 0 (not NaN) to the gradient.
    """
    logp_all = (upcast(logits) / temperature).log_softmax(dim=-1)
    return -(logp_all.exp() * logp_all.masked_fill(logp_all == -torch.inf, 0.0)).sum(dim=-1)


def action_mask(completion_ids: Tensor, eos_ids: int | Sequence[int]) -> Tensor:
    """True up to and including the first eos of each row                              (B, T), ids -> (B, T) bool

    The eos is a choice of the policy and is trained; what follows it is padding.  Found from the eos and not from the pad
    id, since the two are the same id in many tokenizers: a mask of `ids != pad` then drops every eos.
    """
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_ids, device=completion_ids.device))
    return is_eos.cumsum(dim=1) - is_eos.int() == 0


def truncated(completion_ids: Tensor, eos_ids: int | Sequence[int]) -> Tensor:
    """Rows in which no eos was chosen before the length ran out                       (B, T), ids -> (B,) bool"""
    return ~torch.isin(completion_ids, torch.as_tensor(eos_ids, device=completion_ids.device)).any(dim=1)


def token_weights(mask: Tensor, how: str, length: float | None = None, empty_rows: str = "skip") -> Tensor:
    """w[b,t] such that sum_bt w x is the mean of x that `how` names                    (B, T) bool -> (B, T) float64

    seq_mean_token_mean      1 / (B N_b)     every completion weighs the same       GRPO, arXiv:2402.03300
    token_mean               1 / sum_b N_b   every token weighs the same            DAPO, arXiv:2503.14476
    seq_mean_token_sum_norm  1 / (B length)  a constant divisor                     Dr. GRPO, arXiv:2503.20783

    N_b counts the true entries of row b.  B counts the rows that have any ("skip") or all rows ("count", as TRL).  Made once
    for a whole step, before it is split: then every split into micro-batches adds up to the same gradient.
    Raises ValueError for another word, or where seq_mean_token_sum_norm gets no positive length.
    """
    if empty_rows not in ("skip", "count"):
        raise ValueError(f"empty_rows {empty_rows!r}: must be skip or count")
    counts = mask.sum(dim=1, keepdim=True)                                       # (B, 1)
    rows = mask.any(dim=1).sum() if empty_rows == "skip" else torch.tensor(len(mask), device=mask.device)
    if how == "seq_mean_token_mean":
        divisor = rows * counts
    elif how == "token_mean":
        divisor = counts.sum()
    elif how == "seq_mean_token_sum_norm":
        if not length or length <= 0:
            raise ValueError(f"seq_mean_token_sum_norm divides by a constant: length must be > 0, got {length}")
        divisor = rows * length
    else:
        raise ValueError(f"aggregation {how!r}: must be seq_mean_token_mean, token_mean or seq_mean_token_sum_norm")
    return torch.where(mask, 1.0 / divisor.clamp(min=1e-300).double(), 0.0)


def weighted_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """sum_bt weights terms, where a weight of 0 removes the term, whatever it is       (B, T) x2 -> ()

    Filled, not multiplied: 0 * inf is NaN, and the NaN of one padded token would be the loss of the whole batch.
    """
    same_shape(terms=terms, weights=weights)
    return (upcast(terms).masked_fill(weights == 0, 0.0) * weights.to(upcast(terms).dtype)).sum()


def aggregate(terms: Tensor, mask: Tensor, how: str, length: float | None = None, empty_rows: str = "skip") -> Tensor:
    """The mean of terms over mask that `how` names (see token_weights)                 (B, T) x2 -> ()

    Exactly 0, with a graph and zero gradients, where the mask is empty.
    """
    same_shape(terms=terms, mask=mask)
    return weighted_sum(terms, token_weights(mask, how, length, empty_rows))


# ---------------------------------------------------------------------------------------------------------------------
# 3  Advantages.  How much better was a completion than the others of its group?
# ---------------------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, *, scale: str = "group_std", ddof: int = 0, eps: float = 1e-4, baseline: str = "mean") -> Tensor:
    """A[n,g] = (r[n,g] - mean_g r) / (std_g r + eps)                                  (N, G) -> (N, G)

    DeepSeekMath, arXiv:2402.03300, which names neither ddof nor eps.  The std divides by G - ddof; eps sits outside the root.
    scale "batch_std" takes one std over all rewards of the step, "none" divides by nothing (Dr. GRPO, arXiv:2503.20783).
    baseline "leave_one_out" subtracts the mean of the G - 1 others (RLOO, arXiv:2402.14740).
    A group of equal rewards has exactly 0 everywhere, in every convention and precision.  Detached.
    Raises ValueError for G = 1 (nothing to compare with), for rewards that are not finite, and for other words.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)}: need (N, G) with G 2 or more, since a group of one has nothing to compare with")
    if scale not in ("group_std", "batch_std", "none") or baseline not in ("mean", "leave_one_out") or ddof not in (0, 1):
        raise ValueError(f"scale {scale!r}, baseline {baseline!r}, ddof {ddof}: must be group_std, batch_std or none; "
                         "mean or leave_one_out; 0 or 1")
    r = upcast(rewards.detach())
    if not r.isfinite().all():
        raise ValueError("rewards hold NaN or inf: the reward function returned no number for some completion")
    # In float32 eight rewards of 0.2 have a std of 1.5e-8, so `std == 0` would miss them: compare the rewards themselves.
    equal = r.amax(dim=1, keepdim=True) == r.amin(dim=1, keepdim=True)           # (N, 1)
    centered = r - r.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":         # r_g - sum_{h != g} r_h / (G-1), written as a multiple of the centred reward
        centered = centered * (r.shape[1] / (r.shape[1] - 1))
    # CHOICE: the leave-one-out baseline keeps the full group's std.  test_leave_one_out_keeps_the_std_of_the_full_group
    std = {"group_std": r.std(dim=1, keepdim=True, correction=ddof), "batch_std": r.std(correction=ddof), "none": None}[scale]
    return (centered if std is None else centered / (std + eps)).masked_fill(equal, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# 4  GRPO.  How does an advantage become a gradient, and what keeps the step small?
# ---------------------------------------------------------------------------------------------------------------------


def policy_terms(logp: Tensor, logp_old: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2,
                 dual_clip: float | None = None, ratio_level: str = "token", mask: Tensor | None = None) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = exp(logp - logp_old)     (B, T) x3 -> (B, T)

    PPO, arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476.  Advantages may be (B, 1).  Only logp
    carries a gradient.  At rho = 1 the value is -A and the gradient -A grad logp: a group's terms sum to 0, their gradients do not.
    dual_clip c bounds the term of a negative advantage by c |A| (arXiv:1912.09729).
    ratio_level "sequence" uses one rho a row, the exp of the *mean* log-ratio over mask (GSPO, arXiv:2507.18071).
    Raises ValueError where shapes differ, or where "sequence" comes without a mask.
    """
    same_shape(logp=logp, logp_old=logp_old, advantages=advantages.expand_as(logp) if advantages.shape[1:] == (1,) else advantages)
    log_ratio = upcast(logp) - upcast(logp_old.detach())
    if ratio_level == "sequence":
        if mask is None:
            raise ValueError("ratio_level sequence needs the mask: its mean is over the tokens that the policy chose")
        mean = log_ratio.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    elif ratio_level != "token":
        raise ValueError(f"ratio_level {ratio_level!r}: must be token or sequence")
    ratio, a = log_ratio.exp(), advantages.detach()
    terms = -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        terms = torch.where(a < 0, torch.minimum(terms, -dual_clip * a), terms)
    return terms


def kl_terms(logp: Tensor, logp_ref: Tensor, kind: str = "k3", gradient: str = "estimator") -> Tensor:
    """k1 = -d,  k2 = d^2 / 2,  k3 = e^d - d - 1,  d = logp_ref - logp                    (B, T) x2 -> (B, T)

    Each estimates KL(p, ref) in value when y ~ p (Schulman 2020, "Approximating KL divergence").  What an optimizer follows is the
    gradient, and there they differ, in expectation: k1 gives 0 (it teaches nothing), k2 gives grad KL(p, ref), k3 gives grad
    KL(ref, p), the other direction.  gradient "ratio" multiplies by rho = p / detached p, value 1: then k1 and k3 both give grad KL(p, ref).
    Raises ValueError for other words.
    """
    same_shape(logp=logp, logp_ref=logp_ref)
    d = upcast(logp_ref.detach()) - upcast(logp)
    if kind not in ("k1", "k2", "k3") or gradient not in ("estimator", "ratio"):
        raise ValueError(f"kind {kind!r}, gradient {gradient!r}: must be k1, k2 or k3; estimator or ratio")
    terms = -d if kind == "k1" else d.square() / 2 if kind == "k2" else d.expm1() - d
    return terms if gradient == "estimator" else terms * (d.detach() - d).exp()


def grpo_loss(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, *, how: str = "seq_mean_token_mean",
              length: float | None = None, empty_rows: str = "skip", logp_ref: Tensor | None = None, kl_coef: float = 0.0,
              kl_kind: str = "k3", kl_gradient: str = "estimator", **clip) -> Tensor:
    """mean over tokens of policy_terms + kl_coef kl_terms                                    (B, T) x4 -> ()

    L = (1/B) sum_b (1/N_b) sum_t [-min(rho A, clip(rho) A) + kl_coef k(p, p_ref)], DeepSeekMath, arXiv:2402.03300; `how`, `length` and
    `empty_rows` as in token_weights, `clip` as in policy_terms.  What lies outside the mask is filled before any arithmetic, so NaN
    there reaches neither the value nor the gradient.  Raises ValueError where kl_coef > 0 comes without logp_ref.
    """
    same_shape(logp=logp, mask=mask)
    live = [x.expand_as(logp).masked_fill(~mask, 0.0) for x in (logp, logp_old, advantages)]
    terms = policy_terms(*live, mask=mask, **clip)
    if kl_coef:
        if logp_ref is None:
            raise ValueError(f"kl_coef {kl_coef}: needs logp_ref, the log-probs under the reference policy")
        terms = terms + kl_coef * kl_terms(live[0], logp_ref.masked_fill(~mask, 0.0), kl_kind, kl_gradient)
    return aggregate(terms, mask, how, length, empty_rows)


# ---------------------------------------------------------------------------------------------------------------------
# 5  On-policy distillation.  What is a teacher's log-prob worth, and what does one sampled token say of a whole distribution?
# ---------------------------------------------------------------------------------------------------------------------


def opd_advantages(logp: Tensor, logp_teacher: Tensor) -> Tensor:
    """A[b,t] = log p_T(y_t) - log p_S(y_t)                                              (B, T) x2 -> (B, T)

    In nats, detached.  RSTG, arXiv:2608.00782.  With y ~ p_S the mean is -KL(p_S, p_T), so it is negative on average; a token that the
    teacher likes better than the student does is positive.  logp is that of the policy that sampled.
    """
    same_shape(logp=logp, logp_teacher=logp_teacher)
    return (upcast(logp_teacher) - upcast(logp)).detach()


def opd_loss(logp: Tensor, logp_teacher: Tensor, mask: Tensor, how: str = "seq_mean_token_mean", logp_old: Tensor | None = None,
             **options) -> Tensor:
    """grpo_loss with A = opd_advantages(logp_old, logp_teacher)                            (B, T) x3 -> ()

    logp_old defaults to logp detached: on-policy, where the value is -mean A, an estimate of KL(p_S, p_T).  In expectation over y ~ p_S, with the
    prefix fixed and a constant divisor, the gradient is that of reverse_kl.  It is not that of the KL between whole sequences (that
    has future terms), and a divisor that depends on the sampled length breaks it too.
    """
    logp_old = logp.detach() if logp_old is None else logp_old
    return grpo_loss(logp, logp_old, opd_advantages(logp_old, logp_teacher), mask, how=how, **options)


def _kl(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """KL(a, b) = sum_v a log(a/b) over the last axis; a token that a cannot say adds 0, in value and in gradient."""
    log_ratio = (logp_a - logp_b).masked_fill(logp_a == -torch.inf, 0.0)         # filled before the product: 0 * inf is NaN
    return (logp_a.exp() * log_ratio).sum(dim=-1)


def _log_softmaxes(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    same_shape(student_logits=student_logits, teacher_logits=teacher_logits)
    return tuple((upcast(z) / temperature).log_softmax(dim=-1) for z in (student_logits, teacher_logits.detach()))


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p_S, p_T) = sum_v p_S log(p_S / p_T)                                           (B, T, V) x2 -> (B, T)

    In nats; inf where the student can say what the teacher cannot.  The student's expectation: it may drop a mode, and is not to
    say what the teacher would not.  On student rollouts: arXiv:2306.08543 (MiniLLM), stage 3 of arXiv:2605.12483.
    """
    logp_s, logp_t = _log_softmaxes(student_logits, teacher_logits, temperature)
    return _kl(logp_s, logp_t)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p_T, p_S) = sum_v p_T log(p_T / p_S)                                           (B, T, V) x2 -> (B, T)

    In nats.  The teacher's expectation: the student must cover all that the teacher says.  Residual p_S - p_T.  Stage 2 of arXiv:2605.12483.
    """
    logp_s, logp_t = _log_softmaxes(student_logits, teacher_logits, temperature)
    return _kl(logp_t, logp_s)


def generalized_jsd(student_logits: Tensor, teacher_logits: Tensor, teacher_share: float = 0.5, temperature: float = 1.0) -> Tensor:
    """l KL(p_T, m) + (1-l) KL(p_S, m),  m = l p_T + (1-l) p_S,  l = teacher_share      (B, T, V) x2 -> (B, T)

    In nats, bounded by log 2 at l = 1/2.  GKD, arXiv:2306.13649.  Raises ValueError for l outside (0, 1): at 0 and 1 this formula is 0, while
    libraries return a full KL there; ask forward_kl or reverse_kl by name instead.
    """
    if not 0 < teacher_share < 1:
        raise ValueError(f"teacher_share {teacher_share}: must be in (0, 1); at the ends the formula is 0, see forward_kl and reverse_kl")
    logp_s, logp_t = _log_softmaxes(student_logits, teacher_logits, temperature)
    never = (logp_s == -torch.inf) & (logp_t == -torch.inf)                      # logaddexp(-inf, -inf) has a NaN gradient
    log_m = torch.logaddexp(logp_t.masked_fill(never, 0.0) + math.log(teacher_share),
                            logp_s.masked_fill(never, 0.0) + math.log1p(-teacher_share))
    return teacher_share * _kl(logp_t, log_m) + (1 - teacher_share) * _kl(logp_s, log_m)


# ---------------------------------------------------------------------------------------------------------------------
# 6  Auxiliary SFT.  What can be learned from a prompt on which every own attempt failed?
# ---------------------------------------------------------------------------------------------------------------------


def sft_loss(logp: Tensor, mask: Tensor, how: str = "seq_mean_token_mean", **options) -> Tensor:
    """mean over tokens of -log p_S(y), y a trajectory of the teacher                     (B, T) x2 -> ()

    Cross-entropy; `how` and options as in aggregate.  The auxiliary term of RSTG, arXiv:2608.00782.
    """
    return aggregate(-logp, mask, how, **options)


# ---------------------------------------------------------------------------------------------------------------------
# 7  RSTG.  Where is the reward silent, does the teacher know better there, and at which tokens?      (arXiv:2608.00782)
# ---------------------------------------------------------------------------------------------------------------------

NEGATIVE, MIXED, POSITIVE = -1, 0, 1


def _binary(outcomes: Tensor, what: str) -> Tensor:
    if outcomes.ndim != 2 or outcomes.shape[1] < 1 or not ((outcomes == 0) | (outcomes == 1)).all():
        raise ValueError(f"{what} {tuple(outcomes.shape)}: need a (N, G) tensor of 0 and 1; a shaped reward makes an all-wrong "
                         "group look mixed, so give right or wrong, not the reward")
    return outcomes.bool()


def route_groups(outcomes: Tensor) -> Tensor:
    """NEGATIVE where every outcome of a group is 0, POSITIVE where every one is 1, else MIXED   (N, G) -> (N,)

    The two zero-variance routes have no GRPO gradient: negative is where a teacher has something to add, positive is
    solved.  Raises ValueError for anything but 0 and 1.
    """
    right = _binary(outcomes, "outcomes")
    return right.all(dim=1).long() * POSITIVE + (~right).all(dim=1).long() * NEGATIVE


def teacher_confidence(outcomes: Tensor) -> Tensor:
    """omega[n] = mean_k outcomes[n,k], mean@K of the teacher's own samples                      (N, K) -> (N,)

    mean@K, not pass@K: one right of eight is 0.125, not 1.  Raises ValueError for anything but 0 and 1.
    """
    return _binary(outcomes, "teacher outcomes").float().mean(dim=1)


def _min_max(x: Tensor, mask: Tensor) -> Tensor:
    live = x.masked_fill(~mask, 0.0)
    low, high = x.masked_fill(~mask, torch.inf).amin(), x.masked_fill(~mask, -torch.inf).amax()
    return ((live - low) / (high - low)).masked_fill(~mask | (high <= low), 0.0)


def token_scores(entropy: Tensor, divergence: Tensor, mask: Tensor) -> Tensor:
    """s = h + d - h d, with h = min-max of entropy and d = min-max of divergence               (B, T) x3 -> (B, T)

    Soft-OR of "the student is unsure" and "the teacher disagrees": symmetric, between max(h, d) and 1.  RSTG, after TIP,
    arXiv:2604.14084.  0 outside the mask, whose entries do not enter the scaling; what is constant scales to 0.  Detached.
    Raises ValueError where an entry under the mask is not finite.
    """
    same_shape(entropy=entropy, divergence=divergence, mask=mask)
    if not (entropy.isfinite() & divergence.isfinite())[mask].all():
        raise ValueError("entropy or divergence is not finite at an action token: does the teacher give log-prob -inf to a sampled token?")
    # CHOICE: min-max over all tokens that the mask holds, not within each completion.  test_scores_are_scaled_over_all_routed_tokens
    h, d = (_min_max(upcast(x.detach()), mask) for x in (entropy, divergence))
    return h + d - h * d


def select_tokens(scores: Tensor, mask: Tensor, share: float = 50.0) -> Tensor:
    """The ceil(share N_b / 100) best-scored tokens of each row                                  (B, T) x2 -> (B, T) bool

    share in percent, N_b the true entries of the row; ties go to the earlier token.  Raises ValueError for share outside (0, 100].
    """
    if not 0 < share <= 100:
        raise ValueError(f"share {share}: must be in (0, 100], in percent")
    same_shape(scores=scores, mask=mask)
    # CHOICE: 50 percent, rounded up in exact arithmetic: in floats 7 % of 100 is 8.  test_the_selected_count_is_exact
    exact = Fraction(str(share)) / 100
    count = -((-mask.sum(dim=1, keepdim=True) * exact.numerator) // exact.denominator)      # (B, 1)
    order = scores.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return (order.argsort(dim=1) < count) & mask


def rstg_advantages(outcomes: Tensor, advantages: Tensor, advantages_opd: Tensor, entropy: Tensor, mask: Tensor,
                    confidence: Tensor, *, opd_coef: float, select_share: float = 50.0) -> Tensor:
    """A[b,t] = beta omega[n] A_opd[b,t] [t selected] where group n is NEGATIVE, else A_grpo[n,g]      -> (B, T)

    outcomes, advantages (N, G); advantages_opd, entropy, mask (B, T); confidence (N,); beta = opd_coef.  Selection by token_scores of the student's
    entropy and |A_opd|, `select_share` percent of each completion.  A group that the teacher never solves (omega = 0) is silent.  0 outside the mask.
    Tokens that are not selected stay in the denominator: mask, not the selection, goes to the loss.
    """
    same_shape(outcomes=outcomes, advantages=advantages)
    same_shape(advantages_opd=advantages_opd, entropy=entropy, mask=mask)
    per_row = lambda x: x.repeat_interleave(outcomes.shape[1])[:, None]          # (N,) -> (B, 1)
    negative, omega = per_row(route_groups(outcomes) == NEGATIVE), per_row(confidence)
    # CHOICE: a group with omega = 0 does not enter the scaling of the scores either.  test_a_silent_group_changes_no_other
    routed = negative & (omega > 0) & mask
    selected = select_tokens(token_scores(entropy, advantages_opd.abs(), routed), routed, select_share)
    guided = opd_coef * omega * advantages_opd.masked_fill(~selected, 0.0)
    return torch.where(negative, guided, advantages.reshape(-1, 1)).masked_fill(~mask, 0.0).detach()


def anneal(step: int, start: float, slope: float, floor: float) -> float:
    """beta(step) = max(start - slope step, floor); the paper's 5e-3, 5e-5, 1e-3 reach the floor at step 80

    Raises ValueError where the floor lies above the start or the slope is negative.
    """
    if floor > start or slope < 0:
        raise ValueError(f"anneal start {start}, slope {slope}, floor {floor}: need floor <= start and slope >= 0")
    return max(start - slope * step, floor)


# ---------------------------------------------------------------------------------------------------------------------
# 9  The hybrid objective.  How do reward, distillation and imitation become one loss?
# ---------------------------------------------------------------------------------------------------------------------


def listening(outcomes: Tensor, where: str) -> Tensor:
    """Completions that hear the teacher: "all", the "failed" ones, or those of "negative" groups          (N, G) -> (N, G) bool"""
    if where not in ("all", "failed", "negative"):
        raise ValueError(f"where {where!r}: must be all, failed or negative")
    negative = (route_groups(outcomes) == NEGATIVE)[:, None].expand_as(outcomes)
    return {"all": torch.ones_like(negative), "failed": outcomes == 0, "negative": negative}[where]


def advantage_streams(row: Method, outcomes: Tensor, advantages: Tensor, mask: Tensor, opd_coef: float,
                      advantages_opd: Tensor | None = None, entropy: Tensor | None = None, confidence: Tensor | None = None,
                      select_share: float = 50.0) -> tuple[Tensor, Tensor]:
    """The reward and the distillation advantages that a method's row asks for                        -> (B, T), (B, T)

    outcomes, advantages (N, G); the others as in rstg_advantages.  Their sum is the method's A.  Where only negative groups listen, A_opd *replaces*
    A_grpo there (RSTG's gate); the two never meet at one token.  In the naive hybrids they add.
    """
    reward = advantages.reshape(-1, 1).expand(mask.shape).masked_fill(~mask, 0.0) * row.reward
    if row.distillation != "pg":
        if row.where == "negative" and row.reward:      # the gate stays where RSTG runs without its distillation
            reward = reward.masked_fill(listening(outcomes, "negative").reshape(-1, 1), 0.0)
        return reward, torch.zeros_like(reward)
    hears = listening(outcomes, row.where).reshape(-1, 1)                        # (B, 1)
    if row.where == "negative":
        trust = confidence if row.weighted else torch.ones_like(outcomes[:, 0], dtype=reward.dtype)
        both = rstg_advantages(outcomes, advantages, advantages_opd, entropy, mask, trust, opd_coef=opd_coef,
                               select_share=select_share if row.selected else 100.0)
        return both.masked_fill(hears, 0.0), both.masked_fill(~hears, 0.0)
    return reward, opd_coef * advantages_opd.masked_fill(~(hears & mask), 0.0)


def hybrid_loss(streams: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """L = sum over streams of sum_bt weights terms                                                    {name: (terms, weights)} -> ()

    reward and distillation: policy_terms or divergences, one a completion token; imitation: -logp of a trajectory's tokens.  The weights carry
    divisor and coefficient, so a row, a token or a stream that has none adds exactly nothing, and any split of the rows adds up to the same gradient.
    """
    return sum(weighted_sum(terms, weights) for terms, weights in streams.values())
