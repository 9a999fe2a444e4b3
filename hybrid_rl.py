"""Sparse reward and dense teacher guidance for language models, in one file that is meant to be read.

A language model answers a prompt several times.  A checker says right or wrong: that reward is honest, but it is one bit
for a whole completion, and nothing at all where every answer is wrong.  A stronger model, the teacher, can grade every
token, but it pulls everywhere, also where the student is already right.  Three papers join the two; this file states
them as equations that run:

    GRPO                    DeepSeekMath                 arXiv:2402.03300    sections 3, 4
    RSTG                    where to listen to a teacher arXiv:2608.00782    sections 5, 6, 7
    M3, cross-signal NTK    why the two collide          arXiv:2609.34849    section 8
    sparse to dense         which label for which model  arXiv:2605.12483    section 12

One view of all of it.  Every signal is a residual in logit space, delta_t = dLoss/dz_t, pushed through the same Jacobian:
gradient = sum_t J_t delta_t, J_t = (dz_t / dtheta)^T.  Signals differ in the residual alone; methods also in whose completions
they train on, at which tokens, and how signals are joined (p_S student, p_T teacher, e_y one-hot of the sampled token y, both
probabilities over the whole vocabulary; rho = p_S(y) / p_old(y), here at rho = 1; l = the teacher's share of the mixture m):

    signal                      advantage A_t in the loss -rho_t A_t                residual delta_t
    GRPO                        (r - mean r) / (std r + eps), every token alike     -A (e_y - p_S)
    PG-style OPD                log p_T(y_t) - log p_S(y_t), detached               -A_t (e_y - p_S)
    SFT, teacher's trajectory   1, in the form -log p_S(y)                          -(e_y - p_S)
    reverse KL(p_S, p_T)        none: all tokens at once                            p_S (log(p_S / p_T) - KL(p_S, p_T))
    forward KL(p_T, p_S)        none: all tokens at once                            p_S - p_T
    JSD, m = l p_T + (1-l) p_S  none: all tokens at once                            (1-l) p_S (log(p_S / m) - KL(p_S, m))

Shapes: N prompts, G completions a prompt (a group), B = N G rollouts, row b = n G + g; P prompt tokens, T completion tokens,
L = P + T, V vocabulary.  Functions of several tensors raise ValueError where the shapes differ, and say which.  Names: logp =
log-probability of the sampled token under the student now, logp_old = under the policy that sampled it, logp_ref, logp_teacher
likewise; action_mask (mask for short) = the tokens that the policy chose; outcome = right or wrong; route = what a group's
outcomes say; `*_terms` = one number a token, before any reduction.

Order: 1 config, 2 masks, sums, log-probs, 3 advantages, 4 GRPO, 5 distillation, 6 imitation, 7 RSTG, 8 M3, 9 the objective,
where 4-8 meet; then THE LINE: above it settings and pure functions, below it 10 models and sampling, 11 the loop, 12 the stages
of sparse to dense, 13 the oracle, which judges other implementations of what is above, 14 the command line.
`CHOICE:` marks a value that the papers leave open, `DEVIATES:` a knowing departure; each names the test that pins it.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import zlib
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
    distillation: str | None = None     # stream 2: "pg" (OPD advantages), "reverse_kl", "forward_kl", "jsd" or "sample" (-logp)
    where: str = "all"                  # completions that hear the teacher: "all", "failed", or those of "negative" groups
    weighted: bool = False              # by the teacher's confidence on the prompt (RSTG's omega)
    selected: bool = False              # on the top-scoring tokens only (RSTG's Soft-OR)
    imitation: str | None = None        # stream 3: prompts whose teacher trajectory is imitated: "all" or "negative" groups
    rollouts: str = "student"           # whose completions: "student", "teacher", or "pool" = its shortest correct ones
    join: str = "sum"                   # of reward and distillation: "sum", "gradnorm", "pcgrad", or M3's "select", "soft", "eg"

    @property
    def m3(self) -> bool:
        """Normalised residuals, pushed through the model as one"""
        return self.join in ("select", "soft", "eg")

    @property
    def annealed(self) -> bool:
        """The teacher's weight is opd_coef, which falls from step to step."""
        return self.reward and self.distillation == "pg"


METHODS = {
    "grpo": Method("sparse reward alone", reward=True),
    "opd": Method("PG-style on-policy distillation", distillation="pg"),
    "reverse-kl": Method("full-vocabulary KL(student, teacher) on student rollouts", distillation="reverse_kl"),
    "jsd": Method("full-vocabulary generalised JSD on student rollouts, as GKD", distillation="jsd"),
    "forward-kl": Method("full-vocabulary KL(teacher, student) on teacher rollouts", distillation="forward_kl",
                         rollouts="teacher"),
    "teacher-sft": Method("cross-entropy on the teacher's samples, right or wrong", distillation="sample", rollouts="teacher"),
    "sft": Method("cross-entropy on correct teacher trajectories", imitation="all", rollouts="pool"),
    "grpo+opd": Method("naive hybrid: OPD on every completion", reward=True, distillation="pg"),
    "grpo+opd-failed": Method("naive hybrid: OPD on failed completions", reward=True, distillation="pg", where="failed"),
    "grpo+opd-negative": Method("OPD on all-wrong groups only", reward=True, distillation="pg", where="negative"),
    "rstg": Method("routed, weighted, token-selected OPD and SFT on all-wrong groups", reward=True, distillation="pg",
                   where="negative", weighted=True, selected=True, imitation="negative"),
    "hybrid": Method("reward and clipped JSD to the teacher, mixed by a fixed share", reward=True, distillation="jsd"),
    "gradnorm": Method("that share moved until both gradients are equally long", reward=True,
                       distillation="jsd", join="gradnorm"),
    "pcgrad": Method("hybrid, each gradient without its component against the other", reward=True,
                     distillation="jsd", join="pcgrad"),
    "m3-select": Method("residuals normalised, teacher only where it does not oppose", reward=True,
                        distillation="jsd", join="select"),
    "m3-soft": Method("residuals normalised, teacher's share by their angle", reward=True,
                      distillation="jsd", join="soft"),
    "m3-eg": Method("reward gradient at a look-ahead along the gated teacher", reward=True,
                    distillation="jsd", join="eg"),
}

LEGAL: dict[str, Callable[[float], bool]] = {
    "> 0": lambda v: v > 0, ">= 0": lambda v: v >= 0, ">= 1": lambda v: v >= 1, ">= 2": lambda v: v >= 2, "> 1": lambda v: v > 1,
    "in (0, 100]": lambda v: 0 < v <= 100, "in [0, 1)": lambda v: 0 <= v < 1, "in (0, 1)": lambda v: 0 < v < 1,
    "in [0, 1]": lambda v: 0 <= v <= 1,
}


class UsageError(ValueError):
    """Something the caller gave cannot be used; the message is one line that says what, what would do, and why."""


def knob(default, help: str, legal: str | tuple = "", used_by: str = "all") -> dataclasses.Field:
    """A setting with its help text, its legal range (a key of LEGAL, or the choices), and who reads it (see users_of)."""
    return dataclasses.field(default=default, metadata={"help": help, "legal": legal, "used_by": used_by})


def flag_of(name: str) -> str:
    """opd_coef -> --opd-coef"""
    return "--" + name.replace("_", "-")


def did_you_mean(word, legal: Iterable) -> str:
    """What follows an error message where a legal word is near; else nothing"""
    near = difflib.get_close_matches(str(word), map(str, legal), 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def users_of(field: dataclasses.Field) -> list[str]:
    """The methods that a setting belongs to; another method refuses it, because a flag without effect misleads."""
    both = lambda row: bool(row.reward and row.distillation)
    reads = {"all": lambda row: True, "reward": lambda row: row.reward, "sum": lambda row: not row.m3,
             "ratio": lambda row: (row.reward or row.distillation == "pg") and not row.m3,
             "kl": lambda row: row.reward and row.join == "sum", "annealed": lambda row: row.annealed,
             "sampled": lambda row: row.rollouts != "pool",
             "jsd": lambda row: row.distillation == "jsd", "pool": lambda row: row.imitation or row.weighted,
             "rstg": lambda row: row.selected, "both": both, "mix": lambda row: both(row) and row.distillation == "jsd",
             "share": lambda row: both(row) and row.distillation == "jsd" and not row.m3, "m3": lambda row: row.m3,
             "naive": lambda row: row is METHODS["hybrid"],
             **{join: lambda row, join=join: row.join == join for join in ("gradnorm", "soft", "eg")},
             "scaled": lambda row: row.join in ("select", "soft")}
    return [name for name, row in METHODS.items() if reads[field.metadata["used_by"]](row)]


_TOY = Path(__file__).resolve().parent / "toy_tasks" / "models"


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked when it is made: what is impossible is refused, nothing is clamped.

    Unmarked defaults follow the papers or common use; those marked CHOICE, and the toy's lr, steps and sizes, were tried on it.
    """

    method: str = knob("rstg", "what to train with", tuple(METHODS))
    task: str = knob("chain_sum", "toy task", ("chain_sum", "addition"))
    data: str = knob("", "JSON-lines file, prompt (or messages) and answer on each line, instead of a toy task")
    reward: str = knob("last-number", "judge of --data: last-number, exact, or module:function(completion, answer)")
    system: str = knob("", "system message for the questions of --data that have none; needs a chat template")
    student: str = knob(str(_TOY / "student"), "model to train: a Hugging Face folder or hub name")
    teacher: str = knob(str(_TOY / "teacher"), "frozen teacher with the same tokenizer: a folder or hub name")

    steps: int = knob(300, "optimizer steps, each on fresh rollouts", ">= 1")
    prompts_per_step: int = knob(32, "prompts of a step (N)", ">= 1")
    group_size: int = knob(8, "completions sampled for each prompt (G)", ">= 2", "sampled")
    updates: int = knob(1, "optimizer updates on each batch of rollouts; the ratio leaves 1 from the second on", ">= 1", "sum")
    lr: float = knob(5e-4, "AdamW learning rate, constant (papers: 1e-6 for 1-8B models)", "> 0")
    max_grad_norm: float = knob(1.0, "gradient norm above which the gradient is scaled down", "> 0")
    temperature: float = knob(1.0, "sampling temperature; divides every model's logits in the losses too", "> 0")
    max_new_tokens: int = knob(16, "longest completion, in tokens", ">= 1")
    train_prompts: int = knob(512, "distinct training prompts, or all where there are fewer; repeated over epochs", ">= 1")
    part: str = knob("all", "which training prompts; first and second are halves that share none", ("all", "first", "second"))
    eval_problems: int = knob(800, "held-out problems asked before and after, or all where there are fewer; 0 = none", ">= 0")
    seed: int = knob(0, "seed of prompt order and sampling", ">= 0")
    device: str = knob("auto", "where to run; auto takes a GPU if there is one", ("auto", "cpu", "cuda"))
    dtype: str = knob("float32", "of the forward passes; weights and losses stay float32", ("float32", "bfloat16"))
    micro_batch: int = knob(256, "completions in one forward pass; changes memory and speed, not the gradient", ">= 1")
    gradient_checkpointing: bool = knob(False, "compute layers again on the way back: less memory, slower")

    advantage_scale: str = knob("group_std", "divisor of an advantage; none = Dr. GRPO", ("group_std", "batch_std", "none"),
                                "reward")
    advantage_ddof: int = knob(0, "std divides by G - ddof; TRL and verl use 1", (0, 1), "reward")
    advantage_eps: float = knob(1e-4, "added to the std, outside the root", ">= 0", "reward")
    baseline: str = knob("mean", "what a reward is compared with; leave_one_out = RLOO", ("mean", "leave_one_out"), "reward")
    aggregation: str = knob("seq_mean_token_mean", "mean over tokens: GRPO's, DAPO's, Dr. GRPO's",
                            ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"), "sampled")
    aggregation_length: int = knob(0, "constant token divisor of seq_mean_token_sum_norm; 0 = max_new_tokens", ">= 0",
                                   "sampled")
    empty_rows: str = knob("skip", "does a completion without tokens count in a mean; count = as TRL", ("skip", "count"),
                           "sampled")
    skip_truncated: bool = knob(False, "leave completions that never ended out of the loss", "", "sampled")
    clip_low: float = knob(0.2, "lower clip of the ratio: 1 - this", "in [0, 1)", "ratio")
    clip_high: float = knob(0.2, "upper clip of the ratio: 1 + this", ">= 0", "ratio")
    dual_clip: float | None = knob(None, "bound on the loss of a negative advantage, in units of it", "> 1", "ratio")
    ratio_level: str = knob("token", "one ratio a token, or one a sequence = GSPO", ("token", "sequence"), "ratio")
    kl_coef: float = knob(0.0, "weight of the KL to the student as it was at the start", ">= 0", "kl")
    kl_kind: str = knob("k3", "estimator of that KL", ("k1", "k2", "k3"), "kl")
    kl_gradient: str = knob("estimator", "differentiate the estimator itself, or times the ratio", ("estimator", "ratio"), "kl")

    # CHOICE: 0.1 to 0.02 on the toy, 20 times the paper's.  test_the_opd_coef_of_the_toy_anneals_in_the_papers_ratio
    opd_coef: float = knob(0.1, "weight of the teacher in a hybrid at step 0 (RSTG's beta; paper 5e-3)", ">= 0", "annealed")
    opd_coef_slope: float = knob(1e-3, "what it loses each step (paper 5e-5)", ">= 0", "annealed")
    opd_coef_floor: float = knob(0.02, "where it stops (paper 1e-3)", ">= 0", "annealed")
    jsd_share: float = knob(0.5, "the teacher's share l of the JSD mixture", "in (0, 1)", "jsd")
    teacher_samples: int = knob(8, "teacher completions a prompt, for its confidence and its trajectories", ">= 1", "pool")
    teacher_pool: str = knob("", "file to keep those in and to take them from; default: in the run's folder", "", "pool")
    select_share: float = knob(50.0, "percent of a completion's tokens that hear the teacher", "in (0, 100]", "rstg")
    no_weighting: bool = knob(False, "do not weight by the teacher's confidence", "", "rstg")
    no_opd: bool = knob(False, "RSTG without its distillation: SFT on all-wrong groups, as ReLIFT", "", "rstg")
    no_sft: bool = knob(False, "RSTG without its imitation", "", "rstg")

    teacher_share: float = knob(0.5, "the teacher's share alpha of a hybrid's loss; gradnorm starts there", "in [0, 1)", "share")
    divergence_clip: float = knob(0.05, "JSD in nats above which a token does not hear the teacher (tau); 0.7 = never", "> 0",
                                    "mix")
    gradnorm_rate: float = knob(0.025, "how fast gradnorm moves the share", "in (0, 1)", "gradnorm")
    # CHOICE: 0.5; the paper uses 0.001 to 0.5.  test_m3_keeps_the_stated_defaults
    max_teacher_share: float = knob(0.5, "largest share of the teacher at a token (M3's alpha_max)", "in [0, 1]", "m3")
    gate_sharpness: float = knob(1.0, "how fast M3-Soft closes with the angle (its beta)", "> 0", "soft")
    scale_decay: float = knob(0.99, "decay of the average reward-gradient norm that scales M3's update", "in [0, 1)", "scaled")
    lookahead_lr: float = knob(0.0, "plain gradient step of M3-EG's look-ahead; 0 = lr", ">= 0", "eg")
    exact_gate: bool = knob(False, "M3's gate from per-token Jacobians; slow, logs how often the residual form agrees", "", "m3")
    diagnose: bool = knob(False, "log kappa, cos_phi, conflict_rate, drowning; costs a backward pass or two", "", "both")
    probe: int = knob(0, "take this many steps of the naive mix, report kappa and what the paper's rule names", ">= 0", "naive")

    out: str = knob("", "folder of the run; default: a fresh runs/<method>-<number>")
    save_every: int = knob(100, "steps between checkpoints; 0 = only at the end", ">= 0")
    overwrite: bool = knob(False, "replace a run that is already in --out (a teacher pool there stays)")
    resume: bool = knob(False, "go on from the newest checkpoint in --out")
    # CHOICE: 20 steps in a row.  test_a_run_that_cannot_learn_says_so_once
    warn_after: int = knob(20, "steps in a row without reward, mixed group or end that bring one warning; 0 = never", ">= 0")
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
            if value != field.default and not set(self.methods) & set(users):
                who = f"--method {self.method} does" if len(self.methods) == 1 else "the stages do"
                raise UsageError(f"{flag} {value}: {who} not read it; it belongs to {', '.join(users)}")
        if self.opd_coef_floor > self.opd_coef and METHODS[self.method].annealed:
            raise UsageError(f"--opd-coef-floor {self.opd_coef_floor}: lies above --opd-coef {self.opd_coef}, from where it is "
                             "annealed down; for a constant weight give both the same value")
        for name in ("reward", "system"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and not self.data:
                raise UsageError(f"--{name} {getattr(self, name)}: belongs to --data; the toy tasks have their own")
        if self.gradient_checkpointing and self.exact_gate:
            raise UsageError("--gradient-checkpointing --exact-gate: choose one, the exact gate needs all layers at once")
        if self.resume and not self.out:
            raise UsageError("--resume: needs --out FOLDER, the run to go on with")
        if self.resume and self.overwrite:
            raise UsageError("--resume --overwrite: choose one, go on from the run in --out or replace it")

    @property
    def methods(self) -> tuple[str, ...]:
        """All that these settings are for; a workflow has several"""
        return (self.method,)

    @property
    def row(self) -> Method:
        """The method's row, with the parts that were switched off taken out of it."""
        row = METHODS[self.method]
        return dataclasses.replace(row, weighted=row.weighted and not self.no_weighting,
                                   imitation=None if self.no_sft else row.imitation,
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


def _fraction(name: str, value: float) -> float:
    """The value, if it is a fraction"""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} {value}: must be in [0, 1], a fraction")
    return value


def _aligned_logps(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """token_logps without its shift: logits[b,t] predict ids[b,t]                     (B, T, V), (B, T) -> (B, T)"""
    return (upcast(logits) / temperature).log_softmax(dim=-1).gather(-1, ids[..., None]).squeeze(-1)


def token_logps(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """logp[b,t] = log softmax(logits[b,t] / temperature)[ids[b,t+1]]                  (B, L, V), (B, L) -> (B, L-1)

    In nats.  The logits at position t predict the id at t + 1, so column t scores ids[:, t+1] and the first id has
    no score. Raises ValueError where logits and ids differ in B or L.
    """
    same_shape(**{"logits (without vocabulary)": logits[..., 0], "ids": ids})
    return _aligned_logps(logits[:, :-1], ids[:, 1:], temperature)               # (B, L-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H[b,t] = -sum_v p_v log p_v,  p = softmax(logits[b,t] / temperature)            (B, L, V) -> (B, L)

    In nats.  A logit of -inf is a token that cannot come: it adds 0 to H, and 0 (not NaN) to the gradient.
    """
    logp_all = (upcast(logits) / temperature).log_softmax(dim=-1)
    return -(logp_all.exp() * logp_all.masked_fill(logp_all == -torch.inf, 0.0)).sum(dim=-1)


def action_mask(completion_ids: Tensor, eos_ids: int | Sequence[int]) -> Tensor:
    """True up to and including the first eos of each row                              (B, T), ids -> (B, T) bool

    The eos is a choice of the policy and is trained; what follows it is padding.  Found from the eos and not from
    the pad id, since the two are the same id in many tokenizers: a mask of `ids != pad` then drops every eos.
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

    N_b counts the true entries of row b.  B counts the rows that have any ("skip") or all rows ("count", as TRL).
    Made once for a whole step, before it is split: then every split into micro-batches adds up to the same gradient.
    Raises ValueError for another how or empty_rows, or where seq_mean_token_sum_norm gets no positive length.
    """
    if empty_rows not in ("skip", "count"):
        raise ValueError(f"empty_rows {empty_rows!r}: must be skip or count")
    counts = mask.sum(dim=1, keepdim=True).double()                              # (B, 1); in float32 w would be rounded
    rows = mask.any(dim=1).sum().double() if empty_rows == "skip" else counts.new_tensor(len(mask))
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
    return torch.where(mask, 1.0 / divisor, 0.0)


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


def group_advantages(rewards: Tensor, *, scale: str = "group_std", ddof: int = 0, eps: float = 1e-4,
                     baseline: str = "mean") -> Tensor:
    """A[n,g] = (r[n,g] - mean_g r) / (std_g r + eps)                                  (N, G) -> (N, G)

    DeepSeekMath, arXiv:2402.03300, which names neither ddof nor eps.  The std divides by G - ddof; eps sits outside
    the root. scale "batch_std" takes one std over all rewards of the step, "none" divides by nothing (Dr. GRPO,
    arXiv:2503.20783). baseline "leave_one_out" subtracts the mean of the G - 1 others (RLOO, arXiv:2402.14740). A
    group of equal rewards has exactly 0 everywhere, in every convention and precision.  Detached. Raises ValueError
    for G = 1 (nothing to compare with), for rewards that are not finite, and for another scale, baseline or ddof.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)}: need (N, G) with G 2 or more; one alone has nothing to compare with")
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


def _per_token(advantages: Tensor, logp: Tensor) -> Tensor:
    """(B, 1) or (B, T) -> (B, T); nothing else is broadcast"""
    return advantages.expand_as(logp) if advantages.shape == (len(logp), 1) else advantages


def policy_terms(logp: Tensor, logp_old: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2,
                 dual_clip: float | None = None, ratio_level: str = "token", mask: Tensor | None = None) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = exp(logp - logp_old)     (B, T) x3 -> (B, T)

    PPO, arXiv:1707.06347; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476.  Advantages may be (B, 1).
    Only logp carries a gradient.  At rho = 1 the value is -A and the gradient -A grad logp: a group's row means
    sum to 0, their gradients do not. dual_clip c bounds the term of a negative advantage by c |A| (arXiv:1912.09729).
    ratio_level "sequence" uses one rho a row, the exp of the *mean* log-ratio over mask (GSPO, arXiv:2507.18071).
    Raises ValueError where shapes differ, or where "sequence" comes without a mask.
    """
    same_shape(logp=logp, logp_old=logp_old, advantages=_per_token(advantages, logp))
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

    Each estimates KL(p, ref) in value when y ~ p (Schulman 2020, "Approximating KL divergence").  What an optimizer
    follows is the gradient, and there they differ, in expectation: k1 gives 0 (it teaches nothing), k2 gives grad
    KL(p, ref), k3 gives grad KL(ref, p), the other direction.  gradient "ratio" multiplies by rho = p / detached p,
    value 1: then k1 and k3 both give grad KL(p, ref), and k2 does not.  Raises ValueError for another kind or gradient.
    """
    same_shape(logp=logp, logp_ref=logp_ref)
    d = upcast(logp_ref.detach()) - upcast(logp)
    if kind not in ("k1", "k2", "k3") or gradient not in ("estimator", "ratio"):
        raise ValueError(f"kind {kind!r}, gradient {gradient!r}: must be k1, k2 or k3; estimator or ratio")
    terms = -d if kind == "k1" else d.square() / 2 if kind == "k2" else d.expm1() - d
    return terms if gradient == "estimator" else terms * (d.detach() - d).exp()           # p / detached p: d holds -logp


def grpo_loss(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, *, how: str = "seq_mean_token_mean",
              length: float | None = None, empty_rows: str = "skip", logp_ref: Tensor | None = None, kl_coef: float = 0.0,
              kl_kind: str = "k3", kl_gradient: str = "estimator", **policy) -> Tensor:
    """mean over tokens of policy_terms + kl_coef kl_terms             (B, T) x2, (B, T) or (B, 1), (B, T) -> ()

    L = (1/B) sum_b (1/N_b) sum_t [-min(rho A, clip(rho) A) + kl_coef k(p, p_ref)], DeepSeekMath, arXiv:2402.03300;
    `how`, `length` and `empty_rows` as in token_weights, `policy` as in policy_terms.  What lies outside the mask is
    filled before any arithmetic, so NaN there reaches neither the value nor the gradient.  Raises ValueError where
    kl_coef > 0 comes without logp_ref.
    """
    same_shape(logp=logp, logp_old=logp_old, mask=mask, advantages=_per_token(advantages, logp))
    live = [x.masked_fill(~mask, 0.0) for x in (logp, logp_old, _per_token(advantages, logp))]
    terms = policy_terms(*live, mask=mask, **policy)
    if kl_coef:
        if logp_ref is None:
            raise ValueError(f"kl_coef {kl_coef}: needs logp_ref, the log-probs under the reference policy")
        same_shape(logp=logp, logp_ref=logp_ref)
        terms = terms + kl_coef * kl_terms(live[0], logp_ref.masked_fill(~mask, 0.0), kl_kind, kl_gradient)
    return aggregate(terms, mask, how, length, empty_rows)


# ---------------------------------------------------------------------------------------------------------------------
# 5  On-policy distillation.  What is a teacher's log-prob worth, and what does one sampled token say of a whole distribution?
# ---------------------------------------------------------------------------------------------------------------------


def opd_advantages(logp: Tensor, logp_teacher: Tensor) -> Tensor:
    """A[b,t] = log p_T(y_t) - log p_S(y_t)                                              (B, T) x2 -> (B, T)

    In nats, detached.  RSTG, arXiv:2608.00782.  With y ~ p_S the mean is -KL(p_S, p_T), so it is negative on average; a
    token that the teacher likes better than the student does is positive.  logp is that of the policy that sampled.  A
    logp_teacher of exactly 0, a teacher that is certain, is a value: only a mask says what is missing.
    """
    same_shape(logp=logp, logp_teacher=logp_teacher)
    return (upcast(logp_teacher) - upcast(logp)).detach()


def opd_loss(logp: Tensor, logp_teacher: Tensor, mask: Tensor, how: str = "seq_mean_token_mean", logp_old: Tensor | None = None,
             **options) -> Tensor:
    """grpo_loss with A = opd_advantages(logp_old, logp_teacher)                            (B, T) x3 -> ()

    logp_old defaults to logp detached: on-policy, where the value is -mean A, an estimate of KL(p_S, p_T).  In
    expectation over y ~ p_S, with the prefix fixed and a constant divisor, the gradient is that of reverse_kl.  It
    is not that of the KL between whole sequences (that has future terms), and a divisor that depends on the sampled
    length, as the default's does, breaks it too.
    """
    logp_old = logp.detach() if logp_old is None else logp_old
    return grpo_loss(logp, logp_old, opd_advantages(logp_old, logp_teacher), mask, how=how, **options)


def _kl(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """KL(a, b) = sum_v a log(a/b) over the last axis; a token that a cannot say adds 0, in value and in gradient."""
    log_ratio = (logp_a - logp_b).masked_fill(logp_a == -torch.inf, 0.0)         # filled before the product: 0 * inf is NaN
    return (logp_a.exp() * log_ratio).sum(dim=-1)


def _log_softmaxes(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p_S, and log p_T without a graph                                             (B, T, V) x2 -> (B, T, V) x2"""
    same_shape(student_logits=student_logits, teacher_logits=teacher_logits)
    return tuple((upcast(z) / temperature).log_softmax(dim=-1) for z in (student_logits, teacher_logits.detach()))


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p_S, p_T) = sum_v p_S log(p_S / p_T)                                           (B, T, V) x2 -> (B, T)

    In nats; inf where the student can say what the teacher cannot.  The student's expectation: it may drop a mode,
    and is not to say what the teacher would not.  On student rollouts: arXiv:2306.08543 (MiniLLM), stage 3 of
    arXiv:2605.12483.
    """
    logp_s, logp_t = _log_softmaxes(student_logits, teacher_logits, temperature)
    return _kl(logp_s, logp_t)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p_T, p_S) = sum_v p_T log(p_T / p_S)                                           (B, T, V) x2 -> (B, T)

    In nats.  The teacher's expectation: the student must cover all that the teacher says.  Residual p_S - p_T.
    Stage 2 of arXiv:2605.12483.
    """
    logp_s, logp_t = _log_softmaxes(student_logits, teacher_logits, temperature)
    return _kl(logp_t, logp_s)


def generalized_jsd(student_logits: Tensor, teacher_logits: Tensor, teacher_share: float = 0.5,
                    temperature: float = 1.0) -> Tensor:
    """l KL(p_T, m) + (1-l) KL(p_S, m),  m = l p_T + (1-l) p_S,  l = teacher_share      (B, T, V) x2 -> (B, T)

    In nats, bounded by log 2 at l = 1/2.  GKD, arXiv:2306.13649.  Raises ValueError for l outside (0, 1): at 0 and 1
    this formula is 0, while libraries return a full KL there; ask forward_kl or reverse_kl by name instead.
    """
    if not 0 < teacher_share < 1:
        raise ValueError(f"teacher_share {teacher_share}: must be in (0, 1); at the ends it is 0, see forward_kl and reverse_kl")
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

    Soft-OR of "the student is unsure" and "the teacher disagrees": symmetric, between max(h, d) and 1.  RSTG, after
    TIP, arXiv:2604.14084.  0 outside the mask, whose entries do not enter the scaling; what is constant scales to 0.
    Detached. Raises ValueError where an entry under the mask is not finite.
    """
    same_shape(entropy=entropy, divergence=divergence, mask=mask)
    if not (entropy.isfinite() & divergence.isfinite())[mask].all():
        raise ValueError("entropy or divergence is not finite at an action token: does the teacher give a sampled token "
                         "log-prob -inf?")
    # CHOICE: min-max over all tokens under the mask, not within each completion.  test_scores_are_scaled_over_all_routed_tokens
    h, d = (_min_max(upcast(x.detach()), mask) for x in (entropy, divergence))
    return h + d - h * d


def select_tokens(scores: Tensor, mask: Tensor, share: float = 50.0) -> Tensor:
    """The ceil(share N_b / 100) best-scored tokens of each row                                  (B, T) x2 -> (B, T) bool

    share in percent, N_b the true entries of the row; ties go to the earlier token.  Raises ValueError for share
    outside (0, 100].
    """
    if not 0 < share <= 100:
        raise ValueError(f"share {share}: must be in (0, 100], in percent")
    same_shape(scores=scores, mask=mask)
    # CHOICE: 50 percent, rounded up in exact arithmetic: in floats 7 % of 100 is 8.  test_the_selected_count_is_exact
    exact = Fraction(str(share)) / 100
    count = torch.tensor([math.ceil(n * exact) for n in mask.sum(dim=1).tolist()], device=mask.device)[:, None]     # (B, 1)
    order = scores.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)         # 0 = highest: the argsort of a permutation is its inverse
    return (rank < count) & mask


def rstg_advantages(outcomes: Tensor, advantages: Tensor, advantages_opd: Tensor, entropy: Tensor, mask: Tensor,
                    confidence: Tensor, *, opd_coef: float, select_share: float = 50.0) -> Tensor:
    """A[b,t] = beta omega[n] A_opd[b,t] [t selected] where group n is NEGATIVE, else A_grpo[n,g]      -> (B, T)

    outcomes, advantages (N, G); advantages_opd, entropy, mask (B, T); confidence (N,); beta = opd_coef.  Selection
    by token_scores of the student's entropy and |A_opd|, `select_share` percent of each completion.  A group that
    the teacher never solves (omega = 0) is silent.  0 outside the mask. Tokens that are not selected stay in the
    denominator: mask, not the selection, goes to the loss.
    """
    same_shape(outcomes=outcomes, advantages=advantages)
    same_shape(advantages_opd=advantages_opd, entropy=entropy, mask=mask)
    per_row = lambda x: x.repeat_interleave(outcomes.shape[1])[:, None]          # (N,) -> (B, 1)
    negative, omega = per_row(route_groups(outcomes) == NEGATIVE), per_row(confidence)
    # CHOICE: a group with omega = 0 does not enter the scaling of the scores either.  test_a_silent_group_changes_no_other
    routed = negative & (omega > 0) & mask
    selected = select_tokens(token_scores(entropy, advantages_opd.abs(), routed), routed, select_share)
    # CHOICE: a token that is not selected stays in the denominator.  test_tokens_that_are_not_selected_stay_in_the_denominator
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
# 8  M3 and the cross-signal NTK.  Why can a loud reward and a quiet teacher not share a coefficient?  (arXiv:2609.34849)
# ---------------------------------------------------------------------------------------------------------------------


def reward_residual(logits: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """delta[b,t] = dLoss/dlogits = -A (e_y - p_S)                     (B, T, V), (B, T), (B, T) or (B, 1) -> (B, T, V)

    At rho = 1, of policy_terms with these advantages: GRPO's, or A_opd for PG-style OPD; with A = 1 of sft_loss.
    logits[b,t] predict ids[b,t]: aligned, where token_logps shifts.  At a temperature give logits / temperature, here
    and below.  Residuals, gates and K_DR are constants: detached.  Raises ValueError where shapes differ.
    """
    a = _per_token(advantages, ids)
    same_shape(**{"logits (without vocabulary)": logits[..., 0], "ids": ids, "advantages": a})
    p = upcast(logits.detach()).softmax(dim=-1)
    return -a.detach().to(p.dtype)[..., None] * (torch.zeros_like(p).scatter_(-1, ids[..., None], 1.0) - p)


def distillation_residual(student_logits: Tensor, teacher_logits: Tensor, kind: str = "forward_kl", teacher_share: float = 0.5,
                          clip: float | None = None) -> Tensor:
    """delta[b,t] = dDivergence/dstudent_logits                                          (B, T, V) x2 -> (B, T, V)

    forward_kl  p_S - p_T           reverse_kl  p_S (log(p_S/p_T) - KL(p_S, p_T))
    jsd         (1-l) p_S (log(p_S/m) - KL(p_S, m)),  m = l p_T + (1-l) p_S, l = teacher_share

    With clip (tau, nats) the residual is 0 where generalized_jsd > clip: there min(JSD, tau) is constant.  M3's K_DR
    and normalised residual use forward_kl, whose direction the others share near agreement (JSD_1/2 is 1/4 of it).
    Where the student can say what the teacher cannot, reverse_kl's value is inf and its residual NaN.  Raises ValueError for
    another kind, or a teacher_share outside [0, 1].
    """
    logp_s, logp_t = _log_softmaxes(student_logits.detach(), teacher_logits, 1.0)
    p_s, p_t = logp_s.exp(), logp_t.exp()
    if kind == "forward_kl":
        residual = p_s - p_t
    elif kind in ("reverse_kl", "jsd"):
        share = 1.0 if kind == "reverse_kl" else 1 - _fraction("teacher_share", teacher_share)
        other = logp_t if kind == "reverse_kl" else (teacher_share * p_t + share * p_s).log()
        log_ratio = (logp_s - other).masked_fill(p_s == 0, 0.0)                  # what the student cannot say has no gradient
        residual = share * p_s * (log_ratio - (p_s * log_ratio).sum(dim=-1, keepdim=True))
    else:
        raise ValueError(f"kind {kind!r}: must be forward_kl, reverse_kl or jsd")
    if clip is not None:
        too_far = generalized_jsd(student_logits.detach(), teacher_logits, teacher_share) > clip
        residual = residual.masked_fill(too_far[..., None], 0.0)
    return residual


def unit_residual(residual: Tensor, eps: float = 1e-6) -> Tensor:
    """delta / (|delta| + eps), the norm over the vocabulary; a zero residual stays zero            (B, T, V) -> (B, T, V)"""
    # CHOICE: eps 1e-6; below it, float32 noise between equal models gets length 1.  test_noise_does_not_become_a_unit_vector
    r = upcast(residual.detach())
    return r / (r.norm(dim=-1, keepdim=True) + eps)


def cross_signal_ntk(residual_d: Tensor, residual_r: Tensor) -> Tensor:
    """K_DR[b,t] = delta_D . delta_R, negative where the two signals conflict                   (B, T, V) x2 -> (B, T)

    The residual form: that of a kernel J_t^T J_t = identity (see exact_cross_signal_ntk).  With delta_D = p_S - p_T it is
    -A (sigma + eta), sigma = p_S(y) - p_T(y), eta = p_T . p_S - |p_S|^2.  Of unit residuals it is their cosine.
    """
    same_shape(residual_d=residual_d, residual_r=residual_r)
    return (upcast(residual_d) * upcast(residual_r)).sum(dim=-1).detach()


def exact_cross_signal_ntk(logits: Tensor, parameters: Sequence[Tensor], residual_d: Tensor, residual_r: Tensor,
                           eps: float = 1e-12) -> tuple[Tensor, Tensor]:
    """K_DR[b,t] = <J_t delta_D, J_t delta_R>, J_t = (dlogits[b,t]/dparameters)^T, and its cosine  (B, T, V) x3 -> (B, T) x2

    cos phi = K_DR / (|J_t delta_D| |J_t delta_R| + eps).  logits carry their graph.  Two backward passes a position, batched by
    16 positions: for small models and few of them.  Positions where a residual is 0 give 0 and cost nothing.
    """
    same_shape(logits=logits, residual_d=residual_d, residual_r=residual_r)
    k_dr = torch.zeros(logits.shape[:2], dtype=upcast(logits).dtype, device=logits.device)
    cosine, live = k_dr.clone(), (residual_d.ne(0).any(dim=-1) & residual_r.ne(0).any(dim=-1)).nonzero()
    for some in live.split(16) if len(live) else ():
        n, (b, t) = torch.arange(len(some), device=logits.device), some.unbind(dim=1)
        probes = torch.zeros(2, len(some), *logits.shape, dtype=logits.dtype, device=logits.device)
        for probe, residual in zip(probes, (residual_d, residual_r)):
            probe[n, b, t] = residual[b, t].to(logits.dtype)
        pulled = torch.autograd.grad(logits, parameters, probes.flatten(0, 1), retain_graph=True, is_grads_batched=True,
                                     allow_unused=True)
        h_d, h_r = upcast(torch.cat([g.flatten(1) for g in pulled if g is not None], dim=1)).view(2, len(some), -1)
        k_dr[b, t] = (h_d * h_r).sum(dim=1)
        cosine[b, t] = k_dr[b, t] / (h_d.norm(dim=1) * h_r.norm(dim=1) + eps)
    return k_dr, cosine


def select_gate(k_dr: Tensor, max_share: float = 0.5) -> Tensor:
    """alpha[b,t] = alpha_max [K_DR >= 0], the teacher's share at a token                              (B, T) -> (B, T)

    M3-Select.  With the exact K_DR, <h_H, h_R> >= (1 - alpha_max) |h_R|^2 at every position, with h_q = J_t unit(delta_q) and
    h_H = alpha h_D + (1 - alpha) h_R: no token's joint pull works against its own reward pull.  With the residual form it can,
    and the sum over tokens has cross terms that no gate sees.  Where the teacher is silent K_DR = 0: it gets alpha_max of
    nothing, and the reward keeps 1 - alpha_max.  Raises ValueError for a max_share outside [0, 1].
    """
    return _fraction("max_share", max_share) * (k_dr.detach() >= 0).to(upcast(k_dr).dtype)


def soft_gate(cosine: Tensor, max_share: float = 0.5, sharpness: float = 1.0) -> Tensor:
    """alpha[b,t] = alpha_max sigmoid(sharpness cos phi)                                               (B, T) -> (B, T)

    M3-Soft, whose beta is the sharpness.  Infinitely sharp it is select_gate but at a cosine of exactly 0, where this is half of
    it.  Raises ValueError for a max_share outside [0, 1].
    """
    return _fraction("max_share", max_share) * (sharpness * upcast(cosine.detach())).sigmoid()


def m3_residual(residual_d: Tensor, residual_r: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    """alpha unit(delta_D) + (1 - alpha) unit(delta_R)                             (B, T, V) x2, (B, T) -> (B, T, V)

    Normalise, then gate: rescaling a signal changes nothing (up to eps), so neither can drown the other.  Of an advantage
    only the sign is left.
    """
    same_shape(residual_d=residual_d, residual_r=residual_r)
    same_shape(**{"residual (without vocabulary)": residual_d[..., 0], "gate": gate})
    alpha = gate.detach()[..., None]
    return alpha * unit_residual(residual_d, eps) + (1 - alpha) * unit_residual(residual_r, eps)


def residual_terms(logits: Tensor, residual: Tensor) -> Tensor:
    """delta . z, whose gradient with respect to the logits z is delta                             (B, T, V) x2 -> (B, T)

    Weighted and summed, one backward pass makes sum_t w_t J_t delta_t of it.  Its value means nothing.  A logit of -inf adds 0.
    """
    same_shape(logits=logits, residual=residual)
    return (upcast(logits).masked_fill(logits == -torch.inf, 0.0) * residual.detach()).sum(dim=-1)


def gradient_geometry(grad_r: Tensor, grad_d: Tensor) -> tuple[Tensor, Tensor]:
    """kappa = |g_R| / |g_D|,  cos phi = <g_D, g_R> / (|g_D| |g_R|), of two flat gradients              (P,) x2 -> (), ()

    A zero gradient has no angle: cos phi is 0 there, and kappa is 0, inf, or (both zero) NaN.
    """
    same_shape(grad_r=grad_r, grad_d=grad_d)
    r, d = upcast(grad_r).norm(), upcast(grad_d).norm()
    return r / d, torch.where(r * d > 0, upcast(grad_r) @ upcast(grad_d) / (r * d), 0.0)


def drowning_threshold(kappa: float | Tensor, share: float) -> Tensor:
    """-alpha / ((1 - alpha) kappa)                                                                          () -> ()

    Below this cos phi a small gradient step on (1-alpha) L_R + alpha L_D raises L_D: magnitude drowning.  dL_D is
    proportional to -[alpha + (1-alpha) kappa cos phi]: the louder the reward, the milder a conflict suffices.
    """
    return -_fraction("share", share) / ((1 - share) * torch.as_tensor(kappa))


def conflict_rate(k_dr: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Share of tokens with K_DR < 0, of all under the mask, and of those with K_DR other than 0            (B, T) x2 -> (), ()

    NaN where there is no such token.
    """
    # CHOICE: both shares; silence is no conflict.  test_silent_tokens_are_counted_once_and_left_out_once
    same_shape(k_dr=k_dr, mask=mask)
    conflicts, scored = ((k_dr < 0) & mask).sum(), ((k_dr != 0) & mask).sum()
    return conflicts / mask.sum(), conflicts / scored


def ema(average: float | None, value: float, decay: float = 0.99) -> float | None:
    """decay average + (1 - decay) value; starts at the first value that is not 0 and passes over zeros

    M3's scale s, with value = |g_R| before normalisation.  Raises ValueError for a decay outside [0, 1].
    """
    # CHOICE: decay 0.99, a step without reward gradient is none.  test_the_scale_starts_at_the_first_step_with_a_reward_gradient
    kept = _fraction("decay", decay)
    if not value:
        return average
    return value if average is None else kept * average + (1 - kept) * value


def gradnorm_step(share: float, norm_r: float, norm_d: float, rate: float = 0.025) -> float:
    """One step of alpha towards alpha |g_D| = (1 - alpha) |g_R|, that is towards alpha = kappa / (1 + kappa)

    After GradNorm, arXiv:1711.02257: descent on sum_i |w_i |g_i| - mean|, the weights rescaled to sum 1.  Unchanged where a norm
    is 0 or both are equally loud; else the odds of the share move by the factor exp(2 rate) or its inverse.
    """
    # DEVIATES: no loss ratios (GRPO's loss is 0); log weights need no clamp.  test_gradnorm_settles_where_the_two_norms_are_equal
    if not norm_r or not norm_d:
        return share
    difference = share * norm_d - (1 - share) * norm_r
    sign = (difference > 0) - (difference < 0)
    odds = share / (1 - share) * math.exp(-2 * rate * sign)
    return odds / (1 + odds)


def pcgrad(grad_r: Tensor, grad_d: Tensor) -> tuple[Tensor, Tensor]:
    """Each gradient without its component against the other, where they conflict                     (P,) x2 -> (P,) x2

    Symmetric PCGrad, arXiv:2001.06782: g_R - <g_R, g_D> / |g_D|^2 g_D and the reverse.  Both shrink by the sine of their
    angle, so kappa is what it was: a louder reward stays louder.
    """
    same_shape(grad_r=grad_r, grad_d=grad_d)
    r, d = upcast(grad_r.detach()), upcast(grad_d.detach())
    dot = r @ d
    part = lambda of: torch.where(dot < 0, dot / of.square().sum(), 0.0) * of
    return r - part(d), d - part(r)


def collapsed(rewards: Sequence[float], below: float = 0.05, steps: int = 10) -> bool:
    """Did the mean reward stay under `below` for `steps` steps in a row?  The paper's criterion."""
    run = 0
    for reward in rewards:
        run = run + 1 if reward < below else 0
        if run == steps:
            return True
    return False


def strategy_for(kappa: float) -> str:
    """The paper's rule of thumb for a mean kappa of ten steps of the naive mix; its authors call it a heuristic"""
    return "m3-select" if kappa > 5000 else "m3-soft" if kappa > 1000 else "hybrid"


# ---------------------------------------------------------------------------------------------------------------------
# 9  The hybrid objective.  How do reward, distillation and imitation become one loss?
# ---------------------------------------------------------------------------------------------------------------------


def listening(outcomes: Tensor, where: str) -> Tensor:
    """Completions that hear the teacher: "all", the "failed" ones, or those of "negative" groups  (N, G) -> (N, G) bool

    Raises ValueError for another word.
    """
    if where not in ("all", "failed", "negative"):
        raise ValueError(f"where {where!r}: must be all, failed or negative")
    negative = (route_groups(outcomes) == NEGATIVE)[:, None].expand_as(outcomes)
    return {"all": torch.ones_like(negative), "failed": outcomes == 0, "negative": negative}[where]


def advantage_streams(row: Method, outcomes: Tensor, advantages: Tensor, mask: Tensor, opd_coef: float,
                      advantages_opd: Tensor | None = None, entropy: Tensor | None = None, confidence: Tensor | None = None,
                      select_share: float = 50.0) -> tuple[Tensor, Tensor]:
    """The reward and the distillation advantages that a method's row asks for                        -> (B, T), (B, T)

    outcomes, advantages (N, G); the others as in rstg_advantages.  Their sum is the method's A.  Where only negative
    groups listen, A_opd *replaces* A_grpo there (RSTG's gate); the two never meet at one token.  In the naive
    hybrids they add.
    """
    reward = advantages.reshape(-1, 1).expand(mask.shape).masked_fill(~mask, 0.0) * row.reward
    if row.distillation != "pg":
        if row.where == "negative" and row.reward:      # a shaped reward may differ within an all-wrong group: RSTG ignores it
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
    """L = sum over streams of sum_bt weights terms                                         {name: (terms, weights)} -> ()

    reward and distillation: policy_terms or divergences, one a completion token; kl: kl_terms; m3: residual_terms; imitation:
    -logp of a trajectory's tokens.  The weights carry divisor and coefficient, so a row, a token or a stream that has none
    adds exactly nothing, and any split of the rows adds up to the same gradient.
    """
    return sum(weighted_sum(terms, weights) for terms, weights in streams.values())


# =====================================================================================================================
# THE LINE.  Above: settings and pure functions.  Below: models, sampling, files.  transformers is imported where it is used.
# =====================================================================================================================

# ---------------------------------------------------------------------------------------------------------------------
# 10  Models and rollouts.  Which tokens were sampled, and what do the models say of exactly these?
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    """N groups of G completions, rows in group order: P prompt tokens padded on the left, T completion tokens on the right."""

    prompt_ids: Tensor                  # (B, P)
    prompt_mask: Tensor                 # (B, P)
    completion_ids: Tensor              # (B, T), the sampled ids themselves: text that is encoded again may split differently
    mask: Tensor                        # (B, T) bool, see action_mask
    truncated: Tensor                   # (B,) bool

    def rows(self, index: Tensor) -> "Rollouts":
        """Some rows, without the columns in which all of them are padding."""
        picked = Rollouts(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))
        first, length = int((~picked.prompt_mask.bool()).all(dim=0).sum()), int(picked.mask.any(dim=0).sum())
        picked.prompt_ids, picked.prompt_mask = picked.prompt_ids[:, first:], picked.prompt_mask[:, first:]
        picked.completion_ids, picked.mask = picked.completion_ids[:, :length], picked.mask[:, :length]
        return picked


def completion_logits(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor) -> Tensor:
    """Logits from the last prompt token to the last completion token                  (B, P), (B, P), (B, T) -> (B, T+1, V)

    Position ids count real tokens: with left padding an absolute-position model is off by nats without them.
    """
    mask = torch.cat([prompt_mask, torch.ones_like(completion_ids)], dim=1)      # no earlier token sees the padding behind an eos
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    keep = completion_ids.shape[1] + 1
    logits = model(input_ids=torch.cat([prompt_ids, completion_ids], dim=1), attention_mask=mask, position_ids=positions,
                   use_cache=False, logits_to_keep=keep).logits
    return logits[:, -keep:]


class InSlices(torch.autograd.Function):
    """what(logits, *more), a few positions at a time, and again on the way back     (B, T, V), (B, T, ...) -> (B, T), ...

    A log-softmax, an entropy and their gradients are half a dozen tensors of the size of the logits, which are the largest
    of all for a vocabulary of 150,000.  So only the logits and their gradient exist whole.  `more` gets no gradient.
    """

    SIZE = 2**20                        # numbers in a slice

    @staticmethod
    def cut(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        width = max(1, InSlices.SIZE // (logits.shape[0] * logits.shape[-1]))
        return zip(*(x.split(width, dim=1) for x in (logits, *others)))

    @staticmethod
    def forward(ctx, what: Callable, logits: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        ctx.what = what
        ctx.save_for_backward(logits, *more)
        whole, done = None, 0
        for some in InSlices.cut(logits, *more):
            values = torch.stack(what(*some))                                    # (number of tensors, B, positions of the slice)
            whole = values.new_empty(len(values), *logits.shape[:2]) if whole is None else whole
            whole[..., done:done + values.shape[-1]] = values                    # in place: pieces would leave holes in the heap
            done += values.shape[-1]
        return tuple(x.clone() for x in whole)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        logits, *more = ctx.saved_tensors
        whole = torch.empty_like(logits)
        for z, into, *some in InSlices.cut(logits, whole, *more, *gradients):
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                values = ctx.what(z, *some[:len(more)])
            wanted = [(value, g) for value, g in zip(values, some[len(more):]) if value.requires_grad]
            into.copy_(torch.autograd.grad([value for value, _ in wanted], z, [g for _, g in wanted])[0])
        return None, whole, *[None] * len(more)


def in_slices(what: Callable, logits: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """what(logits, *more), in slices where the logits are larger than one"""
    return what(logits, *more) if logits.numel() <= InSlices.SIZE else InSlices.apply(what, logits, *more)


def token_values(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logp and (detached) entropy; logits[b,t] predict ids[b,t], where token_logps shifts     (B, T, V), (B, T) -> (B, T) x2"""
    return _aligned_logps(logits, ids, temperature), token_entropy(logits.detach(), temperature)


def score(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
          temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logp and (detached) entropy of a completion's tokens                            -> (B, T), (B, T)"""
    logits = completion_logits(model, prompt_ids, prompt_mask, completion_ids)[:, :-1]
    logp, entropy = in_slices(lambda z, ids: token_values(z, ids, temperature), logits, completion_ids)
    return logp, entropy.detach()


@contextlib.contextmanager
def sampling_from(model) -> Iterator[None]:
    """Dropout off, no gradient, and none of the checkpoint's own generation settings; all as before afterwards.

    A checkpoint may carry repetition_penalty, top_k, ...: generate fills whatever it is not given from there, so the
    ratio of the first update would not be 1.  Passing one's own settings is not enough (unset ones are still
    filled): the config is swapped.
    """
    from transformers import GenerationConfig

    modes, own = [(module, module.training) for module in model.modules()], model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        with torch.no_grad():
            yield
    finally:
        model.generation_config = own
        for module, mode in modes:      # each its own: --gradient-checkpointing wakes the layers, not their dropout
            module.training = mode


def eos_ids_of(model, tokenizer) -> list[int]:
    """All ids that end a completion: the model's generation config may name several, the tokenizer one."""
    found: list[int] = []
    for ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    if not found:
        raise UsageError("neither the model's generation config nor its tokenizer names an eos token, so no completion could end")
    return sorted(set(found))


def encode(tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt with one BOS: a chat template writes its own, and the tokenizer may put a second one before it."""
    ids, bos = tokenizer(prompt).input_ids, getattr(tokenizer, "bos_token_id", None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def read_once(model, ids: Tensor, mask: Tensor, copies: int) -> dict:
    """For generate, the cache of all prompt tokens but the last, each prompt read once and copied for its group

    {} where that cache is more than keys and values (mamba), so that generate reads every copy itself.  The last bits of the
    logits may round otherwise than there, so that once in a long run another token is drawn.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if ids.shape[1] == 1 or copies == 1:
        return {}
    told = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1],
                 use_cache=True, logits_to_keep=1)
    for name, cache in told.items():    # "cache" since transformers 5.24, "past_key_values" before
        if type(cache) is DynamicCache and {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
            cache.batch_repeat_interleave(copies)
            return {name: cache}
    return {}


def rollout(model, tokenizer, prompts: list[str], group_size: int, *, temperature: float, max_new_tokens: int,
            micro_batch: int) -> Rollouts:
    """Sample `group_size` completions of each prompt from exactly softmax(logits / temperature), by torch's global generator."""
    eos = eos_ids_of(model, tokenizer)
    pad = eos[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    width = max(map(len, encoded))
    prompt_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in encoded], device=model.device)
    prompt_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded], device=model.device)
    parts = []
    with sampling_from(model):
        for some in torch.arange(len(prompts)).split(max(1, micro_batch // group_size)):
            cache, copied = read_once(model, prompt_ids[some], prompt_mask[some], group_size), some.repeat_interleave(group_size)
            ids = model.generate(
                input_ids=prompt_ids[copied], attention_mask=prompt_mask[copied], do_sample=True, temperature=temperature,
                top_k=0, top_p=1.0, num_beams=1, repetition_penalty=1.0, max_new_tokens=max_new_tokens, use_cache=True,
                eos_token_id=eos, pad_token_id=pad, **cache)[:, width:]
            parts.append(torch.nn.functional.pad(ids, (0, max_new_tokens - ids.shape[1]), value=pad))
    ids = torch.cat(parts)
    cut = truncated(ids, eos)
    mask = action_mask(ids, eos)
    return Rollouts(prompt_ids.repeat_interleave(group_size, 0), prompt_mask.repeat_interleave(group_size, 0), ids, mask, cut)


def texts_of(tokenizer, rollouts: Rollouts) -> list[str]:
    """Each completion's own tokens as text, without the special ones"""
    lengths = rollouts.mask.sum(dim=1).tolist()
    return [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(rollouts.completion_ids.tolist(), lengths)]


def rewards_of(task, problems: list, texts: list[str]) -> Tensor:
    """reward(problem, completion) of each completion; UsageError where it fails or leaves [0, 1]           -> (N, G) float32"""
    group = len(texts) // len(problems)
    try:
        rewards = torch.tensor([[task.reward(p, text) for text in texts[i * group:][:group]] for i, p in enumerate(problems)])
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not ((rewards >= 0) & (rewards <= 1)).all():
        raise UsageError(f"rewards must lie in [0, 1], where 1 is right; the task gave {rewards.min():g} to {rewards.max():g}")
    return rewards


def make_pool(teacher, tokenizer, task, problems: list, config: Config) -> dict:
    """{prompt: {"confidence": mean@K, "trajectory": ids of the shortest correct finished completion, or None}}

    Sampled once, before training: omega is a property of teacher and prompt, not of the step.
    """
    from tqdm import tqdm

    pool, size = {}, max(1, config.micro_batch // config.teacher_samples)
    torch.manual_seed(config.seed)
    for start in tqdm(range(0, len(problems), size), desc="teacher pool", unit="batch", leave=False):
        some = problems[start:start + size]
        made = rollout(teacher, tokenizer, [task.prompt(p) for p in some], config.teacher_samples, temperature=config.temperature,
                       max_new_tokens=config.max_new_tokens, micro_batch=config.micro_batch)
        outcomes = (rewards_of(task, some, texts_of(tokenizer, made)) == 1).to(made.mask.device)
        # a cut one would teach not to stop:
        # CHOICE: test_the_pool_keeps_the_shortest_finished_correct_trajectory_as_it_was_sampled
        lengths = made.mask.sum(dim=1).masked_fill(made.truncated | ~outcomes.flatten(), 10**9).view_as(outcomes)
        for n, problem in enumerate(some):
            best = n * config.teacher_samples + int(lengths[n].argmin())
            ids = made.completion_ids[best][made.mask[best]].tolist() if lengths[n].min() < 10**9 else None
            pool[task.prompt(problem)] = {"confidence": float(teacher_confidence(outcomes[n:n + 1])), "trajectory": ids}
    return pool


def trajectories_of(pool: dict, tokenizer, prompts: list[str], pad: int, device) -> Rollouts | None:
    """The pool's trajectories of these prompts, one row each; prompts without one are left out; None if no row is left."""
    found = [(encode(tokenizer, prompt), pool[prompt]["trajectory"]) for prompt in prompts if pool[prompt]["trajectory"]]
    if not found:
        return None
    p, t = (max(len(pair[i]) for pair in found) for i in (0, 1))
    make = lambda rows: torch.tensor(rows, device=device)
    return Rollouts(make([[pad] * (p - len(a)) + a for a, _ in found]),
                    make([[0] * (p - len(a)) + [1] * len(a) for a, _ in found]),
                    make([b + [pad] * (t - len(b)) for _, b in found]),
                    make([[1] * len(b) + [0] * (t - len(b)) for _, b in found]).bool(),
                    make([False] * len(found)))


# ---------------------------------------------------------------------------------------------------------------------
# 11  One update, and the loop.  Sample, judge, listen, weigh, step.
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a step needs.  The teacher and the reference are frozen and in no optimizer."""

    config: Config
    task: object
    tokenizer: object
    student: torch.nn.Module
    teacher: torch.nn.Module | None
    reference: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    problems: list
    pool: dict
    memory: dict = dataclasses.field(default_factory=dict)      # what a method carries from step to step; saved

    def __post_init__(self):
        if self.teacher is self.student:
            raise UsageError("teacher and student are one object, so the teacher would move with the student; load it twice or "
                             "deep-copy it")
        for frozen in filter(None, (self.teacher, self.reference)):
            frozen.eval().requires_grad_(False)
        self.student.eval()             # dropout off in training too: else the ratio of the first update is not 1
        if self.config.gradient_checkpointing:
            from transformers.modeling_layers import GradientCheckpointingLayer
            student = self.student      # transformers renamed it in 5.24
            enable = getattr(student, "activation_checkpointing_enable", None) or student.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in self.student.modules():        # it works in training mode alone; the dropout inside stays in eval mode
                layer.training = isinstance(layer, GradientCheckpointingLayer)
        eos = eos_ids_of(self.student, self.tokenizer)
        self.pad = eos[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    def forward(self, model, batch: Rollouts, index: Tensor, what: Callable = score):
        """what(model, ...) over some rows, cut to their length, in the dtype asked for."""
        r = batch.rows(index)
        with torch.autocast(index.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return what(model, r.prompt_ids, r.prompt_mask, r.completion_ids)

    def chunks(self, batch: Rollouts, keep: Tensor) -> tuple[Tensor, ...]:
        """Indices of the rows to keep, shortest first, in micro-batches."""
        index = keep.nonzero().squeeze(-1)
        return index[batch.mask[index].sum(dim=1).argsort(stable=True)].split(self.config.micro_batch) if len(index) else ()

    @torch.no_grad()
    def score_all(self, model, batch: Rollouts, keep: Tensor) -> tuple[Tensor, Tensor]:
        """logp and entropy, without a graph, of the rows to keep; 0 elsewhere             -> (B, T), (B, T)"""
        out = torch.zeros(2, *batch.mask.shape, device=batch.mask.device)
        for index in self.chunks(batch, keep):
            for filled, values in zip(out, self.forward(model, batch, index, self.scored)):
                filled[index, :values.shape[1]] = values
        return out[0], out[1]

    def scored(self, model, *ids: Tensor) -> tuple[Tensor, Tensor]:
        """logp and entropy of a completion's tokens at the run's temperature"""
        return score(model, *ids, temperature=self.config.temperature)


def trainable(model) -> list[torch.nn.Parameter]:
    """The parameters that a step moves, in the order of a flat gradient"""
    return [p for p in model.parameters() if p.requires_grad]


def part_of(problems: list, part: str) -> list:
    """All, or one of two halves; what the second holds was not in the first, so its labels are held out."""
    half = (len(problems) + 1) // 2
    if part == "second" and len(problems) == half:
        raise UsageError("the second half of the training prompts is empty, since there is only one; give more of them "
                         "(--train-prompts, --data)")
    return {"all": problems, "first": problems[:half], "second": problems[half:]}[part]


def step_problems(problems: list, step: int, count: int, seed: int) -> list:
    """The problems of a step, from the step's number alone: epoch after epoch, each in a fresh order."""
    order = lambda epoch: random.Random(f"{seed} {epoch}").sample(problems, len(problems))
    first, last = step * count // len(problems), ((step + 1) * count - 1) // len(problems)
    row = [p for epoch in range(first, last + 1) for p in order(epoch)]
    start = step * count - first * len(problems)
    return row[start:start + count]


def collect(run: Run, problems: list) -> tuple[Rollouts | None, Tensor]:
    """The completions that this method trains on, and their rewards                     -> rows, (N, G)"""
    config, row, prompts = run.config, run.config.row, [run.task.prompt(p) for p in problems]
    if row.rollouts == "pool":
        return None, torch.zeros(len(problems), 0)
    model = run.student if row.rollouts == "student" else run.teacher
    made = rollout(model, run.tokenizer, prompts, config.group_size, temperature=config.temperature,
                   max_new_tokens=config.max_new_tokens, micro_batch=config.micro_batch)
    return made, rewards_of(run.task, problems, texts_of(run.tokenizer, made)).to(made.mask.device)


@dataclass
class Signals:
    """What the rows of a step are trained with; rows of which all three are 0 cannot matter and are never computed."""

    weights: Tensor                     # (B, T) divisor of each token, made for the whole step
    reward: Tensor                      # (B, T) advantages
    distillation: Tensor                # (B, T) advantages, or the coefficient of a divergence
    logp_old: Tensor | None             # (B, T), None = on-policy: logp detached
    kernel: Tensor | None = None        # (2, B, T) exact K_DR and its cosine, where the gate is to use them
    kept: tuple | None = None           # (index, logp, entropy) with their graph, where all rows that matter were scored already

    def live(self, everything: bool) -> Tensor:
        """Rows with a non-zero coefficient                                               -> (B,) bool"""
        return ((self.weights != 0) & (everything | (self.reward != 0) | (self.distillation != 0))).any(dim=1)


def listen(run: Run, batch: Rollouts, rewards: Tensor, confidence: Tensor, opd_coef: float) -> tuple[Signals, dict]:
    """Advantages of a step's rollouts; the teacher scores only the rows that hear it."""
    config, row, outcomes = run.config, run.config.row, (rewards == 1).int()
    mask = batch.mask & ~batch.truncated[:, None] if config.skip_truncated else batch.mask
    weights = token_weights(mask, config.aggregation, config.aggregation_length or config.max_new_tokens, config.empty_rows)
    advantages = group_advantages(rewards, scale=config.advantage_scale, ddof=config.advantage_ddof, eps=config.advantage_eps,
                                  baseline=config.baseline)
    everyone, logp_old, logs, pg, kept = torch.ones_like(batch.truncated), None, {}, {}, None
    if row.distillation == "pg":
        hears = listening(outcomes, row.where) & ((confidence > 0)[:, None] | (not row.weighted))      # (N, G)
        hears = hears.flatten() & mask.any(dim=1)
        matter = run.chunks(batch, (hears | (advantages != 0).flatten()) & mask.any(dim=1))
        if len(matter) == 1 and config.updates == 1 and not config.kl_coef:         # on-policy, one pass is both: logp_old = logp
            kept = (matter[0], *run.forward(run.student, batch, matter[0], run.scored))
            logp_old, entropy = (torch.zeros_like(batch.mask, dtype=x.dtype) for x in kept[1:])
            for whole, part in ((logp_old, kept[1]), (entropy, kept[2])):
                whole[matter[0], :part.shape[1]] = part.detach()
        else:
            logp_old, entropy = run.score_all(run.student, batch, everyone if config.updates > 1 else hears)
        logp_teacher, _ = run.score_all(run.teacher, batch, hears)
        a_opd = opd_advantages(logp_old, logp_teacher).masked_fill(~(hears[:, None] & mask), 0.0)
        pg = {"advantages_opd": a_opd, "entropy": entropy, "confidence": confidence, "select_share": config.select_share}
        heard = a_opd[hears[:, None] & mask]
        logs = {"opd_advantage_mean": heard.mean().item() if len(heard) else None,
                "opd_advantage_positive_share": (heard > 0).float().mean().item() if len(heard) else None}
    elif config.updates > 1:
        logp_old, _ = run.score_all(run.student, batch, everyone)
    reward, distillation = advantage_streams(row, outcomes, advantages, mask, opd_coef, **pg)
    if row.distillation and row.distillation != "pg":
        distillation = mask.float()
    logs["selected_share"] = (distillation != 0).sum().item() / max(1, int(mask.sum()))
    return Signals(weights, reward, distillation, logp_old if config.updates > 1 else None, kept=kept), logs


def aligned_logits(run: Run, batch: Rollouts, index: Tensor) -> tuple[Tensor, Tensor]:
    """Student's and teacher's logits at the completion's tokens, from one forward pass of each        -> (b, t, V) x2"""
    student = run.forward(run.student, batch, index, completion_logits)
    with torch.no_grad():
        teacher = run.forward(run.teacher, batch, index, completion_logits)
    return student[:, :-1], teacher[:, :-1]


def two_residuals(config: Config, student: Tensor, teacher: Tensor, ids: Tensor, advantages: Tensor,
                  mask: Tensor) -> tuple[Tensor, Tensor]:
    """delta_D and delta_R of aligned logits, 0 outside the mask                             -> (b, t, V) x2"""
    # M3 descends p_S - p_T where JSD < tau, not the JSD's own residual:
    # CHOICE: test_m3_is_the_gated_sum_of_unit_residuals_scaled_by_the_reward_gradients_norm
    residual_d = distillation_residual(student, teacher, teacher_share=config.jsd_share, clip=config.divergence_clip)
    residual_r = reward_residual(student, ids, advantages)
    return tuple(x.masked_fill(~mask[..., None], 0.0) for x in (residual_d, residual_r))


def exact_kernel(run: Run, batch: Rollouts, signals: Signals) -> Tensor:
    """Exact K_DR and its cosine of every token's unit residuals, row by row; 0 where there is no advantage    -> (2, B, T)"""
    kernel = torch.zeros(2, *batch.mask.shape, dtype=run.student.dtype, device=batch.mask.device)
    for b in (signals.reward != 0).any(dim=1).nonzero():
        student, teacher = (upcast(z) / run.config.temperature for z in aligned_logits(run, batch, b))
        ids, advantages, weights = (x[b, :student.shape[1]] for x in (batch.completion_ids, signals.reward, signals.weights))
        pair = two_residuals(run.config, student, teacher, ids, advantages, weights != 0)
        found = exact_cross_signal_ntk(student, trainable(run.student), *map(unit_residual, pair))
        kernel[:, b, :student.shape[1]] = torch.stack(found)
    return kernel


def m3_stream(config: Config, student: Tensor, residual_d: Tensor, residual_r: Tensor,
              kernel: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Terms that push the M3 residual through the model, and the gate; for M3-EG the teacher's part alone       -> (b, t) x2"""
    # CHOICE: the gate sees K_DR in residual form, --exact-gate the exact one.  test_the_gate_follows_the_kernel_it_is_given
    k_dr, cosine = kernel or (cross_signal_ntk(residual_d, residual_r),
                              cross_signal_ntk(unit_residual(residual_d), unit_residual(residual_r)))
    gate = (soft_gate(cosine, config.max_teacher_share, config.gate_sharpness) if config.row.join == "soft" else
            select_gate(k_dr, config.max_teacher_share))
    if config.row.join == "eg":
        residual_r = torch.zeros_like(residual_r)
    return residual_terms(student, m3_residual(residual_d, residual_r, gate)), gate


def vocabulary_terms(config: Config, student: Tensor, teacher: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor,
                     *kernel: Tensor) -> tuple[Tensor, ...]:
    """What takes whole distributions: logp, entropy, divergence; K_DR for M3 or a diagnosis; M3's terms, gate   -> (b, t), ..."""
    row, student, teacher = config.row, upcast(student) / config.temperature, upcast(teacher) / config.temperature
    divergence = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": lambda s, t: generalized_jsd(s, t, config.jsd_share)}
    values = [*token_values(student, ids), divergence[row.distillation](student, teacher)]
    if row.m3 or config.diagnose:
        pair = two_residuals(config, student, teacher, ids, advantages, mask)
        values += [cross_signal_ntk(*pair), *(m3_stream(config, student, *pair, kernel) if row.m3 else ())]
    return tuple(values)


def completion_streams(run: Run, batch: Rollouts, signals: Signals, index: Tensor) -> tuple[dict, dict]:
    """The streams {name: (terms, weights)} of one micro-batch, and what is to be seen of its tokens {name: (tokens,)}"""
    config, row, full = run.config, run.config.row, run.config.row.distillation in ("reverse_kl", "forward_kl", "jsd")
    cut = lambda x: x[..., index, :int(batch.mask[index].sum(dim=1).max())]
    weights, mask, more = cut(signals.weights), cut(signals.weights) != 0, ()
    if full:
        logits, kernel = aligned_logits(run, batch, index), () if signals.kernel is None else cut(signals.kernel)
        logp, entropy, divergence, *more = in_slices(lambda *some: vocabulary_terms(config, *some), *logits,
                                                     cut(batch.completion_ids), cut(signals.reward), mask, *kernel)
    else:
        logp, entropy = signals.kept[1:] if signals.kept else run.forward(run.student, batch, index, run.scored)
    logp = logp.masked_fill(~mask, 0.0)
    logp_old = logp.detach() if signals.logp_old is None else cut(signals.logp_old).masked_fill(~mask, 0.0)
    terms = lambda a: policy_terms(logp, logp_old, a, clip_low=config.clip_low, clip_high=config.clip_high,
                                   dual_clip=config.dual_clip, ratio_level=config.ratio_level, mask=mask)
    streams, seen = {}, {"entropy": entropy} | dict(zip(("k_dr", "m3", "gate"), more))
    if row.reward:
        streams["reward"] = (terms(cut(signals.reward)), weights)
    if full:                            # beyond tau min(JSD, tau) is constant: there M3's family has no teacher gradient
        clip = config.divergence_clip if row.reward else math.inf
        streams["distillation"] = ((divergence * cut(signals.distillation)).clamp(max=clip), weights)
    elif row.distillation == "sample":
        streams["distillation"] = (-logp * cut(signals.distillation), weights)
    elif row.distillation:
        streams["distillation"] = (terms(cut(signals.distillation)), weights)
    if row.m3:
        streams["m3"] = (seen.pop("m3"), weights)
        seen |= {} if signals.kernel is None else {"k_exact": cut(signals.kernel)[0]}
    if config.kl_coef:
        with torch.no_grad():
            logp_ref, _ = run.forward(run.reference, batch, index, run.scored)
        kl = kl_terms(logp, logp_ref.masked_fill(~mask, 0.0), config.kl_kind, config.kl_gradient)
        streams["kl"] = (config.kl_coef * kl, weights)
    return streams, {name: values.detach()[mask] for name, values in seen.items()}


def accumulate(run: Run, batch: Rollouts, signals: Signals, mix: dict[str, float]) -> tuple[dict, dict, dict]:
    """Backward of a step's completion streams, micro-batch by micro-batch -> losses, tokens seen, whole gradients kept apart

    mix: a coefficient a stream; a stream that it does not name has its coefficient in the signals already.
    """
    config, join, losses, seen, apart = run.config, run.config.row.join, {}, {}, {}
    wanted = (("reward", "distillation") if config.diagnose or join in ("gradnorm", "pcgrad") else
              ("reward",) if join in ("select", "soft") else ())
    for index in signals.kept[:1] if signals.kept else run.chunks(batch, signals.live(everything=config.kl_coef > 0)):
        streams, tokens = completion_streams(run, batch, signals, index)
        for name in wanted:
            if name in streams:
                found = torch.autograd.grad(weighted_sum(*streams[name]), trainable(run.student), retain_graph=True,
                                            materialize_grads=True)
                apart[name] = apart.get(name, 0.0) + torch.cat([g.flatten() for g in found])
        losses |= {name: losses.get(name, 0.0) + weighted_sum(*streams[name]).item() for name in streams if name != "m3"}
        used = ["m3"] if "m3" in streams else streams
        streams = {name: (mix.get(name, 1.0) * streams[name][0], streams[name][1]) for name in used}
        if join not in ("gradnorm", "pcgrad"):
            hybrid_loss(streams).backward()
        del streams                     # and its graph, before the next micro-batch makes one
        for name, values in tokens.items():
            seen.setdefault(name, []).append(values)
    return losses, {name: torch.cat(values) for name, values in seen.items()}, apart


def set_gradient(model, flat: Tensor) -> None:
    """Makes a flat vector the gradient of the trainable parameters."""
    parameters = trainable(model)
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = g.view_as(p).to(p.dtype)


def join_gradients(run: Run, share: float | None, apart: dict) -> None:
    """What GradNorm, PCGrad and M3 do with the gradients of a whole step, before the optimizer sees them"""
    join, memory = run.config.row.join, run.memory
    if join in ("gradnorm", "pcgrad") and apart:
        r, d = apart["reward"], apart["distillation"]
        if join == "gradnorm":          # moves the share of the next step
            memory["teacher_share"] = gradnorm_step(share, r.norm().item(), d.norm().item(), run.config.gradnorm_rate)
        else:
            r, d = pcgrad(r, d)
        set_gradient(run.student, (1 - share) * r + share * d)
    elif join in ("select", "soft") and apart:
        memory["scale"] = ema(memory.get("scale"), apart["reward"].norm().item(), run.config.scale_decay)
        for p in run.student.parameters():
            # CHOICE: 1 until a reward gradient was seen.  test_before_the_first_reward_the_scale_is_one
            if p.grad is not None:
                p.grad *= 1.0 if memory["scale"] is None else memory["scale"]


def look_ahead(run: Run, batch: Rollouts, signals: Signals) -> None:
    """M3-EG: g = gradient of the normalised reward at theta - eta m_D, where m_D, the gated teacher's, lies in .grad

    The parameters are put back bit for bit; .grad holds g.  Nothing is differentiated through the look-ahead.
    """
    config, moved = run.config, [p for p in run.student.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in moved]
    with torch.no_grad():
        for p in moved:                 # CHOICE: a plain step here, the optimizer's outside.  test_eg_looks_ahead_by_a_plain_step
            p -= (config.lookahead_lr or config.lr) * p.grad
    run.optimizer.zero_grad(set_to_none=True)

    def pushed(z: Tensor, ids: Tensor, advantages: Tensor, weights: Tensor) -> tuple[Tensor]:
        z = upcast(z) / config.temperature
        residual = reward_residual(z, ids, advantages).masked_fill((weights == 0)[..., None], 0.0)
        return residual_terms(z, unit_residual(residual)),

    for index in run.chunks(batch, (signals.reward != 0).any(dim=1) & signals.live(True)):
        logits = run.forward(run.student, batch, index, completion_logits)[:, :-1]
        ids, advantages, weights = (x[index, :logits.shape[1]] for x in (batch.completion_ids, signals.reward, signals.weights))
        terms, = in_slices(pushed, logits, ids, advantages, weights)
        del logits
        hybrid_loss({"reward": (terms, weights)}).backward()
    with torch.no_grad():
        for p, old in zip(moved, before):
            p.copy_(old)


def geometry(run: Run, signals: Signals, seen: dict, apart: dict, opd_coef: float) -> dict:
    """The two signals of an update, before any coefficient, and how they stand to each other; null where one is silent

    drowning: to first order this update raises L_D, <g_D, g> < 0, g the gradient that is descended.  For the naive mix
    that is the same as cos_phi < drowning_threshold(kappa, share).
    """
    number, k_dr = lambda x: float(x) if math.isfinite(x) else None, seen.get("k_dr")
    if k_dr is None:                    # both residuals of a PG-style hybrid lie along e_y - p_S, so the advantages' signs decide
        # CHOICE: its own delta_D, not p_S - p_T.  test_in_a_sampled_token_hybrid_conflict_is_opposite_advantages
        k_dr = (signals.reward * signals.distillation)[signals.weights != 0]
    over_all, over_scored = conflict_rate(k_dr, torch.ones_like(k_dr, dtype=torch.bool))
    logs = {"conflict_rate": number(over_all), "conflict_rate_scored": number(over_scored)}
    if "gate" in seen:
        logs |= {"gate_mean": number(seen["gate"].mean()), "scale": run.memory.get("scale")}
    if "k_exact" in seen:
        scored = seen["k_exact"] != 0
        logs["kernel_agreement"] = number((seen["k_exact"].sign() == seen["k_dr"].sign())[scored].float().mean())
    if run.config.diagnose:
        logs |= dict.fromkeys(("kappa", "cos_phi", "drowning"))
    if run.config.diagnose and len(apart) == 2 and opd_coef:
        kappa, cos_phi = gradient_geometry(apart["reward"], apart["distillation"] / opd_coef)
        descended = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trainable(run.student)])
        logs |= {"kappa": number(kappa), "cos_phi": number(cos_phi), "drowning": bool(apart["distillation"] @ descended < 0)}
    return logs


@torch.no_grad()
def distillation_value(run: Run, batch: Rollouts, signals: Signals) -> float:
    """L_D on a step's completions with the student as it is now"""
    return sum(weighted_sum(*completion_streams(run, batch, signals, index)[0]["distillation"]).item()
               for index in run.chunks(batch, signals.live(everything=False)))


def imitate(run: Run, prompts: list[str], all_prompts: int, coef: float) -> float:
    """Backward of coef * sum of -(mean logp of a trajectory) / all_prompts; its value"""
    batch = trajectories_of(run.pool, run.tokenizer, prompts, run.pad, run.student.device)
    if batch is None or coef == 0:
        return 0.0
    # CHOICE: a token mean a trajectory, each once, divided by all prompts of the step.  test_imitation_is_divided_by_all_prompts
    weights = coef * token_weights(batch.mask, "seq_mean_token_mean") * len(batch.mask) / all_prompts
    value = 0.0
    for index in run.chunks(batch, batch.mask.any(dim=1)):
        logp, _ = run.forward(run.student, batch, index, run.scored)
        loss = hybrid_loss({"imitation": (-logp, weights[index, :logp.shape[1]])})
        loss.backward()
        value += loss.item()
    return value


def descend(run: Run, batch: Rollouts | None, signals: Signals | None, imitated: list[str], all_prompts: int,
            opd_coef: float) -> dict:
    """One optimizer update: accumulate, join, look ahead, move.  Returns what there is to log of it"""
    config, row, model = run.config, run.config.row, run.student
    mixed = bool(row.reward and row.distillation == "jsd")
    share = run.memory.get("teacher_share", config.max_teacher_share if row.m3 else config.teacher_share) if mixed else None
    run.optimizer.zero_grad(set_to_none=True)
    mix = {"reward": 1 - share, "distillation": share} if mixed else {}
    losses, seen, apart = accumulate(run, batch, signals, mix) if batch is not None else ({}, {}, {})
    losses["imitation"] = imitate(run, imitated, all_prompts, opd_coef)
    join_gradients(run, share, apart)
    if row.join == "eg":
        look_ahead(run, batch, signals)
    logs = geometry(run, signals, seen, apart, opd_coef) if config.diagnose or row.m3 else {}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient is {norm}; a smaller --lr is the usual cure, and the last checkpoint is intact")
    # CHOICE: a step without any signal leaves the weights alone, momentum included.  test_a_step_without_signal_moves_nothing
    if any(p.grad is not None for p in model.parameters()):
        run.optimizer.step()
    if mixed:
        logs |= {"distillation_loss": losses.get("distillation", 0.0), "teacher_share": share}
        if config.diagnose:
            logs["distillation_change"] = distillation_value(run, batch, signals) - logs["distillation_loss"]
    loss = sum(mix.get(name, 1.0) * value for name, value in losses.items())
    return logs | {"loss": loss, "grad_norm": norm, "entropy": seen["entropy"].mean().item() if seen else None}


def group_logs(batch: Rollouts, rewards: Tensor) -> dict:
    """What a metrics line says of a step's completions"""
    routes = route_groups((rewards == 1).int())
    share = lambda route: (routes == route).float().mean().item()
    return {"reward_mean": rewards.mean().item(),
            "negative_share": share(NEGATIVE), "mixed_share": share(MIXED), "positive_share": share(POSITIVE),
            "completion_length": batch.mask.sum(dim=1).float().mean().item(),
            "truncated_share": batch.truncated.float().mean().item()}


def warning_of(config: Config, lines: list[dict]) -> str | None:
    """Why the last --warn-after steps can have taught little, and what may help; None where nothing stands out"""
    last = lines[-config.warn_after:]
    if not 0 < config.warn_after <= len(lines) or any(line["reward_mean"] is None for line in last):
        return None
    every, why = lambda key, value: all(line[key] == value for line in last), None
    if every("truncated_share", 1.0):
        why = f"not one completion ended within --max-new-tokens {config.max_new_tokens}: raise it, or teach the model its eos"
    elif every("reward_mean", 0.0):
        why = ("every reward was 0: the questions are too hard for the model (easier ones, a larger --group-size), or the reward "
               "does not read its way of answering (look at a few completions)")
    elif config.row.reward and every("mixed_share", 0.0):
        why = ("no group held right and wrong answers both, so the reward had no gradient: easier questions where all are wrong, "
               "harder ones where all are right, or a larger --group-size")
    return why and f"warning: for {len(last)} steps {why}"


def train_step(run: Run, step: int) -> dict:
    """One step: sample, judge, route, listen; then, `updates` times, accumulate, join, move.  Returns the metrics."""
    config, row, began = run.config, run.config.row, time.perf_counter()
    torch.manual_seed(config.seed * 1_000_003 + step)       # from the step alone: a resumed run samples what the other would have
    problems = step_problems(run.problems, step, config.prompts_per_step, config.seed)
    prompts = [run.task.prompt(p) for p in problems]
    batch, rewards = collect(run, problems)
    annealed = METHODS[config.method].annealed
    opd_coef = anneal(step, config.opd_coef, config.opd_coef_slope, config.opd_coef_floor) if annealed else 1.0
    logs = {"step": step} | dict.fromkeys(("reward_mean", "negative_share", "mixed_share", "positive_share",
                                           "completion_length", "truncated_share"))
    imitated, signals = prompts if row.imitation == "all" else [], None
    if batch is not None:
        logs |= group_logs(batch, rewards)
        if row.imitation == "negative":
            imitated = [p for p, route in zip(prompts, route_groups((rewards == 1).int()).tolist()) if route == NEGATIVE]
        confidence = torch.tensor([run.pool[p]["confidence"] if run.pool else 1.0 for p in prompts], device=rewards.device)
        signals, heard = listen(run, batch, rewards, confidence, opd_coef)
        logs |= (heard if row.distillation else {}) | ({"opd_coef": opd_coef} if annealed else {})
        if config.exact_gate:
            signals.kernel = exact_kernel(run, batch, signals)
    try:
        for _ in range(config.updates):
            logs |= descend(run, batch, signals, imitated, len(prompts), opd_coef)
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step}: {error}") from None
    return logs | {"seconds": round(time.perf_counter() - began, 4)}


def accuracy(run: Run, problems: list) -> dict[str, tuple[int, int]]:
    """{difficulty: (right, asked)}, each problem answered once at the run's temperature"""
    right: dict = {}
    torch.manual_seed(run.config.seed)
    for start in range(0, len(problems), run.config.micro_batch):
        some = problems[start:start + run.config.micro_batch]
        made = rollout(run.student, run.tokenizer, [run.task.prompt(p) for p in some], 1, temperature=run.config.temperature,
                       max_new_tokens=run.config.max_new_tokens, micro_batch=run.config.micro_batch)
        for problem, outcome in zip(some, (rewards_of(run.task, some, texts_of(run.tokenizer, made)) == 1).flatten().tolist()):
            r, n = right.get(str(run.task.difficulty(problem)), (0, 0))
            right[str(run.task.difficulty(problem))] = (r + outcome, n + 1)
    return dict(sorted(right.items()))


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927); does not shrink to nothing at 0 or 1"""
    p, n = right / asked, asked
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def share_cell(right: int, asked: int) -> str:
    """A share in percent with its interval; "-" where nothing was asked"""
    low, high = wilson(right, asked) if asked else (0, 0)
    return f"{100 * right / asked:5.1f} % [{100 * low:4.1f}, {100 * high:4.1f}]" if asked else "-"


def load_model(flag: str, name: str, device: str):
    """(model, tokenizer) of an ordinary Hugging Face folder or hub name, float32 weights"""
    from huggingface_hub.utils import logging as hub
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub.set_verbosity_error()           # a hub that is out of reach is said once, below, not at each retry
    try:
        model, info = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"its files lack {len(info['missing_keys'])} weights, such as {min(info['missing_keys'])}")
        tokenizer = AutoTokenizer.from_pretrained(name)
        width = max(tokenizer.get_vocab().values()) + 1         # rows behind it pad the vocabulary: no softmax sees them
        model.get_output_embeddings().register_forward_hook(lambda _module, _given, logits: logits[..., :width])
        return model.to(device), tokenizer
    except Exception as error:          # safetensors and tokenizers raise kinds of their own
        where = "" if Path(name).is_dir() else "is no folder here, and from the hub it "
        raise UsageError(f"{flag} {name}: {where}does not load as a causal language model "
                         f"({' '.join(str(error).split())[:200]})") from None


def check_model_folder(flag: str, name: str) -> None:
    """Says what is wrong with a folder before anything is loaded; a name that could be a hub's is left to the loader."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UsageError(f"{flag} {name}: no model folder, config.json is missing; give a folder that save_pretrained "
                         f"wrote, such as {_TOY / 'student'}")
    here = folder.exists() or folder.parent.is_dir() or name.startswith((".", "/"))
    if not folder.is_dir() and (here or name.count("/") != 1):
        raise UsageError(f"{flag} {name}: no such folder; give a folder that save_pretrained wrote, such as "
                         f"{_TOY / 'student'}, or a hub name owner/model")


def check_same_tokens(config: Config, one, other) -> None:
    """The teacher scores the student's ids, so an id must mean the same token to both."""
    a, b = one.get_vocab(), other.get_vocab()
    if a != b:
        differs = next(token for token in (*a, *b) if a.get(token) != b.get(token))
        raise UsageError(f"--teacher {config.teacher}: its tokenizer is not that of --student {config.student} (token "
                         f"{differs!r} is {b.get(differs)} there and {a.get(differs)} here); both must give every token the same "
                         "id")


def pick_device(config: Config) -> str:
    """No mps: the divisors of a step are float64, which it lacks."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: this machine has none that torch {torch.__version__} can use; --device cpu "
                         "always works")
    return {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(config.device, config.device)


MAY_CHANGE = ("out", "resume", "overwrite", "save_every", "plot", "device", "micro_batch", "gradient_checkpointing", "warn_after")


def json_in(path: Path) -> dict:
    """What a file of the run says; {} where it is not there, or cut off"""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def check_command_of(folder: Path, kind: type) -> None:
    """A run of train is not gone on with, or replaced, by workflow, nor the reverse."""
    saved = json_in(folder / "config.json")
    if saved and ("controls" in saved) != ("controls" in kind.__dataclass_fields__):
        theirs = "workflow" if "controls" in saved else "train"
        raise UsageError(f"--out {folder}: holds a run of {theirs}; go on with it by that command, or name another folder")


def saved_settings(folder: Path, kind: type = Config) -> dict:
    """The settings of the run in a folder, but for those that are about where and how it is started; {} where there is none"""
    check_command_of(folder, kind)
    try:
        saved = dict(json.loads((folder / "config.json").read_text())) if (folder / "config.json").exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--resume: {folder / 'config.json'} cannot be read ({error})") from None
    fields = kind.__dataclass_fields__
    return {k: v for k, v in saved.items() if k in fields and v != fields[k].default and k not in ("out", "resume", "overwrite")}


def check_same_run(config: Config, folder: Path) -> None:
    """--resume goes on with the same run: a setting that would make it another one is refused, more --steps are welcome."""
    if not (folder / "config.json").exists():           # stopped before it wrote anything?
        ours = (".writable", "teacher_pool.json", "teacher_pool.json.tmp", "config.json.tmp")
        if folder.exists() and any(p.name not in ours for p in folder.iterdir()):
            raise UsageError(f"--resume: there is no run in --out {folder}, but other files are")
        print(f"warning: --resume: there is no run in --out {folder} yet; starts from the beginning, with the settings given now",
              file=sys.stderr)
        return
    before = saved_settings(folder, type(config))
    for field in dataclasses.fields(config):
        flag, old, new = flag_of(field.name), before.get(field.name, field.default), getattr(config, field.name)
        if old != new and field.name not in MAY_CHANGE and not (field.name == "steps" and new > old):
            raise UsageError(f"{flag} {new}: the run in --out {folder} has {flag} {old}; --resume goes on with the same settings"
                             + (", or with more steps" if field.name == "steps" else ""))


def open_folder(config: Config, name: str) -> Path:
    """The run's folder, made; a folder that holds a run is refused unless it is to be resumed or replaced."""
    if not config.out:
        taken = [int(p.name.rsplit("-", 1)[1]) for p in Path("runs").glob(f"{name}-*") if p.name.rsplit("-", 1)[1].isdigit()]
        folder = Path("runs") / f"{name}-{max(taken, default=0) + 1}"
    else:
        folder = Path(config.out)
    if (folder / "config.json").exists() and not (config.resume or config.overwrite):
        raise UsageError(f"--out {folder}: holds a run already; add --resume to go on with it, --overwrite to replace it, or "
                         "name another folder")
    if config.resume:
        check_same_run(config, folder)
    if config.overwrite:
        check_command_of(folder, type(config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").write_text(" " * 2**16)
        (folder / ".writable").unlink()
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror})") from None
    return folder


def check_room(folder: Path, student) -> None:
    """A checkpoint is the weights and AdamW's two moments, in float32."""
    checkpoint, free = 12 * sum(p.numel() for p in student.parameters()), shutil.disk_usage(folder).free
    if checkpoint > free:
        raise UsageError(f"--out {folder}: {free / 1e6:.0f} MB are free there, and a checkpoint takes {checkpoint / 1e6:.0f} MB")


def clear_run(folder: Path) -> None:
    """Removes an earlier run, not its teacher pool; called once all that can be refused was refused."""
    for old in [*folder.glob("checkpoint-*"), *folder.glob("final*")]:
        shutil.rmtree(old)
    for name in ("config.json", "metrics.jsonl", "evaluation.json"):
        (folder / name).unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Complete or not there: written beside, then renamed."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, path)


def keep_lines(path: Path, count: int) -> list[dict]:
    """Cuts a metrics file to its first lines, since what was logged past the checkpoint happens again; what they say"""
    kept = path.read_text().splitlines(keepends=True)[:count] if count and path.exists() else []
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept))
    os.replace(beside, path)
    return [json.loads(line) for line in kept]


def save_model(run: Run, folder: Path, state: dict | None = None) -> None:
    """An ordinary Hugging Face folder, with what --resume needs if given; complete or not there.  Raises OSError."""
    beside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        run.student.save_pretrained(beside)
        run.tokenizer.save_pretrained(beside)
        if state is not None:
            torch.save(state, beside / "trainer_state.pt")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)
    except Exception as error:          # a full disk is an OSError to some of these libraries and not to others
        shutil.rmtree(beside, ignore_errors=True)
        raise OSError(f"{folder} cannot be written ({' '.join(str(error).split())[:200]}); what was saved before is intact, "
                      "make room and go on with --resume") from None


def load_task(config: Config):
    """The task of --task, or the questions of --data; UsageError names the line that cannot be used"""
    from toy_tasks import TASKS, Questions

    try:
        return Questions(config.data, config.reward) if config.data else TASKS[config.task]
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_prompts(config: Config, task, tokenizer, problems: list, *models) -> None:
    """Every prompt has a token, and with --max-new-tokens it fits the windows of the models."""
    window = min(getattr(model.config, "max_position_embeddings", None) or math.inf for model in models)
    for problem in problems:
        length = len(encode(tokenizer, task.prompt(problem)))
        if not length:
            raise UsageError(f"{task.where(problem)}: the tokenizer of --student {config.student} makes no token of the prompt")
        if length + config.max_new_tokens > window:
            raise UsageError(f"{task.where(problem)}: its prompt has {length} tokens, with --max-new-tokens "
                             f"{config.max_new_tokens} that is {length + config.max_new_tokens}, and the model's window is "
                             f"{window}")


def load_pool(config: Config, folder: Path, teacher, tokenizer, task, problems: list) -> dict:
    """The teacher's samples, from the file of an earlier run if they are of the same teacher, prompts and settings."""
    path = Path(config.teacher_pool or folder / "teacher_pool.json")
    digest = sum(p.detach().double().abs().sum().item() for p in teacher.parameters())
    prompts = zlib.crc32(repr([(task.prompt(p), p) for p in problems]).encode())
    key = {"task": task.name, "prompts": prompts, "reward": config.reward, "teacher": digest, "samples": config.teacher_samples,
           "temperature": config.temperature, "max_new_tokens": config.max_new_tokens, "train_prompts": config.train_prompts,
           "seed": config.seed}
    if path.is_file():
        try:
            saved = json.loads(path.read_text())
            if saved["key"] == key:
                return saved["pool"]
        except (ValueError, KeyError, TypeError):
            pass
        if config.teacher_pool:
            raise UsageError(f"--teacher-pool {path}: is of another teacher, task or setting; name another file, or "
                             "remove it to sample anew")
    pool = make_pool(teacher, tokenizer, task, problems, config)
    if not any(known["confidence"] for known in pool.values()):
        print("warning: the teacher solved no training prompt, so nothing of it can be imitated or trusted", file=sys.stderr)
    write_json(path, {"key": key, "pool": pool})
    return pool


def newest_checkpoint(folder: Path, device: str) -> tuple | None:
    """(model, tokenizer, state, step) of the newest checkpoint that loads; a warning says which newer ones do not"""
    names = (p.name.split("-")[1] for p in folder.glob("checkpoint-*"))
    steps = sorted((int(name) for name in names if name.isdigit()), reverse=True)
    broken, loaded = [], None
    for step, path in ((step, folder / f"checkpoint-{step}") for step in steps):
        try:
            state = torch.load(path / "trainer_state.pt", weights_only=True, map_location="cpu")
            loaded = *load_model("--out", str(path), device), state, step
            break
        except Exception as error:      # cut-off files raise all kinds
            broken.append(f"{path.name} ({' '.join(str(error).split())[:120]})")
    if broken:
        goes_on = f"goes on from checkpoint-{loaded[-1]}" if loaded else "starts from the beginning"
        print(f"warning: --resume: broken in --out {folder}: {', '.join(broken)}; {goes_on}", file=sys.stderr)
    return loaded


def prepare(config: Config, look: bool = False) -> tuple[Run, Path, int]:
    """What can be wrong is looked for here, before the first step, and what needs no model before one is loaded.

    look=True, for toy_tasks.show: a teacher whatever the method, no folder and no pool.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    task, device, row = load_task(config), pick_device(config), config.row
    if config.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot {config.plot}: needs matplotlib, which is not installed: pip install matplotlib")
    needs_teacher = bool(look or row.distillation or row.imitation)
    check_model_folder("--student", config.student)
    if needs_teacher:
        if not config.teacher:
            raise UsageError(f"--teacher: --method {config.method} needs a teacher, for instance --teacher {_TOY / 'teacher'}")
        check_model_folder("--teacher", config.teacher)
    folder = Path() if look else open_folder(config, config.method)
    loaded = newest_checkpoint(folder, device) if config.resume else None
    student, tokenizer, state, step = loaded or (*load_model("--student", config.student, device), {"memory": {}}, 0)
    teacher = reference = None
    if needs_teacher:
        teacher, other = load_model("--teacher", config.teacher, device)
        check_same_tokens(config, tokenizer, other)
    if config.kl_coef:
        reference, _ = load_model("--student", config.student, device)
    if config.data:
        try:
            task.render(tokenizer, config.system)
        except ValueError as error:
            raise UsageError(str(error)) from None
    problems = part_of(task.problems("train", config.train_prompts, config.seed), config.part)
    if not look:
        check_room(folder, student)
    check_prompts(config, task, tokenizer, task.rows if config.data else problems, *filter(None, (student, teacher)))
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.lr, weight_decay=0.0)
    if loaded:
        optimizer.load_state_dict(state["optimizer"])
    pool = load_pool(config, folder, teacher, tokenizer, task, problems) if (row.imitation or row.weighted) and not look else {}
    return Run(config, task, tokenizer, student, teacher, reference, optimizer, problems, pool, state["memory"]), folder, step


@contextlib.contextmanager
def catching_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM land in a list, so that the step in progress is finished and saved; a second one ends at once."""
    caught: list[int] = []

    def note(number, _frame):
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:                  # not the main thread: whoever runs us there handles signals
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(config: Config, title: str = "") -> dict:
    """One method on one task: measure, take `steps` steps, measure again; writes the run's folder.

    Returns {"before": {difficulty: (right, asked)}, "after": ..., "folder": ..., "run": Run}; raises UsageError for what
    cannot be used, and SystemExit(128 + signal) after the state was saved if a signal came.
    """
    from tqdm import tqdm

    run, folder, first = prepare(config)
    if config.overwrite:
        clear_run(folder)
    write_json(folder / "config.json", dataclasses.asdict(config))
    held_out = run.task.problems("eval", config.eval_problems, 0) if config.eval_problems else []
    known = json_in(folder / "evaluation.json") if first else {}
    result = {"before": known.get("before") or accuracy(run, held_out)}
    write_json(folder / "evaluation.json", result)
    metrics, warned = folder / "metrics.jsonl", None
    lines = keep_lines(metrics, first)
    state = lambda: {"optimizer": run.optimizer.state_dict(), "memory": run.memory}
    with metrics.open("a") as log, catching_signals() as caught, \
            tqdm(total=config.steps, initial=first, desc=title or config.method, unit="step") as bar:
        for step in range(first, config.steps):
            line = train_step(run, step)
            print(json.dumps(line), file=log, flush=True)
            bar.update()
            lines.append(line)
            if not warned and (warned := warning_of(config, lines)):
                bar.write(warned, file=sys.stderr)
            if line["reward_mean"] is not None:
                bar.set_postfix_str("reward {reward_mean:.2f}, groups -{negative_share:.2f} ~{mixed_share:.2f} "
                                    "+{positive_share:.2f}".format_map(line), refresh=False)
            if caught or (config.save_every and (step + 1) % config.save_every == 0 and step + 1 < config.steps):
                save_model(run, folder / f"checkpoint-{step + 1}", state())
            if caught:
                bar.write(f"stopped by {signal.Signals(caught[0]).name} after step {step + 1}, saved; go on with --resume --out "
                          f"{folder}", file=sys.stderr)
                raise SystemExit(128 + caught[0])
    save_model(run, folder / "final")
    write_json(folder / "evaluation.json", result := result | {"after": accuracy(run, held_out)})
    return result | {"folder": str(folder), "run": run}


# ---------------------------------------------------------------------------------------------------------------------
# 12  Sparse to dense.  Which label is spent on which model, and in which order?                      (arXiv:2605.12483)
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One run of train: who learns, from where on, from whom, on which of the labelled prompts, for how long"""

    arm: str
    method: str
    start: str                          # "student", "teacher", or the stage whose final model learns on
    teacher: str = ""                   # the same for the frozen teacher
    part: str = "first"                 # of the training prompts
    steps: tuple[str, ...] = ()         # settings that are added up


# The bridge is a warm-up on the teacher's own completions, where the student's would say nothing yet, and then distillation
# on the student's, which corrects the mistakes that it makes itself.  A stage starts from the final model of the one it names.
STAGES = {
    "teacher-rl": Stage("sparse to dense", "grpo", "teacher", steps=("teacher_steps",)),
    "warm-up": Stage("sparse to dense", "forward-kl", "student", "teacher-rl", steps=("warmup_steps",)),
    "opd": Stage("sparse to dense", "reverse-kl", "warm-up", "teacher-rl", steps=("opd_steps",)),
    "held-out-rl": Stage("sparse to dense", "grpo", "opd", part="second", steps=("rl_steps",)),
    "raw-warm-up": Stage("raw teacher", "forward-kl", "student", "teacher", steps=("warmup_steps",)),
    "raw-opd": Stage("raw teacher", "reverse-kl", "raw-warm-up", "teacher", steps=("opd_steps",)),
    # CHOICE: as many steps as the student takes in all stages.  test_direct_grpo_has_the_labels_and_the_steps_of_all_stages
    "direct-rl": Stage("direct GRPO", "grpo", "student", part="all", steps=("warmup_steps", "opd_steps", "rl_steps")),
    "opd-only": Stage("no warm-up", "reverse-kl", "student", "teacher-rl", steps=("warmup_steps", "opd_steps")),
    "teacher-sft": Stage("no OPD, hard labels", "teacher-sft", "student", "teacher-rl", steps=("warmup_steps", "opd_steps")),
    "warm-up-only": Stage("no OPD, whole distributions", "forward-kl", "student", "teacher-rl",
                          steps=("warmup_steps", "opd_steps")),
    "replay-rl": Stage("replay instead of held-out", "grpo", "opd", steps=("rl_steps",)),
    "teacher-rl-all": Stage("all labels to the teacher", "grpo", "teacher", part="all", steps=("teacher_steps",)),
    "warm-up-all": Stage("all labels to the teacher", "forward-kl", "student", "teacher-rl-all", steps=("warmup_steps",)),
    "opd-all": Stage("all labels to the teacher", "reverse-kl", "warm-up-all", "teacher-rl-all", steps=("opd_steps",)),
}


@dataclass(frozen=True)
class WorkflowConfig(Config):
    """Settings of all stages: those of train that one of them reads, and their lengths."""

    # DEVIATES: no KL in the GRPO stages unless --kl-coef is given (paper 5e-4).  test_the_stages_have_the_stated_lengths
    method: str = knob("grpo", "a stage has its own")
    teacher: str = knob(str(_TOY / "teacher-raw"), "teacher before its own RL, same tokenizer: a folder or hub name")
    controls: str = knob("few", "few: the raw teacher and direct GRPO; all: every stage left out once, too", ("few", "all"))
    teacher_steps: int = knob(60, "steps of the teacher's GRPO", ">= 1")
    # CHOICE: a warm-up as long as the distillation.  test_the_stages_have_the_stated_lengths
    warmup_steps: int = knob(100, "steps of the forward-KL warm-up", ">= 1")
    opd_steps: int = knob(100, "steps of the on-policy distillation", ">= 1")
    rl_steps: int = knob(100, "steps of the student's GRPO on held-out labels", ">= 1")

    @property
    def methods(self) -> tuple[str, ...]:
        """Those of its stages"""
        return tuple({stage.method: None for stage in STAGES.values()})

    @property
    def stages(self) -> dict[str, Stage]:
        """Those that --controls asks for"""
        return {name: stage for name, stage in STAGES.items()
                if self.controls == "all" or stage.arm in ("sparse to dense", "raw teacher", "direct GRPO")}


def stage_config(config: WorkflowConfig, name: str, folder: Path) -> Config:
    """The settings of one stage; where it starts and whom it hears are folders of earlier stages."""
    stage = STAGES[name]
    place = lambda who: str(folder / who / "final") if who in STAGES else getattr(config, who)
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config) if stage.method in users_of(f)}
    return Config(**shared | {
        "method": stage.method, "part": stage.part, "steps": sum(getattr(config, s) for s in stage.steps),
        "student": place(stage.start), "teacher": place(stage.teacher) if stage.teacher else "", "out": str(folder / name),
        "resume": (folder / name / "config.json").exists(), "overwrite": False})


def labels_spent(config: Config, task) -> set:
    """The problems whose right answer a run's gradient has seen

    Of the others only the prompt is used, and the reward for the log alone.
    """
    if not (config.row.reward or config.row.imitation or config.row.weighted):
        return set()
    problems = part_of(task.problems("train", config.train_prompts, config.seed), config.part)
    return {p for step in range(config.steps) for p in step_problems(problems, step, config.prompts_per_step, config.seed)}


def workflow(config: WorkflowConfig) -> list[dict]:
    """Stage by stage, each from the weights of the one before.  Returns a row a stage, writes workflow.json.

    A row: stage, arm, method, labels (this stage's own), labels_so_far (its whole ancestry's, teachers included, each
    counted once), steps, before and after ({difficulty: (right, asked)}).  Finished stages are not repeated.  Raises as train.
    """
    task = load_task(config)
    part_of(task.problems("train", config.train_prompts, config.seed), "second")        # raises where that is none
    for flag in ("student", "teacher"):
        check_model_folder(f"--{flag}", getattr(config, flag))
    folder = open_folder(config, "workflow").resolve()
    both = dataclasses.replace(stage_config(config, "raw-warm-up", folder), resume=False)
    prepare(both, look=True)            # what a later stage could stumble over is told now: both models, all prompts
    if config.overwrite:
        (folder / "workflow.json").unlink(missing_ok=True)
        for name in STAGES:
            shutil.rmtree(folder / name, ignore_errors=True)
    write_json(folder / "config.json", dataclasses.asdict(config))
    rows, seen = [], {"student": set(), "teacher": set(), "": set()}
    for number, (name, stage) in enumerate(config.stages.items(), 1):
        own = stage_config(config, name, folder)
        labels = labels_spent(own, task)
        if stage.part == "second" and labels & seen[stage.start]:
            raise UsageError(f"{name}: its labels are to be held out, but a stage before it has used some of them")
        answers = folder / name / "evaluation.json"
        if "after" not in json_in(answers):
            try:
                train(own, f"{number}/{len(config.stages)} {name}")
            except SystemExit:
                print(f"the whole workflow goes on with: workflow --resume --out {folder}", file=sys.stderr)
                raise
        result = json_in(answers)
        seen[name] = labels | seen[stage.start] | seen[stage.teacher]
        rows.append({"stage": name, "arm": stage.arm, "method": stage.method, "start": stage.start, "teacher": stage.teacher,
                     "labels": len(labels), "labels_so_far": len(seen[name]), "steps": own.steps,
                     "before": result["before"], "after": result["after"]})
        write_json(folder / "workflow.json", rows)
    print(f"\n{workflow_table(rows, task.name)}\n\nEach stage's folder, and workflow.json, are in {folder}")
    return rows


def workflow_table(rows: list[dict], task: str) -> str:
    """What each stage spent and what came of it, arm by arm"""
    whole = lambda answers: [sum(pair[i] for pair in answers.values()) for i in (0, 1)]
    line = "{:18}{:13}{:16}{:>6}{:>8}{:>8}  {:>8}  {:>22}".format
    text, arm = [f"sparse to dense on {task}: held-out problems of all difficulties, 95 % intervals",
                 "labels: prompts whose answer was used, by the stage and by all before it\n",
                 line("stage", "method", "learns from", "steps", "labels", "so far", "before", "after" + " " * 9)], None
    for row in rows:
        text += [row["arm"]] if row["arm"] != arm else []
        arm, before, after = row["arm"], share_cell(*whole(row["before"])).split(" [")[0], share_cell(*whole(row["after"]))
        text.append(line("  " + row["stage"], row["method"], row["teacher"] or "reward", row["steps"], row["labels"],
                         row["labels_so_far"], before, after))
    return "\n".join(text)


# ---------------------------------------------------------------------------------------------------------------------
# 13  The oracle.  Is another implementation right, in value and in gradient, and if not: what is its mistake?
# ---------------------------------------------------------------------------------------------------------------------
#
# gold = the reference in float64, plain = the same reference in the candidate's dtype, both on inputs rounded to that dtype.
# A candidate may lose twice what the plain formula loses (it may round in another order), and four roundings of the largest
# number (where the plain formula happens to lose nothing):
#
#     |candidate - gold|  <=  2 max |plain - gold| + 4 eps scale,     scale = max |gold|, and mean |term| for a loss
#
# separately for every output and every gradient.  Where that allows more than a tenth of the scale there is no verdict.

# Four layers to enter at.  1: logits, or hidden (B, T, D) and weight (V, D), to logp, lse and entropy.  2: logp to terms.
# 3: terms to a scalar (weighted_sum is the part of one micro-batch).  4: end to end, the names with _from_ below.


def logps_from_logits(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """{logp, lse, entropy}, lse = log sum_v exp(z_v / temperature)                   (B, T, V), (B, T) -> (B, T) each

    Aligned: logits[:, t] predict ids[:, t], here and in the other _from_ functions; token_logps shifts.
    """
    return {"logp": _aligned_logps(logits, ids, temperature), "lse": (upcast(logits) / temperature).logsumexp(dim=-1),
            "entropy": token_entropy(logits, temperature)}


def grpo_loss_from_logits(logits, ids, logp_old, advantages, mask, *, temperature: float = 1.0, **options) -> Tensor:
    """grpo_loss of the logps of ids, options as there                  (B, T, V), (B, T) x2, (B, T) or (B, 1), (B, T) -> ()"""
    return grpo_loss(logps_from_logits(logits, ids, temperature)["logp"], logp_old, advantages, mask, **options)


def opd_loss_from_logits(logits, ids, logp_teacher, mask, *, temperature: float = 1.0, **options) -> Tensor:
    """opd_loss of the logps of ids, options as there                                                (B, T, V), (B, T) x3 -> ()"""
    return opd_loss(logps_from_logits(logits, ids, temperature)["logp"], logp_teacher, mask, **options)


def jsd_loss_from_logits(student_logits, teacher_logits, mask, *, teacher_share: float = 0.5, temperature: float = 1.0,
                         how: str = "token_mean", **options) -> Tensor:
    """aggregate of generalized_jsd, the mean over tokens as GKD unless told otherwise               (B, T, V) x2, (B, T) -> ()"""
    return aggregate(generalized_jsd(student_logits, teacher_logits, teacher_share, temperature), mask, how, **options)


def from_hidden(function: Callable) -> Callable:
    """The same function of hidden (B, T, D) and weight (V, D) in place of logits = hidden weight^T (B, T, V)."""
    return lambda hidden, weight, *others, **options: function(upcast(hidden) @ upcast(weight).T, *others, **options)


logps_from_hidden, grpo_loss_from_hidden = from_hidden(logps_from_logits), from_hidden(grpo_loss_from_logits)
opd_loss_from_hidden, jsd_loss_from_hidden = from_hidden(opd_loss_from_logits), from_hidden(jsd_loss_from_logits)


class Draw:
    """Random numbers in float64, the same for the same seed; sizes vary with the seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.length, self.vocab = (int(self.whole(low, high)) for low, high in ((6, 10), (6, 10), (9, 16)))

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape or (self.rows, self.length), generator=self.generator, dtype=torch.float64)

    def mask(self, second: int = 3, left: bool = False) -> Tensor:
        """(B, T): a full row, one of `second` tokens, others of 3 and more; padded on the right or on the left"""
        lengths = self.whole(3, self.length + 1, self.rows, 1)
        lengths[:2, 0] = torch.tensor([self.length, second])
        mask = torch.arange(self.length) < lengths
        return mask.flip(1) if left else mask

    def log_ratio(self) -> Tensor:
        """On both sides of every clip that a case uses and never within 0.02 of one: at a kink rounding would choose the side."""
        centres = torch.tensor([-0.6, -0.1, 0.05, 0.3, 0.6, 1.5], dtype=torch.float64)
        return centres[self.whole(0, 6, self.rows, self.length)] + 0.03 * self.normal().sin()


def batch(d: Draw, garbage: float | None = None, second: int = 3, left: bool = False, apart: float | None = None,
          teacher: float | None = None, impossible: str = "", copy: bool = False, each_row: float | None = None,
          **keywords) -> dict:
    """Every input that a loss or a residual can take, all of one batch; a Spec picks those that it names.

    garbage fills the padding; second is the length of the second row; apart is |logp - logp_old| everywhere; teacher is its logp
    at every third token; impossible says who gives two tokens -inf; copy makes the teacher the student; each_row scales one
    advantage a row, (B, 1).
    """
    mask, ids = d.mask(second, left), d.whole(2, d.vocab, d.rows, d.length)
    hidden, weight = d.normal(d.rows, d.length, 16).tanh(), 0.4 * d.normal(d.vocab, 16).tanh()
    level = lambda z: z - z.logsumexp(dim=-1, keepdim=True) + 1                 # so that every way to a log-softmax rounds alike
    never = lambda z, who: z.masked_fill(torch.arange(d.vocab) < 2, -torch.inf) if impossible in (who, "both") else z
    logits = never(level(hidden @ weight.T), "student")
    teacher_logits = never(logits if copy else level(4 * d.normal(*logits.shape).tanh()), "teacher")
    logp = logps_from_logits(logits, ids)["logp"]
    tokens = {"logp": logp, "logp_old": logp - (d.log_ratio() if apart is None else apart * d.normal().sign()),
              "logp_ref": logp + 0.7 * d.normal(), "logp_teacher": -d.normal().abs() - 0.05, "terms": d.normal(),
              "advantages": d.normal(), "entropy": d.normal().abs(), "divergence": d.normal().abs()}
    if teacher is not None:
        tokens["logp_teacher"][:, ::3] = teacher
    if garbage is not None:
        tokens = {name: x.masked_fill(~mask, garbage) for name, x in tokens.items()}
    if each_row is not None:
        tokens["advantages"] = each_row * d.normal(d.rows, 1)
    grad_r, residual_d = d.normal(500), distillation_residual(logits, teacher_logits)
    return tokens | keywords | {
        "mask": mask, "weights": token_weights(mask, "seq_mean_token_mean"), "how": "seq_mean_token_mean", "ids": ids,
        "hidden": hidden, "weight": weight, "logits": logits, "student_logits": logits, "teacher_logits": teacher_logits,
        "k_dr": d.normal(),
        "residual": d.normal(*logits.shape), "residual_d": residual_d, "residual_r": d.normal(*logits.shape),
        "cosine": d.normal().tanh(), "gate": d.normal().sigmoid() / 2, "grad_r": grad_r, "grad_d": d.normal(500) - grad_r}


# CHOICE: a ratio exactly at its clip still moves.  test_exactly_at_the_clip_the_gradient_is_whole
BATCHES: dict[str, dict] = {            # case: options of batch, and keywords of the function
    "plain": {}, "one-token row": {"second": 1}, "empty row": {"second": 0},
    "empty row counted": {"second": 0, "empty_rows": "count"}, "NaN on the right": {"garbage": math.nan},
    "NaN on the left": {"garbage": math.nan, "left": True, "second": 0}, "-inf on the right": {"garbage": -math.inf},
    "one advantage a row": {"each_row": 1.0}, "NaN and one advantage": {"each_row": 1.0, "garbage": math.nan},
    "no advantage": {"each_row": 0.0},
    "exactly at the clip": {"apart": 0.0, "clip_low": 0.0, "clip_high": 0.0}, "far": {"apart": 25.0},
    "sure teacher": {"teacher": 0.0}, "teacher that cannot": {"teacher": -math.inf}, "both cannot": {"impossible": "both"},
    "teacher cannot": {"impossible": "teacher"}, "student cannot": {"impossible": "student"}, "copied teacher": {"copy": True}}


def batches(*labels: str) -> dict[str, Callable[[Draw], dict]]:
    """{label: a case generator} of some rows of BATCHES"""
    return {label: lambda d, options=BATCHES[label]: batch(d, **options) for label in labels}


def routed(d: Draw, garbage: float = 0.0) -> dict:
    """Four groups: all wrong, all wrong and no right teacher, mixed, all right; token scores kept apart by more than 3e-4"""
    size, length = int(d.whole(2, 5)), d.length + 3
    outcomes = torch.zeros(4, size, dtype=torch.float64)
    outcomes[2, 0], outcomes[3] = 1, 1
    while True:
        mask = torch.arange(length) < d.whole(2, length + 1, 4 * size, 1)
        mask[:size, :-1] = True
        opd, entropy = d.normal(4 * size, length), d.normal(4 * size, length).abs()
        live = mask & (torch.arange(4 * size) < size)[:, None]
        if token_scores(entropy, opd.abs(), live)[live].sort().values.diff().min() > 3e-4:
            break
    entropy[size:] *= 8                 # a scaling that other groups enter then selects other tokens
    return {"outcomes": outcomes, "advantages": d.normal(4, size), "advantages_opd": opd.masked_fill(~mask, garbage),
            "entropy": entropy.masked_fill(~mask, garbage), "mask": mask,
            "confidence": torch.tensor([0.625, 0.0, 0.5, 0.75], dtype=torch.float64), "opd_coef": 0.3}


def rewards(d: Draw, size: int = 0, equal: bool = False, binary: bool = False) -> dict:
    """Three groups of 2 to 16; equal: the last two hold 0.2 alone; binary: 0 and 1, the last group all 0"""
    r = d.normal(3, size or int(d.whole(3, 17)))
    r = (r > 0).double() if binary else r
    r[:, 0], r[:, 1] = 0.0, 1.0
    r[1 if equal else 2 if binary else 3:] = 0.2 * equal
    return {"rewards": r}


def distinct(d: Draw, tokens: int = 0) -> dict:
    """Scores that no rounding can bring to a tie: eighths in random order; NaN in the padding"""
    mask = d.mask(1) if not tokens else torch.ones(2, tokens, dtype=torch.bool)
    order = torch.stack([torch.randperm(mask.shape[1], generator=d.generator) for _ in mask])
    return {"scores": (order / 8).double().masked_fill(~mask, math.nan), "mask": mask}


def sampled_ids(d: Draw, eos: int | tuple = 2) -> dict:
    """Ids 2..8, of which 2 (and 3) end a row: the pad id is the eos too"""
    return {"completion_ids": d.whole(2, 9, 6, 8), "eos_ids": eos}


@dataclass(frozen=True)
class Spec:
    """A function's reference, its inputs by position, which of their gradients count, its cases, and its keywords.

    A keyword row is tried on the first case; `...` in it stands for the batch's own tensor of that name.
    """

    reference: Callable
    inputs: str
    gradients: str
    cases: dict[str, Callable[[Draw], dict]]
    keywords: tuple[dict, ...] = ()


def changed(name: str, change: Callable[[Tensor, Draw], Tensor]) -> Callable[[Draw], dict]:
    """The plain batch with one input changed"""
    return lambda d: (lambda made: made | {name: change(made[name], d)})(batch(d))


_WARM, _SHARE, _HALF = {"temperature": 2.0}, {"teacher_share": 0.2}, {"max_share": 0.15}
_HOW = ({"how": "token_mean"}, {"how": "seq_mean_token_sum_norm", "length": 12})
_CLIP = ({"clip_high": 0.45}, {"clip_low": 0.5}, {"dual_clip": 1.5})
_KL = ({"logp_ref": ..., "kl_coef": 0.3}, {"logp_ref": ..., "kl_coef": 0.3, "kl_kind": "k1", "kl_gradient": "ratio"})
_MASKED = batches("plain", "one-token row", "empty row", "empty row counted", "NaN on the right", "NaN on the left",
                  "-inf on the right")
_GRPO = batches("one advantage a row", "NaN and one advantage", "no advantage", "exactly at the clip", "far")
_OPD = batches("plain", "one-token row", "empty row", "NaN on the right", "NaN on the left", "-inf on the right", "sure teacher")
_PLAIN, _PAIR = batches("plain"), batches("plain", "both cannot", "copied teacher")
_ONE_CANNOT, _ENDS = batches("plain", "student cannot"), {"one eos": sampled_ids, "two eos": lambda d: sampled_ids(d, (2, 3))}
_GROUPS = {"plain": rewards, "of two": lambda d: rewards(d, 2), "of sixteen": lambda d: rewards(d, 16),
           "binary": lambda d: rewards(d, binary=True), "equal groups": lambda d: rewards(d, equal=True),
           "all equal": lambda d: {"rewards": torch.full((1, 8), 0.2, dtype=torch.float64)},
           "one apart": lambda d: {"rewards": 0.35 + 0.6 * torch.eye(3, 8, dtype=torch.float64)}}
_SCHEDULE = {"start": 5.0, "slope": 0.05, "floor": 1.0}

SPEC: dict[str, Spec] = {
    # layer 1: logits, or hidden and weight (below), to logp, lse, entropy
    "token_logps": Spec(token_logps, "logits ids", "logits", _ONE_CANNOT, (_WARM,)),
    "token_entropy": Spec(token_entropy, "logits", "logits", _ONE_CANNOT, (_WARM,)),
    "logps_from_logits": Spec(logps_from_logits, "logits ids", "logits", _ONE_CANNOT, (_WARM,)),
    # layer 2: one number a token, with dterms/dlogp or dterms/dlogits
    "policy_terms": Spec(policy_terms, "logp logp_old advantages", "logp",
                         batches("plain", "one advantage a row", "exactly at the clip", "far"),
                         _CLIP + ({"ratio_level": "sequence", "mask": ...},)),
    "kl_terms": Spec(kl_terms, "logp logp_ref", "logp", _PLAIN,
                     tuple({"kind": k, "gradient": g} for k in ("k3", "k1", "k2") for g in ("estimator", "ratio"))),
    "opd_advantages": Spec(opd_advantages, "logp logp_teacher", "logp", batches("plain", "sure teacher", "teacher that cannot")),
    "reverse_kl": Spec(reverse_kl, "student_logits teacher_logits", "student_logits",
                       _PAIR | batches("student cannot"), (_WARM,)),
    "forward_kl": Spec(forward_kl, "student_logits teacher_logits", "student_logits",
                       _PAIR | batches("teacher cannot"), (_WARM,)),
    "generalized_jsd": Spec(generalized_jsd, "student_logits teacher_logits", "student_logits",
                            _PAIR | batches("student cannot", "teacher cannot"), (_WARM, _SHARE)),
    "residual_terms": Spec(residual_terms, "logits residual", "logits residual", _ONE_CANNOT),
    # layer 3: terms to a scalar
    "token_weights": Spec(token_weights, "mask how", "", batches("plain", "empty row", "empty row counted"), _HOW),
    "weighted_sum": Spec(lambda *given: weighted_sum(*given), "terms weights", "terms",
                         batches("plain", "empty row", "NaN on the right", "-inf on the right")
                         | {"a micro-batch": lambda d: {k: x[1:3] for k, x in batch(d).items() if k in ("terms", "weights")}}),
    "aggregate": Spec(aggregate, "terms mask how", "terms", _MASKED, _HOW),
    "grpo_loss": Spec(grpo_loss, "logp logp_old advantages mask", "logp", _MASKED | _GRPO,
                      _HOW + _CLIP + ({"ratio_level": "sequence"},) + _KL),
    "opd_loss": Spec(opd_loss, "logp logp_teacher mask", "logp", _OPD, _HOW + ({"logp_old": ...},)),
    "sft_loss": Spec(sft_loss, "logp mask", "logp", _MASKED, _HOW),
    "hybrid_loss": Spec(hybrid_loss, "streams", "streams", {"plain": lambda d: {"streams": {
        name: (d.normal(), token_weights(d.mask(), "token_mean")) for name in ("reward", "distillation", "imitation")}}}),
    # layer 4: end to end
    "grpo_loss_from_logits": Spec(grpo_loss_from_logits, "logits ids logp_old advantages mask", "logits",
                                  _MASKED | batches("one advantage a row", "NaN and one advantage", "exactly at the clip"),
                                  (_WARM,) + _HOW),
    "opd_loss_from_logits": Spec(opd_loss_from_logits, "logits ids logp_teacher mask", "logits", _OPD, (_WARM,) + _HOW),
    "jsd_loss_from_logits": Spec(jsd_loss_from_logits, "student_logits teacher_logits mask", "student_logits",
                                 batches("plain", "empty row"), (_WARM, _SHARE)),
    # what has no gradient
    "action_mask": Spec(action_mask, "completion_ids eos_ids", "", _ENDS),
    "truncated": Spec(truncated, "completion_ids eos_ids", "", _ENDS),
    "group_advantages": Spec(group_advantages, "rewards", "", _GROUPS, (
        {"ddof": 1}, {"eps": 0.1}, {"scale": "batch_std"}, {"scale": "none"}, {"baseline": "leave_one_out"})),
    "route_groups": Spec(route_groups, "outcomes", "", {"plain": lambda d: {"outcomes": routed(d)["outcomes"]}}),
    "teacher_confidence": Spec(teacher_confidence, "outcomes", "",
                               {"plain": lambda d: {"outcomes": (d.normal(5, 8) > 0.6).double()}}),
    "token_scores": Spec(token_scores, "entropy divergence mask", "",
                         batches("plain", "empty row", "NaN on the right", "NaN on the left")),
    "select_tokens": Spec(select_tokens, "scores mask", "",
                          {"plain": distinct, "7 % of a hundred": lambda d: distinct(d, 100) | {"share": 7}},
                          ({"share": 30}, {"share": 20}, {"share": 100})),
    "rstg_advantages": Spec(rstg_advantages, "outcomes advantages advantages_opd entropy mask confidence", "",
                            {"plain": routed, "NaN on the right": lambda d: routed(d, math.nan)},
                            ({"select_share": 20}, {"select_share": 100})),
    "anneal": Spec(anneal, "step start slope floor", "", {
        "early": lambda d: _SCHEDULE | {"step": 3}, "late": lambda d: _SCHEDULE | {"step": 200}}),
    "listening": Spec(listening, "outcomes where", "", {
        where: lambda d, where=where: {"outcomes": routed(d)["outcomes"], "where": where}
        for where in ("all", "failed", "negative")}),
    "reward_residual": Spec(reward_residual, "logits ids advantages", "", _ONE_CANNOT | batches("one advantage a row")),
    "distillation_residual": Spec(distillation_residual, "student_logits teacher_logits", "", _PAIR,
                                  ({"kind": "reverse_kl"}, {"kind": "jsd", "teacher_share": 0.2}, {"clip": 0.25})),
    "unit_residual": Spec(unit_residual, "residual", "", _PLAIN | {
        "zero": changed("residual", lambda x, d: x * (d.normal() > 0)[..., None]),
        "small": changed("residual", lambda x, d: 1e-6 * x)}, ({"eps": 0.1},)),
    "cross_signal_ntk": Spec(cross_signal_ntk, "residual_d residual_r", "", _PLAIN),
    "select_gate": Spec(select_gate, "k_dr", "", _PLAIN | {"silent": changed("k_dr", lambda x, d: x * (d.normal() > 0))},
                        (_HALF,)),
    "soft_gate": Spec(soft_gate, "cosine", "", _PLAIN, (_HALF, {"sharpness": 4.0})),
    "m3_residual": Spec(m3_residual, "residual_d residual_r gate", "", batches("plain", "copied teacher"), ({"eps": 0.1},)),
    "gradient_geometry": Spec(gradient_geometry, "grad_r grad_d", "", _PLAIN | {"zero": changed("grad_r", lambda x, d: 0 * x)}),
    "pcgrad": Spec(pcgrad, "grad_r grad_d", "", {"conflict": batch, "agree": changed("grad_r", lambda x, d: -x)}),
    "conflict_rate": Spec(conflict_rate, "k_dr mask", "", {"plain": changed("k_dr", lambda x, d: x * (d.normal() > -0.5))}),
    "drowning_threshold": Spec(drowning_threshold, "kappa share", "",
                               {"plain": lambda d: {"kappa": d.normal(7).exp(), "share": 0.3}}),
}
for _name in ("logps", "grpo_loss", "opd_loss", "jsd_loss"):        # and the same of hidden and weight
    _row = SPEC[f"{_name}_from_logits"]
    SPEC[f"{_name}_from_hidden"] = Spec(
        globals()[f"{_name}_from_hidden"], "hidden weight " + _row.inputs.split(" ", 1)[1], "hidden weight",
        {label: make for label, make in _row.cases.items() if "cannot" not in label}, _row.keywords)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Preset = dict[str, dict]                # function: keyword values

# What other libraries compute by default, as keyword values of ours: read from the source of these versions and run beside it
# (test_installed_libraries_compute_what_their_convention_says; TRL's advantages were read only, since its trainer computes them
# while it generates).  What no keyword can express stands in the README.
CONVENTIONS: dict[str, Preset] = {
    # TRL 1.16.0, GRPOConfig: loss_type dapo, scale_rewards group, max_completion_length 512
    "trl": {"grpo_loss": {"how": "token_mean"}, "group_advantages": {"ddof": 1, "eps": 1e-4},
            "jsd_loss_from_logits": {"how": "token_mean"}},
    "trl-grpo": {"grpo_loss": {"how": "seq_mean_token_mean", "empty_rows": "count"}},
    "trl-dr_grpo": {"grpo_loss": {"how": "seq_mean_token_sum_norm", "length": 512, "empty_rows": "count"},
                    "group_advantages": {"scale": "none"}},
    # verl 0.9.1, ActorConfig: loss_agg_mode token-mean, clip_ratio_c 3.0
    "verl": {"grpo_loss": {"how": "token_mean", "dual_clip": 3.0}, "group_advantages": {"ddof": 1, "eps": 1e-6},
             "kl_terms": {"kind": "k3"}},
    "verl-seq-mean-token-mean": {"grpo_loss": {"how": "seq_mean_token_mean", "dual_clip": 3.0}},
    # Liger 0.8.5, LigerFusedLinearGRPOLoss and LigerFusedLinearJSDLoss: loss_type dapo
    "liger": {"grpo_loss_from_hidden": {"how": "token_mean"}, "jsd_loss_from_hidden": {"how": "token_mean"}},
    "liger-grpo": {"grpo_loss_from_hidden": {"how": "seq_mean_token_mean", "empty_rows": "count"}}}


def over_tensors(change: Callable[[Tensor], Tensor], x):
    """x with every tensor in it changed; x may be a tensor, a dict or tuple of them, or anything else, which stays"""
    if isinstance(x, dict):
        return {name: over_tensors(change, value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(over_tensors(change, value) for value in x)
    return change(x) if isinstance(x, Tensor) else x


def to_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A copy in that dtype; ids and masks stay what they are"""
    return lambda x: x.detach().to(dtype if x.is_floating_point() else x.dtype, copy=True)


def evaluate(function: Callable, row: Spec, arguments: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of one call, in float64, in order: {"value": ..., "gradient of logp": ...}"""
    given = over_tensors(to_dtype(dtype), arguments)
    leaves: dict[str, Tensor] = {}
    for name in row.gradients.split():
        number = (lambda: f" {len(leaves)}") if isinstance(given[name], dict) else (lambda: "")
        over_tensors(lambda x: leaves.setdefault(f"gradient of {name}{number()}", x.requires_grad_()), given[name])
    result = function(*[given.pop(name) for name in row.inputs.split()], **given)
    result = result if isinstance(result, dict) else dict(enumerate(result)) if isinstance(result, tuple) else {"": result}
    values = {f"value {name}".strip(): x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
              for name, x in result.items()}
    live = [x for x in values.values() if x.requires_grad]
    cotangents = [(1 + torch.arange(x.numel()) % 7 / 8).view(x.shape).to(x.dtype) for x in live]      # exact in every dtype
    inputs = list(leaves.values())
    grads = torch.autograd.grad(live, inputs, cotangents, allow_unused=True) if live and leaves else [None] * len(leaves)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs)]
    return {stage: x.detach().double() for stage, x in (values | dict(zip(leaves, grads))).items()}


def term_size(row: Spec, arguments: dict) -> float:
    """mean |term| of a loss: the reference once more, with |term| for each term where every loss ends"""
    plain = weighted_sum
    globals()["weighted_sum"] = lambda terms, weights: plain(terms.abs(), weights)
    try:
        return abs(evaluate(row.reference, dataclasses.replace(row, gradients=""), arguments, torch.float64)["value"].item())
    finally:
        globals()["weighted_sum"] = plain


def gap(found: Tensor | None, expected: Tensor) -> float:
    """max |found - expected|; inf where a shape differs, or a non-finite number is not the same one in the same place"""
    odd = ~expected.isfinite()
    if found is None or found.shape != expected.shape or not found[~odd].isfinite().all() or not torch.allclose(
            found[odd], expected[odd], equal_nan=True):
        return math.inf
    return (found - expected)[~odd].abs().max().item() if (~odd).any() else 0.0


def size_of(x: Tensor) -> float:
    """The largest finite |x|; 0 where there is none"""
    return x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0


def rounding(dtype: str) -> float:
    """Four roundings of a number of size 1"""
    return 4 * torch.finfo(DTYPES[dtype]).eps


@dataclass
class Case:
    """One case: what goes in, what must come out, and how far off each output and gradient may be (None = no verdict)."""

    function: str
    label: str
    seed: int
    dtype: str
    arguments: dict
    gold: dict[str, Tensor]
    allowed: dict[str, float | None]
    preset: dict = dataclasses.field(default_factory=dict)      # keyword values that only the reference was given


def make_case(name: str, label: str, seed: int, dtype: str, preset: dict | None = None) -> Case:
    """The case `label`, or "label, keyword=value, ...", of a function; with preset, of its reference under these keywords."""
    row, (label_only, *_) = SPEC[name], label.split(", ")
    made = row.cases[label_only](Draw(seed))
    fields = set(batch_fields()) - set(row.inputs.split())
    keywords = dict(zip(map(keywords_label, row.keywords), row.keywords)).get(label.partition(", ")[2], {})
    arguments = {k: x for k, x in made.items() if k not in fields} | {k: made[k] if x is ... else x for k, x in keywords.items()}
    arguments = over_tensors(to_dtype(DTYPES[dtype]), arguments)
    right = dataclasses.replace(row, reference=functools.partial(row.reference, **(preset or {})))
    gold, plain = (evaluate(right.reference, row, arguments, kind) for kind in (torch.float64, DTYPES[dtype]))
    allowed: dict[str, float | None] = {}
    for stage, x in gold.items():
        scale = term_size(right, arguments) if stage == "value" and x.ndim == 0 else size_of(x)
        bound = 2 * gap(plain[stage], x) + rounding(dtype) * scale
        allowed[stage] = bound if bound <= 0.1 * scale or bound == 0 else None
    return Case(name, label, seed, dtype, arguments, gold, allowed, preset or {})


@functools.cache
def batch_fields() -> frozenset[str]:
    """Names of a batch's tensors"""
    return frozenset(batch(Draw(0)))


def keywords_label(keywords: dict) -> str:
    """How a case names its keywords"""
    return ", ".join(f"{k}={'given' if x is ... else x}" for k, x in keywords.items())


def labels_of(name: str, preset: dict | None = None) -> list[str]:
    """All cases of a function; under a preset those without keywords of their own"""
    row = SPEC[name]
    if preset is not None:
        return [label for label in row.cases if not BATCHES.get(label, {}).keys() & {"clip_low", "empty_rows"}]
    return [*row.cases, *(f"{next(iter(row.cases))}, {keywords_label(k)}" for k in row.keywords)]


@dataclass
class Finding:
    """What came of one function."""

    function: str
    verdict: str                        # conforms, differs, no verdict, missing, cannot be judged; see check_conformance
    judged: int = 0                     # outputs and gradients with a verdict, over all cases
    unjudged: int = 0                   # and without
    stage: str = ""                     # the first one that differs, or the worst
    error: float = 0.0
    allowed: float = 0.0
    case: str = ""
    seed: int = 0
    said: str = ""                      # the mistake, or why there is no verdict
    lacking: str = ""                   # keywords that the candidate does not take; their cases are not judged


def judge(name: str, tried: list[tuple[Case, dict[str, Tensor]]], good: str) -> Finding:
    """The verdict on what a candidate gave for these cases"""
    rows = [(gap(found.get(stage), gold), case.allowed[stage], stage, case)
            for case, found in tried for stage, gold in case.gold.items()]
    sure = [row for row in rows if row[1] is not None]
    if not sure:
        return Finding(name, "no verdict", unjudged=len(rows), said="the plain formula itself is too inaccurate in this dtype")
    share = lambda row: row[0] / row[1] if row[1] else math.inf if row[0] else 0.0
    wrong = [row for row in sure if row[0] > row[1]]
    first = min((list(row[3].gold).index(row[2]) for row in wrong), default=0)  # stages are in order: a value before any gradient
    worst = max((row for row in wrong or sure if not wrong or list(row[3].gold)[first] == row[2]), key=share)
    error, allowed, stage, case = worst
    return Finding(name, "differs" if wrong else good, len(sure), len(rows) - len(sure), stage, error, allowed, case.label,
                   case.seed, mistake(name, tried) if wrong else "")


def spec_file():
    """test_hybrid_rl.py, which holds the near misses; raises UsageError where it, or pytest and hypothesis, are not there"""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        return importlib.import_module("test_hybrid_rl")
    except ImportError as error:
        raise UsageError(f"test_hybrid_rl.py, which holds the near misses, cannot be loaded ({error})") from None
    finally:
        sys.path.pop(0)


def try_candidate(candidate: Callable, cases: Iterable[Case]) -> tuple[list[tuple[Case, dict[str, Tensor]]], set[str]]:
    """Its outputs and gradients in each case that it takes, and what it does not take

    Not taken: a keyword that is not in its signature, or for which it raises NotImplementedError.  Raises UsageError where it
    cannot be called with the inputs of SPEC, or raises something else.
    """
    # CHOICE: a keyword that is not taken is said, not failed.  test_what_a_candidate_lacks_is_said_and_what_it_has_is_judged
    tried, lacking = [], set()
    for case in cases:
        positional = SPEC[case.function].inputs.split()
        keywords = {k: 0 for k in case.arguments if k not in positional}
        try:
            inspect.signature(candidate).bind(*positional, **keywords)
        except TypeError as error:
            if not keywords:
                raise UsageError(f"wrong signature: it is called with {', '.join(positional)} ({error})") from None
            lacking |= {k for k in keywords if k not in inspect.signature(candidate).parameters}
            continue
        except ValueError:              # a builtin has no signature to read
            pass
        try:
            tried.append((case, evaluate(candidate, SPEC[case.function], case.arguments, DTYPES[case.dtype])))
        except NotImplementedError:
            lacking.add(case.label)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise UsageError(f"raises {type(error).__name__} in case {case.label!r}, seed {case.seed}: {first}") from None
    return tried, lacking


def fits(wrong: Callable, tried: list[tuple[Case, dict[str, Tensor]]]) -> bool:
    """Does a wrong version give what the candidate gave, under the same allowance, in every case that it takes?

    The allowance grows by four roundings of the wrong version's own size; at least one case must tell it from the right one.
    """
    telling = False
    for case, found in tried:
        try:
            taken, _ = try_candidate(functools.partial(wrong, **case.preset), [case])
        except UsageError:              # it breaks down here, where the candidate does not
            return False
        for stage, allowed in case.allowed.items() if taken else ():
            given = taken[0][1].get(stage)
            if given is None:
                return False
            if allowed is not None and gap(found.get(stage), given) > allowed + rounding(case.dtype) * size_of(given):
                return False
            telling |= allowed is not None and gap(given, case.gold[stage]) > allowed
    return telling


def mistake(function: str, tried: list[tuple[Case, dict[str, Tensor]]]) -> str:
    """What a failing candidate does wrong, if exactly one near miss fits"""
    try:
        gallery = {name: row for name, row in spec_file().NEAR_MISSES.items() if row[0] == function}
    except UsageError as error:
        return f"no name for the mistake: {error}"
    found = [f"{name}: {line}" for name, (_, wrong, line) in gallery.items() if fits(wrong, tried)]
    none = " all cases; where two mistakes meet, one --case at a time may name each" if not found else ""
    return found[0] if len(found) == 1 else f"{len(found)} of {len(gallery)} known mistakes fit{none}" + "; ".join(["", *found])


@dataclass
class Report:
    """What came of all functions; `passed` only if each that was to be judged conforms."""

    findings: list[Finding]
    target: str = "TARGET"
    options: str = ""

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 differs, 2 cannot be judged"""
        verdicts = {finding.verdict for finding in self.findings}
        if "differs" in verdicts:
            return 1
        return 2 if not verdicts or verdicts & {"cannot be judged", "no verdict", "missing"} else 0

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    def __str__(self) -> str:
        width = max(len(f.verdict) for f in self.findings)
        lines = [f"{'function':24} {'verdict':{width}} {'worst error':>11} {'allowed':>9}  {'of':26} case"]
        for f in self.findings:
            line = f"{f.function:24} {f.verdict:{width}} "
            if f.judged:
                line += f"{f.error:11.2e} {f.allowed:9.2e}  {f.stage:26} {f.case!r}, seed {f.seed}"
                line += f" ({f.unjudged} of {f.judged + f.unjudged} without verdict)" if f.unjudged else ""
            line += f"; not judged: {f.lacking}" if f.lacking else ""
            lines.append(line + f.said * (f.verdict != "differs"))
            if f.verdict == "differs":
                lines += [f"    {f.said}", f"    again: python hybrid_rl.py check {self.target} --function {f.function} "
                                           f"--case {f.case!r} --seed {f.seed} --seeds 1{self.options}"]
        return "\n".join(lines)


def known(what: str, word: str, legal: Iterable[str]) -> str:
    """The word, if it is a legal one"""
    if word not in legal:
        raise UsageError(f"{what} {word}: must be one of {', '.join(legal)}{did_you_mean(word, legal)}")
    return word


def check_function(name: str, candidate: Callable, dtype: str, seeds: Sequence[int], preset: dict | None,
                   only: str | None) -> Finding:
    """One candidate, all its cases (or `only` one)"""
    labels = labels_of(name, preset)
    if only is not None and only not in labels:
        raise UsageError(f"case {only!r}: {name} has {', '.join(map(repr, labels))}")
    cases = (make_case(name, label, seed, dtype, preset) for seed in seeds for label in labels if only in (None, label))
    try:
        tried, lacking = try_candidate(candidate, cases)
    except UsageError as error:
        return Finding(name, "cannot be judged", said=str(error))
    if not tried:
        return Finding(name, "cannot be judged", said=f"takes no case: lacks {', '.join(sorted(lacking))}")
    finding = judge(name, tried, "conforms" if dtype == "float32" else "as accurate as the plain formula")
    return dataclasses.replace(finding, lacking="; ".join(sorted(lacking)))


def check_conformance(candidates, *, functions: Sequence[str] | None = None, dtype: torch.dtype = torch.float32,
                      seeds: Iterable[int] = range(3), conventions: str | Preset | None = None,
                      case: str | None = None) -> Report:
    """Judge candidates, a dict {name: callable} or a module, against the functions of SPEC whose names they bear.

    functions: which (default: all that the candidates have); conventions: a key of CONVENTIONS, or {function: keywords}: the
    reference takes them, the candidate is called without keywords; case: only this one.  bfloat16 and float16 say "as accurate as
    the plain formula" at best, since algebra is judged in float32.  Raises UsageError for other words, or nothing to judge.
    """
    has, seeds = candidates if isinstance(candidates, dict) else vars(candidates), list(seeds)
    presets = CONVENTIONS[known("convention", conventions, CONVENTIONS)] if isinstance(conventions, str) else conventions
    word = next((word for word, kind in DTYPES.items() if kind == dtype), None)
    if word is None:
        raise UsageError(f"dtype {dtype}: must be one of {', '.join(DTYPES)}; float64 is the yardstick itself")
    names = [known("function", name, SPEC) for name in functions or [name for name in (presets or SPEC) if name in has]]
    if not names:
        raise UsageError(f"nothing to judge: the candidate has none of {', '.join(presets or SPEC)}")
    preset_of = lambda name: None if presets is None else presets.get(name, {})
    return Report([check_function(name, has[name], word, seeds, preset_of(name), case) if name in has else
                   Finding(name, "missing", said="the candidate does not have it") for name in names])


FORMAT, SPEC_VERSION = "hybrid_rl vectors 1", "1"


def to_json(x):
    """A tensor as {shape, data}, row-major, NaN and infinities as words; numbers with all their 17 digits; the rest as it is"""
    number = lambda v: v if not isinstance(v, float) or math.isfinite(v) else str(v)
    if isinstance(x, Tensor):
        plain = x.double() if x.is_floating_point() else x.long()
        return {"shape": list(x.shape), "data": [number(v) for v in plain.flatten().tolist()]}
    if isinstance(x, dict):
        return {name: to_json(value) for name, value in x.items()}
    return [to_json(value) for value in x] if isinstance(x, tuple) else number(x)


def export_vectors(path: Path, seeds: Iterable[int] = range(1)) -> int:
    """Writes every case of SPEC in every dtype as JSON, for implementations in other languages; returns how many.

    inputs are numbers of the dtype; expected holds each output and each gradient of sum_i c_i value_i, c_i = 1 + (i mod 7) / 8,
    exact to float64; allowed is the largest |difference| that passes, null where nothing is judged.
    """
    cases = []
    for dtype, name, seed in itertools.product(DTYPES, SPEC, seeds):
        for label in labels_of(name):
            case = make_case(name, label, seed, dtype)
            expected = {stage: to_json(x) | {"allowed": case.allowed[stage]} for stage, x in case.gold.items()}
            cases.append({"id": f"{name} / {label} / {seed} / {dtype}", "function": name, "case": label, "seed": seed,
                          "dtype": dtype, "inputs": to_json(case.arguments), "expected": expected})
    write_json(path, {"format": FORMAT, "spec_version": SPEC_VERSION, "cases": cases})
    return len(cases)


def read_json(flag: str, path: str, key: str):
    """What a file of this format holds under key"""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {path}: cannot be read as JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or key not in found:
        raise UsageError(f"{flag} {path}: needs \"format\": \"{FORMAT}\" and \"{key}\"")
    return found[key]


def from_json(x: dict) -> Tensor:
    """A tensor of a results file"""
    return torch.tensor([float(v) for v in x["data"]], dtype=torch.float64).view(x["shape"])


def check_results(results: str, vectors: str) -> Report:
    """Judges what another language computed: {"format": ..., "results": {id: {stage: {"shape": [...], "data": [...]}}}}"""
    given, asked_all, tried = read_json("--results", results, "results"), read_json("--vectors", vectors, "cases"), {}
    for asked in asked_all:
        if asked["id"] not in given:
            continue
        try:
            case = make_case(asked["function"], asked["case"], asked["seed"], asked["dtype"])
            stale = any(gap(from_json(asked["expected"][stage]), x) > 1e-9 * (1 + size_of(x)) for stage, x in case.gold.items())
        except (KeyError, IndexError):
            stale = True
        if stale:
            raise UsageError(f"--vectors {vectors}: {asked['id']} is not what this hybrid_rl.py computes; export them again")
        try:
            found = {stage: from_json(x) for stage, x in given[asked["id"]].items()}
        except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise UsageError(f"--results {results}: {asked['id']}: needs shape and data for each output ({error})") from None
        tried.setdefault((asked["function"], asked["dtype"]), []).append((case, found))
    if not tried:
        raise UsageError(f"--results {results}: holds none of the cases of {vectors}")
    findings = [judge(name, rows, "conforms" if dtype == "float32" else "as accurate as the plain formula")
                for (name, dtype), rows in tried.items()]
    for finding, ((name, dtype), rows) in zip(findings, tried.items()):
        asked = sum((case["function"], case["dtype"]) == (name, dtype) for case in asked_all)
        finding.lacking = f"{asked - len(rows)} of its {asked} cases in {dtype}" if len(rows) < asked else ""
    return Report(findings, f"--results {results} --vectors {vectors}")


def load_candidates(target: str, functions: list[str]) -> dict:
    """TARGET = module, module:name or file.py[:name] to {name: callable}; a single callable takes the one name in --function"""
    where, _, attribute = target.partition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            sys.path.insert(0, os.getcwd())
            found = importlib.import_module(where)
        found = getattr(found, attribute) if attribute else found
    except Exception as error:          # whatever the import raises is theirs: said in one line
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{target}: cannot be imported ({type(error).__name__}: {first})") from None
    if isinstance(found, dict) or not callable(found):
        return found if isinstance(found, dict) else vars(found)
    name = functions[0] if len(functions) == 1 else attribute
    if name not in SPEC:
        raise UsageError(f"{target}: is one function; say which with --function NAME, one of {', '.join(SPEC)}")
    return {name: found}


# ---------------------------------------------------------------------------------------------------------------------
# 14  Command line.  What was asked for, is it possible, and what came of it?
# ---------------------------------------------------------------------------------------------------------------------


def results_table(result: dict) -> str:
    """Accuracy by difficulty before and after, with 95 % intervals, and all difficulties together"""
    rows = [(level, result["before"][level], result["after"][level]) for level in result["before"]]
    if len(rows) > 1:
        rows.append(("all", *(tuple(map(sum, zip(*result[when].values()))) for when in ("before", "after"))))
    lines = [f"{'difficulty':>10}  {'problems':>8}  {'before':^22}  {'after':^22}"]
    return "\n".join(lines + [f"{level:>10}  {b[1]:>8}  {share_cell(*b):>22}  {share_cell(*a):>22}" for level, b, a in rows])


def probe_report(folder: Path) -> str:
    """The mean kappa of a probe, and what the rule of thumb makes of it"""
    kappas = [line["kappa"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line["kappa"]]
    if not kappas:
        return ("No step had a reward gradient (no mixed group), so kappa has no value; easier prompts or a larger --group-size "
                "would give one.")
    mean, middle = sum(kappas) / len(kappas), sorted(kappas)[len(kappas) // 2]
    return (f"kappa = |g_R| / |g_D| of the naive mix: mean {mean:.4g}, median {middle:.4g}, "
            f"from {min(kappas):.4g} to {max(kappas):.4g} over {len(kappas)} steps\n"
            f"rule of thumb (over 5000 m3-select, over 1000 m3-soft, else hybrid is enough): {strategy_for(mean)}\n"
            "A heuristic of the paper's authors, found on other models and tasks: try the alternatives before you rely on it.")


def number(kind: type) -> Callable[[str], float]:
    """A parser of a flag's value whose complaint says what a number looks like"""
    def parse(text: str):
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}, for instance "
                                             f"{'8' if kind is int else '5e-4'}") from None
    return parse


class OneLineParser(argparse.ArgumentParser):
    """argparse whose complaint is one line, with exit code 2"""

    def error(self, message: str):
        word = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized arguments: "):
            near = did_you_mean(word, self._option_string_actions)
            message = (f"{message}{near}; --help lists the flags" if word.startswith("-") else f"unexpected {word!r}: a flag "
                       f"that is on or off takes no value, and the command is {self.prog.split()[-1]}")
        name = "hybrid_rl.py" if "hybrid_rl.py" in self.prog else self.prog
        print(f"{name}: error: {message.removeprefix('argument ')}", file=sys.stderr)
        raise SystemExit(2)


def check_parser() -> argparse.ArgumentParser:
    """The flags of check"""
    parser = OneLineParser(prog="python hybrid_rl.py check", allow_abbrev=False,
                           description="Judge another implementation, value and gradient.",
                           epilog="Exit code 0: all conform; 1: one differs; 2: cannot be judged.  Functions: " + ", ".join(SPEC))
    flag = parser.add_argument
    flag("target", nargs="?", metavar="TARGET", help="module, module:name or file.py; what bears a name of SPEC is judged")
    flag("--function", nargs="+", action="extend", default=[], metavar="NAME", help="only these; a missing one is exit code 2")
    flag("--dtype", choices=DTYPES, default="float32", help="of the inputs; float32 judges the algebra (default)")
    flag("--seed", type=number(int), default=0, metavar="N", help="the first seed (default: 0)")
    flag("--seeds", type=number(int), default=3, metavar="N", help="how many seeds (default: 3)")
    flag("--case", metavar="NAME", help="only this case")
    flag("--convention", choices=CONVENTIONS, help="judge as this library computes; the candidate gets no keywords")
    flag("--results", metavar="FILE", help="instead of TARGET: judge what another language answered to --vectors FILE")
    flag("--vectors", metavar="FILE", help="written by: python hybrid_rl.py vectors FILE")
    flag("--self-test", action="store_true", help="judge the judge: honest versions must pass, near misses be caught and named")
    flag("--trials", type=number(int), default=1000, metavar="N", help="of --self-test (default: 1000)")
    return parser


def check_command(words: list[str]) -> int:
    """python hybrid_rl.py check ...; returns the exit code"""
    given = check_parser().parse_args(words)
    if given.seeds < 1 or given.trials < 1:
        raise UsageError(f"--seeds {given.seeds}, --trials {given.trials}: must be >= 1")
    if given.self_test:
        return spec_file().self_test(given.trials, given.seed)
    if bool(given.target) == bool(given.results) or bool(given.results) != bool(given.vectors):
        raise UsageError("check: needs a TARGET (module, module:name or file.py), or --results FILE together with --vectors FILE")
    if given.results:
        report = check_results(given.results, given.vectors)
    else:
        report = check_conformance(
            load_candidates(given.target, given.function), functions=given.function or None, dtype=DTYPES[given.dtype],
            seeds=range(given.seed, given.seed + given.seeds), conventions=given.convention, case=given.case)
        report.target = given.target
        report.options = (f" --dtype {given.dtype}" if given.dtype != "float32" else "") + (
            f" --convention {given.convention}" if given.convention else "")
    print(report)
    return report.exit_code


def vectors_command(words: list[str]) -> int:
    """python hybrid_rl.py vectors FILE"""
    parser = OneLineParser(prog="python hybrid_rl.py vectors", allow_abbrev=False, description=export_vectors.__doc__)
    parser.add_argument("file", metavar="FILE", help="JSON file to write")
    try:
        path = Path(parser.parse_args(words).file)
        print(f"{export_vectors(path)} cases in {path}")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    return 0


TRAIN_HELP = """methods:
{methods}

other commands, each with its own --help: workflow (sparse to dense), check TARGET (the oracle), vectors FILE

A flag that the chosen method does not read is refused.  Exit code 2: something given cannot be used; 130, 143: stopped by a
signal, state saved."""
WORKFLOW_HELP = """stages:
{stages}

They learn on the first half of the prompts, held-out-rl on the second, direct-rl and *-all on all.  --lr and the other flags are
those of train, and the same in all stages that read them.  Exit codes as in train."""


def build_parser(kind: type[Config] = Config) -> OneLineParser:
    """The flags of train, or of workflow, from the fields of their settings"""
    methods = "\n".join(f"  {name:18} {row.summary}" for name, row in METHODS.items())
    stages = "\n".join(f"  {name:15} {stage.arm}: {METHODS[stage.method].summary}" for name, stage in STAGES.items())
    about = {Config: "Train a language model with one method on one task.  Without flags: RSTG, on the toy.",
             WorkflowConfig: "Reward for the teacher, the teacher for the student, reward for the student; and the controls."}
    parser = OneLineParser(prog="python hybrid_rl.py " + ("train" if kind is Config else "workflow"), allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter, description=about[kind],
                           epilog=(TRAIN_HELP if kind is Config else WORKFLOW_HELP).format(methods=methods, stages=stages))
    of_a_stage, read = ("method", "steps", "part", "plot"), {stage.method for stage in STAGES.values()}
    for field in dataclasses.fields(kind):
        legal, default, users = field.metadata["legal"], field.default, users_of(field)
        if kind is WorkflowConfig and (field.name in of_a_stage or not read & set(users)):
            continue
        text = field.metadata["help"] + (f"; {legal}" if isinstance(legal, str) and legal else "")
        text += f" [{', '.join(users)}]" if len(users) < len(METHODS) else ""
        if isinstance(default, bool):
            parser.add_argument(flag_of(field.name), action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        shown = Path(default).name if default and str(default).startswith(str(_TOY)) else default
        text += f" (default: {shown})" if shown not in ("", None) else ""
        of = float if field.type == float | None else field.type
        what = ("{" + ",".join(map(str, legal)) + "}" if isinstance(legal, tuple) and field.name != "method" else
                {int: "N", float: "X", str: "NAME"}[of])
        parser.add_argument(flag_of(field.name), type=str if of is str else number(of), default=argparse.SUPPRESS, metavar=what,
                            help=text.replace("%", "%%"))
    return parser


def settings_of(words: list[str]) -> Config:
    """The settings that a command line asks for; of workflow, if that is its first word"""
    kind = WorkflowConfig if words[:1] == ["workflow"] else Config
    given = vars(build_parser(kind).parse_args(words[kind is WorkflowConfig:]))
    if given.get("probe"):
        if "steps" in given:
            raise UsageError(f"--steps {given['steps']}: --probe {given['probe']} says already how many steps to take; leave one "
                             "out")
        given = {"method": "hybrid", "eval_problems": 0, "save_every": 0} | given | {"steps": given["probe"], "diagnose": True}
    if given.get("resume") and given.get("out"):        # what is not given is as it was
        given = saved_settings(Path(given["out"]), kind) | given
    return kind(**given)


def report(config: Config, result: dict) -> None:
    """Prints what came of a run, and draws it where that was asked for"""
    if config.plot:
        from toy_tasks.plot import plot_run
        plot_run(Path(result["folder"]), config.plot)
    if config.probe:
        print(f"\n{probe_report(Path(result['folder']))}")
    if result["after"]:
        print(f"\n{config.method} on {result['run'].task.name}, {config.steps} steps, held-out problems, temperature "
              f"{config.temperature:g}, 95 % intervals\n\n{results_table(result)}")
    print(f"\nThe model, its metrics and its settings are in {result['folder']}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        words = words[1:]
    try:
        if words[:1] in (["check"], ["vectors"]):
            return {"check": check_command, "vectors": vectors_command}[words[0]](words[1:])
        config = settings_of(words)
        if isinstance(config, WorkflowConfig):
            workflow(config)
        else:
            report(config, train(config))
        return 0
    except UsageError as error:
        print(f"hybrid_rl.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:           # outside the steps, where nothing is there to be saved
        print("hybrid_rl.py: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:             # whoever read our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FloatingPointError, OSError) as error:
        print(f"hybrid_rl.py: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
