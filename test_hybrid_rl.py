"""The specification of hybrid_rl.py: pencil examples, theorems by exact enumeration, plain-Python twins, edges, near misses.

A test's name is its claim; `pytest -v` reads as the list of claims.  Order follows the module's sections.  Twins are loops over
Python floats, written from the equations.  A near miss is a wrong version that people have shipped: the spec must tell it apart.
Everything is float64 unless precision is the subject; "equal" then means 1e-9, a million roundings of a term of size 1.
"""

import copy
import dataclasses
import doctest
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import zlib
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import hybrid_rl as H
import toy_tasks
import toy_tasks.show
from toy_tasks import claims

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("ci")
torch.set_num_threads(1)

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
HOWS = ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm")
SCALES, BASELINES = ("group_std", "batch_std", "none"), ("mean", "leave_one_out")
SEEDS, ROWS, LENGTHS = st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6)


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


def leaf(rows) -> torch.Tensor:
    return (rows.detach().clone() if isinstance(rows, torch.Tensor) else tensor(rows)).requires_grad_()


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def randint(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def ragged(seed: int, rows: int, length: int, shortest: int = 0) -> torch.Tensor:
    """A mask of rows with random lengths between shortest and length."""
    return torch.arange(length) < (shortest + randint(seed, length + 1 - shortest, rows, 1))


def logp_like(seed: int, rows: int, length: int) -> torch.Tensor:
    return -randn(seed, rows, length).abs() - 0.05


def grad(value: torch.Tensor, *inputs: torch.Tensor):
    """Gradient of a scalar; zeros where it does not depend on an input."""
    found = torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]
    return found[0] if len(found) == 1 else found


def same(actual, expected, what: str, tol: float = 1e-9):
    actual, expected = (torch.as_tensor(x, dtype=F64).detach() for x in (actual, expected))
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    assert torch.allclose(actual, expected, rtol=tol, atol=tol), f"{what}: expected {expected.tolist()}, got {actual.tolist()}"


def bit_equal(actual: torch.Tensor, expected: torch.Tensor, what: str):
    assert torch.equal(actual, expected), f"{what}: expected exactly {expected.tolist()}, got {actual.tolist()}"


def differs(actual, other, what: str, by: float = 1e-3):
    gap = (torch.as_tensor(actual, dtype=F64) - torch.as_tensor(other, dtype=F64)).abs().max().item()
    assert gap > by, f"{what}: expected a difference above {by}, got {gap}"


def refuses(named: str, function, *args, **kwargs):
    """The call raises ValueError and the message names what was given."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert named in str(caught.value), f"expected a message that names {named!r}, got {caught.value}"


NEAR_MISSES: dict[str, tuple] = {}      # name: (public function, wrong version, what it is and where it has been seen)
MISSED_AT: dict[str, str] = {}          # name: what the label of a case of SPEC, on which it must show, contains


def near_miss(function: str, seen: str, case: str = ""):
    """Enter a wrong version of a public function; its signature holds the keywords that it honours."""
    def enter(wrong):
        NEAR_MISSES[wrong.__name__], MISSED_AT[wrong.__name__] = (function, wrong, seen), case
        return wrong
    return enter


def only(defined: bool):
    """A wrong version that differs from the right one under one word alone says so, and is not held against the others."""
    if not defined:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------------------
# 2  Masks, sums, log-probs
# ---------------------------------------------------------------------------------------------------------------------


def twin_softmax(z: list, temperature: float = 1.0) -> list:
    top = max(z)
    e = [math.exp((x - top) / temperature) for x in z]
    return [x / math.fsum(e) for x in e]


def twin_kl(a: list, b: list) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(a, b) if p > 0)


def twin_weights(mask: list, how: str, length=None, empty_rows: str = "skip") -> list:
    counts = [sum(row) for row in mask]
    rows = sum(1 for n in counts if n > 0) if empty_rows == "skip" else len(mask)
    out = []
    for row, n in zip(mask, counts):
        one = {"seq_mean_token_mean": rows * n, "token_mean": sum(counts), "seq_mean_token_sum_norm": rows * (length or 0)}[how]
        out.append([1.0 / one if live else 0.0 for live in row])
    return out


def twin_mean(terms: list, mask: list, how: str, length=None, empty_rows: str = "skip") -> float:
    weights = twin_weights(mask, how, length, empty_rows)
    return math.fsum(w * x for ws, xs in zip(weights, terms) for w, x in zip(ws, xs) if w)


def test_the_end_token_is_trained_and_the_padding_after_it_is_not():
    mask = H.action_mask(torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9]]), 2)     # eos = pad = 2
    assert mask.tolist() == [[True, True, True, False, False], [True] * 5], f"expected the first eos kept, got {mask}"
    assert mask.sum() == 8, f"expected 8 tokens (7 = every eos dropped), got {mask.sum()}"


def test_any_of_several_end_ids_ends_a_row():
    mask = H.action_mask(torch.tensor([[5, 3, 2, 9], [2, 3, 5, 5], [7, 7, 7, 3]]), [2, 3])
    assert mask.sum(dim=1).tolist() == [2, 1, 4], f"expected the row to end at its first 2 or 3, got {mask}"


@given(SEEDS, ROWS, LENGTHS)
def test_action_mask_and_truncated_equal_their_loops(seed, rows, length):
    ids = randint(seed, 4, rows, length)
    mask, cut = H.action_mask(ids, [0, 3]), H.truncated(ids, [0, 3])
    for b, row in enumerate(ids.tolist()):
        ended = False
        for t, token in enumerate(row):
            assert mask[b, t].item() == (not ended), f"expected mask[{b},{t}] = {not ended} in {row}"
            ended = ended or token in (0, 3)
        assert cut[b].item() == (not ended), f"expected truncated[{b}] = {not ended} in {row}"


def test_a_row_is_truncated_only_if_it_never_ended():
    cut = H.truncated(torch.tensor([[5, 6, 2], [5, 6, 7], [2, 7, 7]]), 2)
    assert cut.tolist() == [False, True, False], f"expected only the row without an eos, got {cut}"
    assert H.truncated(torch.tensor([[5, 3]]), (2, 3)).tolist() == [False], "expected 3 to count as an end"


def test_truncated_rows_leave_numerator_and_denominator():
    terms, ids = leaf([[2, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1]]), torch.tensor([[5, 5, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5]])
    mask = H.action_mask(ids, 2)
    kept = mask & ~H.truncated(ids, 2)[:, None]
    loss = H.aggregate(terms, kept, "token_mean")
    same(loss, 2.0, "with exclusion 6/3 (0.667 = the 6/9 that keeps the divisor)")
    same(grad(loss, terms), tensor([[1 / 3] * 3 + [0] * 3, [0] * 6]), "gradient with exclusion")
    same(H.aggregate(terms, mask, "token_mean"), 12 / 9, "without exclusion")


@pytest.mark.parametrize("how", HOWS)
def test_nothing_to_score_is_exactly_zero_with_a_graph(how):
    terms = leaf([[-1.0, -INF, 3.0]])
    for empty_rows in ("skip", "count"):
        loss = H.aggregate(terms, torch.zeros(1, 3, dtype=torch.bool), how, 4, empty_rows)
        assert loss.item() == 0 and loss.requires_grad, f"expected exactly 0 with a graph, got {loss}"
        bit_equal(grad(loss, terms), torch.zeros(1, 3, dtype=F64), "gradient of nothing")


def test_an_empty_row_does_not_spoil_its_neighbour():
    terms, mask = leaf([[NAN, INF], [1.0, 3.0]]), torch.tensor([[False, False], [True, True]])
    skip, count = (H.aggregate(terms, mask, "seq_mean_token_mean", empty_rows=word) for word in ("skip", "count"))
    same(skip, 2.0, "empty rows skipped")
    same(count, 1.0, "empty rows counted")
    same(grad(skip, terms), tensor([[0, 0], [0.5, 0.5]]), "gradient, skipped")
    same(grad(count, terms), tensor([[0, 0], [0.25, 0.25]]), "gradient, counted")


def test_the_score_of_an_id_is_read_one_position_before_it():
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    logits = F.one_hot(ids + 1, 16).double() * 10        # a stub that always predicts id + 1
    logp = H.token_logps(logits, ids)
    assert logp.shape == (1, 4), f"expected one score for every id but the first, got {tuple(logp.shape)}"
    same(logp, torch.full((1, 4), -0.00068), "score per token", tol=1e-5)
    for wrong in (logps_shifted_twice, logps_not_shifted):
        same(wrong(logits, ids), torch.full((1, 4), -10.00068), f"the wrong number of {wrong.__name__}", tol=1e-5)


def test_exactly_the_logits_before_the_completion_are_read():
    ids, logits = torch.tensor([[0, 0, 5, 6, 7, 8, 2]]), leaf(randn(0, 1, 7, 10))    # prompt 0 0 5 6, completion 7 8 2
    score = lambda z: H.token_logps(z, ids)[:, 3:]
    rows = grad(score(logits).sum(), logits).abs().sum(dim=-1)[0]
    assert (rows > 0).tolist() == [False] * 3 + [True] * 3 + [False], f"expected positions 3, 4, 5 to be read, got {rows}"
    loud = logits.detach().clone()
    loud[:, [0, 1, 2, 6]] += 1e4 * randn(1, 1, 4, 10)
    bit_equal(score(loud), score(logits).detach(), "huge values at 0, 1, 2 and 6")
    loud[:, 3] += randn(2, 1, 10)
    differs(score(loud), score(logits), "another logit at 3")


@given(SEEDS, ROWS, LENGTHS, st.integers(1, 5), st.sampled_from([0.5, 1.0, 1.7]))
def test_token_logps_and_entropy_equal_their_loops(seed, rows, length, vocab, temperature):
    logits, ids = leaf(3 * randn(seed, rows, length + 1, vocab)), randint(seed, vocab, rows, length + 1)
    logp, entropy = H.token_logps(logits, ids, temperature), H.token_entropy(logits, temperature)
    g_logp, g_entropy = grad(logp.sum(), logits), grad(entropy.sum(), logits)
    for b, t in itertools.product(range(rows), range(length + 1)):
        p = twin_softmax(logits[b, t].tolist(), temperature)
        h = -math.fsum(x * math.log(x) for x in p)
        same(entropy[b, t], h, "entropy")
        same(g_entropy[b, t], tensor([-x * (math.log(x) + h) / temperature for x in p]), "gradient of entropy")
        if t < length:
            y = ids[b, t + 1].item()
            same(logp[b, t], math.log(p[y]), "log-prob")
            same(g_logp[b, t], tensor([((v == y) - x) / temperature for v, x in enumerate(p)]), "gradient e_y - p")
        else:
            same(g_logp[b, t], torch.zeros(vocab), "gradient at the last position")


def test_a_logit_of_minus_infinity_adds_nothing_to_entropy_or_gradient():
    full, short = leaf([[[1.0, -INF, 0.3]]]), leaf([[[1.0, 0.3]]])
    h_full, h_short = H.token_entropy(full), H.token_entropy(short)
    same(h_full, h_short, "entropy without the impossible token")
    same(h_short, tensor([[-math.fsum(p * math.log(p) for p in twin_softmax([1.0, 0.3]))]]), "at a temperature of 1 unless told")
    same(grad(h_full.sum(), full)[..., [0, 2]], grad(h_short.sum(), short), "gradient of the possible ones")
    assert grad(h_full.sum(), full)[0, 0, 1] == 0, "expected gradient 0 at the impossible token"
    logp = H.token_logps(full.expand(1, 2, 3), torch.tensor([[0, 2]]))
    assert logp.isfinite().all() and grad(logp.sum(), full).isfinite().all(), "expected finite log-probs and gradient"


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_low_precision_logits_are_scored_in_float32(dtype):
    logits, ids = (4 * randn(3, 2, 5, 1000)).to(dtype), randint(4, 1000, 2, 5)
    logp, entropy = H.token_logps(logits, ids), H.token_entropy(logits)
    assert logp.dtype == entropy.dtype == torch.float32, f"expected float32, got {logp.dtype} and {entropy.dtype}"
    same(logp, H.token_logps(logits.double(), ids), "float64 of the same numbers, up to 10 roundings of a term of 20", tol=2e-6)
    same(entropy, H.token_entropy(logits.double()), "entropy likewise", tol=2e-6)
    assert H.token_logps(logits.double(), ids).dtype == F64, "expected float64 to stay"
    ones = torch.ones(1, 4097, dtype=dtype)
    assert H.weighted_sum(ones, ones).item() == 4097, f"expected an exact sum of {dtype}"
    third = H.weighted_sum(ones[:, :3], torch.full((1, 3), 1 / 3, dtype=F64))
    same(third, 1.0, "three thirds: the weights are not rounded to the terms' precision", tol=1e-6)
    assert third.dtype == torch.float32, f"expected float64 weights to widen no loss, got {third.dtype}"


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS), st.sampled_from(["skip", "count"]))
def test_every_mean_equals_its_loop_in_value_and_gradient(seed, rows, length, how, empty_rows):
    terms, mask = leaf(randn(seed, rows, length)), ragged(seed + 1, rows, length)
    loss, weights = H.aggregate(terms, mask, how, 7, empty_rows), twin_weights(mask.tolist(), how, 7, empty_rows)
    same(loss, twin_mean(terms.tolist(), mask.tolist(), how, 7, empty_rows), f"mean {how}, {empty_rows}")
    same(grad(loss, terms), tensor(weights), f"gradient of {how}, {empty_rows}")
    same(H.token_weights(mask, how, 7, empty_rows), tensor(weights), "token_weights")


def test_weights_are_float64_whatever_the_divisor():
    one, many = torch.ones(1, 1, dtype=torch.bool), torch.ones(4097, 4097, dtype=torch.bool)
    same(H.token_weights(one, HOWS[2], 7.3), tensor([[1 / 7.3]]), "one over a length that is no whole number", tol=1e-14)
    same(H.token_weights(one, HOWS[2], 0.25), tensor([[4.0]]), "one over a length below one", tol=1e-14)
    same(H.token_weights(many, "token_mean")[:1, :1] * 4097**2, tensor([[1.0]]), "one over more than 2^24 tokens", tol=1e-14)


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS[:2]))
def test_weights_of_a_mean_add_up_to_one(seed, rows, length, how):
    mask = ragged(seed, rows, length)
    same(H.token_weights(mask, how).sum(), float(mask.any()), f"sum of the weights of {how}")
    assert (H.token_weights(mask, how)[~mask] == 0).all(), "expected weight 0 outside the mask"


@pytest.mark.parametrize("split", ([3], [1, 2], [2, 1], [1, 1, 1]))
def test_token_mean_is_two_and_a_half_for_every_split(split):
    mask = torch.arange(4) < torch.tensor([[4], [1], [1]])
    terms = leaf(mask * tensor([[1], [4], [7]]))
    weights = H.token_weights(mask, "token_mean")
    total = sum(H.weighted_sum(x, w) for x, w in zip(terms.split(split), weights.split(split)))
    same(total, 2.5, "15/6 (3.25, 4.0 = mean of means, .833 = divided twice)")
    same(grad(total, terms), mask.double() / 6, "gradient")
    same(mean_of_means(terms, mask, "token_mean"), 4.0, "the wrong one, three micro-batches averaged")
    two = [H.aggregate(x, m, "token_mean") for x, m in zip(terms.split([1, 2]), mask.split([1, 2]))]
    same(sum(two) / 2, 3.25, "the wrong one, two micro-batches averaged")


@given(SEEDS, st.integers(2, 6), LENGTHS, st.sampled_from(HOWS), st.sampled_from(["skip", "count"]), st.data())
def test_any_split_into_micro_batches_has_the_same_gradient(seed, rows, length, how, empty_rows, data):
    logits, mask, ids = leaf(randn(seed, rows, length + 1, 4)), ragged(seed, rows, length), randint(seed, 4, rows, length + 1)
    mask[0] = False                                      # a row with nothing to score
    weights = H.token_weights(mask, how, 5, empty_rows)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(1, rows - 1), max_size=3))})
    whole = H.weighted_sum(-H.token_logps(logits, ids), weights)
    parts = [H.weighted_sum(-H.token_logps(logits[i:j], ids[i:j]), weights[i:j]) for i, j in zip(cuts, cuts[1:])]
    same(sum(parts), whole, f"value, split at {cuts}")
    same(sum(grad(part, logits) for part in parts), grad(whole, logits), f"gradient, split at {cuts}")


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS), st.sampled_from([NAN, INF, -INF]))
def test_garbage_under_a_weight_of_zero_reaches_nothing(seed, rows, length, how, garbage):
    mask, clean = ragged(seed, rows, length), randn(seed, rows, length)
    dirty = leaf(clean.masked_fill(~mask, garbage))
    loss = H.aggregate(dirty, mask, how, 3)
    bit_equal(loss.detach(), H.aggregate(clean, mask, how, 3), f"value beside {garbage}")
    bit_equal(grad(loss, dirty), H.token_weights(mask, how, 3), f"gradient beside {garbage}")


def test_a_live_nan_is_not_hidden():
    assert H.weighted_sum(tensor([[NAN, 1.0]]), tensor([[0.5, 0.5]])).isnan(), "expected NaN at a token of weight 0.5 to show"


def test_section_2_refuses_with_the_value_named():
    mask, x = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    refuses("'mean'", H.token_weights, mask, "mean")
    refuses("'drop'", H.token_weights, mask, "token_mean", empty_rows="drop")
    refuses("None", H.token_weights, mask, HOWS[2])
    refuses("0", H.token_weights, mask, HOWS[2], 0)
    refuses("-4", H.aggregate, x, mask, HOWS[2], -4)
    refuses("terms (2, 4), mask (2, 3)", H.aggregate, torch.zeros(2, 4), mask, "token_mean")
    refuses("(1, 3)", H.weighted_sum, x, torch.zeros(1, 3))
    refuses("(2, 5)", H.token_logps, torch.zeros(2, 4, 7), torch.zeros(2, 5, dtype=torch.long))
    refuses("b (3,)", H.same_shape, a=torch.zeros(2), b=torch.zeros(3))


@near_miss("action_mask", "drops every eos, since pad is the same id: trl#4970, trl#6357")
def mask_from_pad_id(completion_ids, eos_ids):
    return completion_ids != eos_ids


@near_miss("action_mask", "stops before the eos, which is then never trained: trl#6357")
def mask_without_eos(completion_ids, eos_ids):
    return torch.isin(completion_ids, torch.as_tensor(eos_ids)).cumsum(dim=1) == 0


@near_miss("truncated", "asks whether the last id is the eos: a short row padded with another id counts as cut off")
def truncated_by_last_id(completion_ids, eos_ids):
    return completion_ids[:, -1] != eos_ids


@near_miss("token_weights", "the mean over tokens inside a row, but the sum over rows: grows with the batch")
def weights_summed_over_rows(mask, how, length=None, empty_rows="skip"):
    only(how == HOWS[0])
    return mask.double() / mask.sum(1, keepdim=True).clamp(min=1)


@near_miss("token_logps", "shifted twice, as when the labels were shifted already: OpenRLHF#973")
def logps_shifted_twice(logits, ids, temperature=1.0):
    logp = (logits[:, :-1] / temperature).log_softmax(-1)
    return logp.gather(-1, ids.roll(-2, 1)[:, :-1, None]).squeeze(-1)


@near_miss("token_logps", "not shifted: the logits at t score the id at t: transformers#47394")
def logps_not_shifted(logits, ids, temperature=1.0):
    return (logits / temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)[:, 1:]


@near_miss("token_logps", "the sampling temperature is left out of the loss: the ratio is not 1 on fresh samples")
def logps_without_temperature(logits, ids, temperature=1.0):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@near_miss("token_logps", "log of a softmax in bfloat16: no digits are left of a small probability")
def logps_in_bfloat16(logits, ids, temperature=1.0):
    return logits[:, :-1].bfloat16().div(temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).double()


@near_miss("token_entropy", "0 * -inf at an impossible token is NaN")
def entropy_of_a_product(logits, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


@near_miss("weighted_sum", "multiplies instead of filling: one padded NaN is the loss of the batch: verl#785")
def sum_by_product(terms, weights):
    return (terms * weights).sum()


@near_miss("aggregate", "truncated or padded tokens stay in the divisor: trl#6369", "how=token_mean")
def mean_over_all_columns(terms, mask, how, length=None, empty_rows="skip"):
    only(how == HOWS[1])
    return terms.masked_fill(~mask, 0.0).mean()


@near_miss("aggregate", "mean of the means of micro-batches of one row: verl#7200, open-instruct#1161", "how=token_mean")
def mean_of_means(terms, mask, how, length=None, empty_rows="skip"):
    only(how == HOWS[1])
    rows = [x[m].mean() for x, m in zip(terms, mask) if m.any()]
    return torch.stack(rows).mean() if rows else terms.masked_fill(~mask, 0.0).sum()


@near_miss("aggregate", "divides by the divisor twice: ms-swift#10117", "how=token_mean")
def mean_divided_twice(terms, mask, how, length=None, empty_rows="skip"):
    only(how == HOWS[1])
    n = mask.sum().clamp(min=1)
    return terms.masked_fill(~mask, 0.0).sum() / n / n


@near_miss("aggregate", "Dr. GRPO's constant is replaced by the longest row of the batch, which changes with the split", "norm")
def norm_by_longest_row(terms, mask, how, length=None, empty_rows="skip"):
    only(how == HOWS[2])
    weights = tensor(twin_weights(mask.tolist(), how, max(1, mask.sum(dim=1).max().item()), empty_rows))
    return (terms.masked_fill(~mask, 0.0) * weights).sum()


# ---------------------------------------------------------------------------------------------------------------------
# 3  Advantages
# ---------------------------------------------------------------------------------------------------------------------


def twin_advantages(rewards: list, scale: str, ddof: int, eps: float, baseline: str) -> list:
    def std(values):
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - ddof))
    every, out = [x for row in rewards for x in row], []
    for row in rewards:
        divisor = {"group_std": std(row) + eps, "batch_std": std(every) + eps, "none": 1.0}[scale]
        line = []
        for g, r in enumerate(row):
            others = row[:g] + row[g + 1:] if baseline == "leave_one_out" else row
            line.append(0.0 if min(row) == max(row) else (r - math.fsum(others) / len(others)) / divisor)
        out.append(line)
    return out


def test_a_completion_is_compared_with_its_own_group():
    rewards = tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
    plain = tensor([[3] + [-1] * 3, [1] * 3 + [-3]]) / (3 ** 0.5 + 4e-4)
    same(H.group_advantages(rewards), plain, "1.7317 and 0.5772: ddof 0, eps 1e-4")
    same(H.group_advantages(rewards, ddof=1), tensor([[1.4997] + [-0.4999] * 3, [0.4999] * 3 + [-1.4997]]), "ddof 1", tol=1e-4)
    same(advantages_over_the_batch(rewards).abs(), torch.full((2, 4), 0.9998), "the wrong one, over the batch", tol=1e-4)
    same(advantages_over_the_batch(rewards, ddof=1).abs(), torch.full((2, 4), 0.9352), "likewise, ddof 1", tol=1e-4)
    differs(H.group_advantages(rewards), advantages_over_the_batch(rewards), "over the batch", by=0.4)


def test_a_batch_std_is_another_choice_and_gives_other_numbers():
    rewards = tensor([[1, 0, 0, 0], [1, 1, 0, 0]])
    same(H.group_advantages(rewards), tensor([[1.7317] + [-0.5772] * 3, [0.9998] * 2 + [-0.9998] * 2]), "group_std", tol=1e-4)
    same(H.group_advantages(rewards, scale="batch_std"), tensor([[1.5489] + [-0.5163] * 3, [1.0326] * 2 + [-1.0326] * 2]),
         "batch_std", tol=1e-4)


@pytest.mark.parametrize("value, size", list(itertools.product((0.1, 0.2, 0.7, 1 / 3), (2, 7, 8, 16))))
def test_equal_rewards_have_exactly_zero_advantage(value, size):
    dtypes = (torch.float32, torch.bfloat16, F64)
    for dtype, scale, ddof, eps, baseline in itertools.product(dtypes, SCALES, (0, 1), (0.0, 1e-6), BASELINES):
        rewards = torch.full((2, size), value, dtype=dtype)
        rewards[1, 0], rewards[1, 1] = 0.95, 0.05        # so the equal ones are neither the best nor the worst of the batch
        a = H.group_advantages(rewards, scale=scale, ddof=ddof, eps=eps, baseline=baseline)
        assert (a[0] == 0).all() and a.isfinite().all(), f"expected 0 for {size} rewards of {value}, {dtype}, got {a[0]}"
        assert a[1, 0] > 0, f"expected the one better reward above 0, got {a[1]}"


def test_leave_one_out_keeps_the_std_of_the_full_group():
    rewards = torch.tensor([[0.35] * 7 + [0.95]])        # float32
    plain = H.group_advantages(rewards, scale="none", baseline="leave_one_out")
    scaled = H.group_advantages(rewards, baseline="leave_one_out")
    same(plain[0, -1], 0.6, "0.95 - mean of the seven others", tol=1e-6)
    same(scaled[0, -1], 3.0222, "over the group's std (about 3,500 = over the std of the seven equal others)", tol=1e-4)
    same(plain[0, :7], torch.full((7,), -0.6 / 7), "0.35 - mean of the others", tol=1e-6)


@given(SEEDS, st.integers(1, 4), st.integers(2, 6), st.sampled_from(["group_std", "batch_std", "none"]), st.sampled_from([0, 1]),
       st.sampled_from([0.0, 1e-4, 0.1]), st.sampled_from(["mean", "leave_one_out"]), st.booleans())
def test_group_advantages_equal_their_loop(seed, groups, size, scale, ddof, eps, baseline, binary):
    rewards = (randint(seed, 2, groups, size).double() if binary else randn(seed, groups, size))
    rewards[0, 0] = rewards[0, 1] + 1                    # at least one group has a spread, so eps 0 is allowed
    a = H.group_advantages(rewards, scale=scale, ddof=ddof, eps=eps, baseline=baseline)
    same(a, tensor(twin_advantages(rewards.tolist(), scale, ddof, eps, baseline)), f"advantages {scale} {ddof} {eps} {baseline}")


@given(SEEDS, st.integers(2, 8), st.floats(0.1, 50), st.floats(-5, 5))
def test_advantages_ignore_the_scale_and_zero_of_the_reward(seed, size, factor, shift):
    rewards = randn(seed, 3, size)
    plain, moved = (H.group_advantages(r, eps=0.0) for r in (rewards, factor * rewards + shift))
    same(moved, plain, "after r -> c r + b", tol=1e-7)
    same(H.group_advantages(rewards).sum(dim=1), torch.zeros(3), "sum over a group")


def test_advantages_are_detached_and_accept_whole_numbers():
    rewards = leaf([[1, 0, 0, 0]])
    assert not H.group_advantages(rewards).requires_grad, "expected no graph behind an advantage"
    same(H.group_advantages(torch.tensor([[1, 0, 0, 0]])), H.group_advantages(rewards), "integer rewards", tol=1e-6)


@pytest.mark.parametrize("keyword", ({"ddof": 1}, {"eps": 0.1}, {"baseline": "leave_one_out"}, {"scale": "none"},
                                     {"scale": "batch_std"}), ids=str)
def test_every_keyword_of_the_advantage_matters(keyword):
    rewards = tensor([[1, 0, 0, 0], [0.5, 0.25, 0, 0]])
    differs(H.group_advantages(rewards, **keyword), H.group_advantages(rewards), str(keyword))


def test_section_3_refuses_with_the_value_named():
    good = tensor([[1, 0]])
    for bad in (tensor([[1], [0]]), tensor([1, 0]), tensor([[[1, 0]]])):
        refuses(str(tuple(bad.shape)), H.group_advantages, bad)
    refuses("2 or more", H.group_advantages, tensor([[1]]))
    refuses("'std'", H.group_advantages, good, scale="std")
    refuses("'median'", H.group_advantages, good, baseline="median")
    refuses("2", H.group_advantages, good, ddof=2)
    refuses("NaN", H.group_advantages, tensor([[1, NAN]]))
    refuses("inf", H.group_advantages, tensor([[1, INF]]))


@near_miss("group_advantages", "compares with the whole batch instead of the group: grpo-flat#2")
def advantages_over_the_batch(rewards, *, ddof=0, eps=1e-4):
    return (rewards - rewards.mean()) / (rewards.std(correction=ddof) + eps)


@near_miss("group_advantages", "the batch's std for the group's: hidden where all groups have one spread: trl#5902")
def advantages_over_the_batch_std(rewards, *, ddof=0, eps=1e-4):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(correction=ddof) + eps)


@near_miss("group_advantages", "asks `std == 0`: eight float32 rewards of 0.2 have 1.5e-8: verl#4598, NeMo-RL#4161", "all equal")
def advantages_without_exact_zero(rewards, *, ddof=0, eps=1e-4):
    std = rewards.std(1, keepdim=True, correction=ddof)
    return ((rewards - rewards.mean(1, keepdim=True)) / (std + eps)).masked_fill(std == 0, 0.0)


@near_miss("group_advantages", "eps inside the root", "eps=0.1")
def advantages_with_eps_in_the_root(rewards, *, ddof=0, eps=1e-4):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.var(1, keepdim=True, correction=ddof) + eps).sqrt()


@near_miss("group_advantages", "divides by G - 1 although ddof 0 was asked for: TRL's and verl's default")
def advantages_with_sample_std(rewards, *, eps=1e-4):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + eps)


@near_miss("group_advantages", "leave-one-out std by moments in float32: explodes where the others agree: NeMo-RL#4161", "leave_one_out")
def advantages_leave_one_out_std(rewards, *, eps=1e-4, baseline="mean"):
    only(baseline == "leave_one_out")
    n = rewards.shape[1] - 1
    mean = (rewards.sum(1, keepdim=True) - rewards) / n
    square = (rewards.square().sum(1, keepdim=True) - rewards.square()) / n
    return (rewards - mean) / ((square - mean.square()).clamp(min=0).sqrt() + eps)


# ---------------------------------------------------------------------------------------------------------------------
# 4  GRPO
# ---------------------------------------------------------------------------------------------------------------------


def twin_policy_term(log_ratio: float, a: float, low: float, high: float, dual=None) -> tuple:
    """The term and its derivative with respect to the log-ratio."""
    rho = math.exp(log_ratio)
    clipped = min(max(rho, 1 - low), 1 + high)
    term, slope = (-rho * a, -rho * a) if rho * a <= clipped * a else (-clipped * a, 0.0)
    return (-dual * a, 0.0) if dual is not None and a < 0 and term > -dual * a else (term, slope)


def twin_kl_term(d: float, kind: str, gradient: str) -> tuple:
    """The estimator at d = logp_ref - logp and its derivative with respect to logp."""
    value, slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - d - 1, 1 - math.exp(d))}[kind]
    return value, slope + value * (gradient == "ratio")


def twin_grpo(logp, logp_old, advantages, mask, how, length, empty_rows, low, high, dual, level, logp_ref, coef, kind, gradient):
    weights, value, slopes = twin_weights(mask, how, length, empty_rows), 0.0, [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        live = [t for t, on in enumerate(row) if on]
        for t in live:
            mean = math.fsum(logp[b][u] - logp_old[b][u] for u in live) / len(live)
            log_ratio = mean if level == "sequence" else logp[b][t] - logp_old[b][t]
            term, slope = twin_policy_term(log_ratio, advantages[b][t], low, high, dual)
            for u in live if level == "sequence" else [t]:
                slopes[b][u] += weights[b][t] * slope / (len(live) if level == "sequence" else 1)
            k, dk = twin_kl_term(logp_ref[b][t] - logp[b][t], kind, gradient)
            value += weights[b][t] * (term + coef * k)
            slopes[b][t] += weights[b][t] * coef * dk
    return value, slopes


@pytest.mark.parametrize("ratio, a, loss, slope", [(1.5, 1, -1.2, 0), (1.5, -1, 1.5, 1), (0.5, 1, -0.5, -1), (0.5, -1, 0.8, 0)])
def test_the_clip_stops_a_step_that_went_far_enough_and_no_other(ratio, a, loss, slope):
    logp = leaf([[math.log(ratio)]])
    term = H.policy_terms(logp, tensor([[0]]), tensor([[a]]))
    same(term, tensor([[loss]]), f"loss at ratio {ratio}, A {a}")
    same(grad(term.sum(), logp) / ratio, tensor([[slope]]), f"dloss/dratio at ratio {ratio}, A {a}")


def test_clip_higher_leaves_more_room_above_and_none_below():
    logp, old, a = leaf([[math.log(1.25), math.log(1.3), math.log(0.7)]]), torch.zeros(1, 3, dtype=F64), tensor([[1, 1, -1]])
    plain, higher = H.policy_terms(logp, old, a), H.policy_terms(logp, old, a, clip_high=0.28)
    same(plain, tensor([[-1.2, -1.2, 0.8]]), "clip 0.2")
    same(higher, tensor([[-1.25, -1.28, 0.8]]), "clip 0.2 below, 0.28 above")
    same(grad(plain.sum(), logp), tensor([[0, 0, 0]]), "gradient, clip 0.2")
    same(grad(higher.sum(), logp), tensor([[-1.25, 0, 0]]), "gradient, clip-higher")
    same(H.policy_terms(logp, old, a, clip_low=0.4), tensor([[-1.2, -1.2, 0.7]]), "a lower clip of 0.4")


def test_dual_clip_bounds_only_what_a_negative_advantage_costs():
    logp, a = leaf([[math.log(x) for x in (2, 5, 5, 5, 0.5)]]), tensor([[-1, -1, -2, 1, -1]])
    plain, dual = (H.policy_terms(logp, torch.zeros(1, 5, dtype=F64), a, dual_clip=c) for c in (None, 3.0))
    same(plain, tensor([[2, 5, 10, -1.2, 0.8]]), "without")
    same(dual, tensor([[2, 3, 6, -1.2, 0.8]]), "with c = 3")
    same(grad(dual.sum(), logp), tensor([[2, 0, 0, 0, 0]]), "gradient with c = 3")


def test_a_sequence_ratio_is_the_exp_of_the_mean_log_ratio():
    logp, mask = leaf([[0.15, -0.05, 0.05, 9.0]]), torch.tensor([[True, True, True, False]])
    terms = H.policy_terms(logp, torch.zeros(1, 4, dtype=F64), tensor([[2.0]]), ratio_level="sequence", mask=mask)
    same(terms[mask], torch.full((3,), -2 * math.exp(0.05), dtype=F64), "e^0.05 for every token (e^0.15 = of the sum)")
    loss = H.grpo_loss(logp, torch.zeros(1, 4, dtype=F64), tensor([[2.0]]), mask, ratio_level="sequence")
    same(grad(loss, logp), tensor([[-2 * math.exp(0.05) / 3] * 3 + [0]]), "gradient, spread over the three tokens")
    empty = H.policy_terms(logp, torch.zeros(1, 4, dtype=F64), tensor([[2.0]]), ratio_level="sequence", mask=mask & False)
    same(empty, torch.full((1, 4), -2.0), "a row without tokens has ratio 1, not NaN")


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS), st.sampled_from(["skip", "count"]), st.sampled_from([0.0, 0.1, 0.2]),
       st.sampled_from([0.0, 0.2, 0.28]), st.sampled_from([None, 1.5]), st.sampled_from(["token", "sequence"]),
       st.sampled_from([0.0, 0.3]), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from(["estimator", "ratio"]))
@settings(max_examples=60)
def test_grpo_loss_equals_its_loop(seed, rows, length, how, empty, low, high, dual, level, coef, kind, gradient):
    old, a, ref = logp_like(seed, rows, length), randn(seed + 1, rows, length), logp_like(seed + 2, rows, length)
    logp, mask = leaf(old + 0.5 * randn(seed + 3, rows, length)), ragged(seed + 4, rows, length)
    loss = H.grpo_loss(logp, old, a, mask, how=how, length=5, empty_rows=empty, logp_ref=ref, kl_coef=coef, kl_kind=kind,
                       kl_gradient=gradient, clip_low=low, clip_high=high, dual_clip=dual, ratio_level=level)
    value, slopes = twin_grpo(logp.tolist(), old.tolist(), a.tolist(), mask.tolist(), how, 5, empty, low, high, dual, level,
                              ref.tolist(), coef, kind, gradient)
    same(loss, value, "grpo_loss")
    same(grad(loss, logp), tensor(slopes), "its gradient")


def test_a_loss_of_zero_still_has_a_gradient():
    logits, ids = leaf(torch.zeros(2, 2, 2)), torch.tensor([[0, 0], [0, 1]])
    logp, a = H.token_logps(logits, ids), H.group_advantages(tensor([[1, 0]])).reshape(2, 1)
    loss = H.grpo_loss(logp, logp.detach(), a, torch.ones(2, 1, dtype=torch.bool))
    same(loss, 0.0, "on-policy loss of rewards (1, 0)")
    same(grad(loss, logits)[:, 0], tensor([[-0.25, 0.25]] * 2) * 0.9998, "its gradient, both rows towards token 0", tol=1e-4)


@given(SEEDS, st.integers(1, 3), st.integers(2, 4), LENGTHS, st.floats(-3, 3))
def test_a_group_of_equal_rewards_has_exactly_zero_gradient(seed, groups, size, length, reward):
    logits, ids = leaf(randn(seed, groups * size, length + 1, 4)), randint(seed, 4, groups * size, length + 1)
    rewards = randn(seed, groups, size)
    rewards[0] = reward
    logp = H.token_logps(logits, ids)
    a, mask = H.group_advantages(rewards).reshape(-1, 1), ragged(seed, groups * size, length, 1)
    loss = H.grpo_loss(logp, logp.detach() - 0.1, a, mask)
    g = grad(loss, logits)
    assert (g[:size] == 0).all(), f"expected exactly 0 in the group of equal rewards, got {g[:size]}"
    assert groups == 1 or (g[size:] != 0).any(), "expected a gradient in the other groups"


@given(SEEDS, ROWS, LENGTHS)
def test_on_policy_the_value_is_minus_a_and_the_gradient_that_of_minus_a_log_p(seed, rows, length):
    logp, a = leaf(logp_like(seed, rows, length)), randn(seed + 1, rows, length)
    for level in ("token", "sequence"):
        terms = H.policy_terms(logp, logp.detach(), a, ratio_level=level, mask=torch.ones(rows, length, dtype=torch.bool))
        same(terms, -a, f"value at ratio 1, {level}")
    same(grad(H.policy_terms(logp, logp.detach(), a).sum(), logp), -a, "gradient at ratio 1")


def test_only_logp_carries_a_gradient():
    logp, old, a, ref = (leaf(logp_like(seed, 2, 3)) for seed in range(4))
    loss = H.grpo_loss(logp, old, a, torch.ones(2, 3, dtype=torch.bool), logp_ref=ref, kl_coef=0.5)
    for name, x in (("logp_old", old), ("advantages", a), ("logp_ref", ref)):
        assert (grad(loss, x) == 0).all(), f"expected no gradient into {name}"
    assert (grad(loss, logp) != 0).any(), "expected a gradient into logp"


def on_every_token(logits: torch.Tensor) -> tuple:
    """Log-probs (V, 1) of all tokens, and their probabilities as constants: sum p f(logp) is an exact expectation of f."""
    logp = logits.log_softmax(-1)[:, None]
    return logp, logp.exp().detach()


def test_k1_as_a_loss_teaches_nothing_and_k3_follows_the_other_direction():
    student, reference = leaf([0.3, -0.2]), tensor([-0.5, 0.9])
    logp, p = on_every_token(student)
    ref = on_every_token(reference)[0]
    for kind, gradient, expected in [("k1", "estimator", 0.0), ("k2", "estimator", 0.4465), ("k3", "estimator", 0.4246),
                                     ("k1", "ratio", 0.4465), ("k3", "ratio", 0.4465)]:
        mean = (p * H.kl_terms(logp, ref, kind, gradient)).sum()
        same(grad(mean, student), tensor([expected, -expected]), f"gradient of {kind}, {gradient}", tol=2e-4)
    same(grad((p * H.kl_terms(logp, ref)).sum(), student), tensor([0.4246, -0.4246]), "k3, estimator, unless told", tol=2e-4)
    same((p * H.kl_terms(logp, ref, "k1")).sum(), 0.4290, "mean of k1 = KL", tol=2e-4)
    same((p * H.kl_terms(logp, ref, "k3")).sum(), 0.4290, "mean of k3 = KL", tol=2e-4)


@given(SEEDS, st.integers(2, 6))
def test_the_expected_gradient_of_each_kl_estimator_is_known(seed, vocab):
    student, reference = leaf(randn(seed, vocab)), randn(seed + 1, vocab)
    logp, p = on_every_token(student)
    ref = reference.log_softmax(-1)[:, None]
    follow = lambda kind, gradient: grad((p * H.kl_terms(logp, ref, kind, gradient)).sum(), student)
    q, s = reference.softmax(-1), student.softmax(-1).detach()
    kl = (s * (s / q).log()).sum()
    towards, other = s * ((s / q).log() - kl), s - q     # grad KL(p, ref), grad KL(ref, p)
    same(follow("k1", "estimator"), torch.zeros(vocab), "k1: nothing")
    same(follow("k2", "estimator"), towards, "k2: grad KL(p, ref)")
    same(follow("k3", "estimator"), other, "k3: grad KL(ref, p)")
    same(follow("k1", "ratio"), towards, "rho k1: grad KL(p, ref)")
    same(follow("k3", "ratio"), towards, "rho k3: grad KL(p, ref)")


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from(["estimator", "ratio"]))
def test_kl_terms_equal_their_loop(seed, rows, length, kind, gradient):
    logp, ref = leaf(logp_like(seed, rows, length)), logp_like(seed + 1, rows, length)
    terms = H.kl_terms(logp, ref, kind, gradient)
    twin = [[twin_kl_term(r - x, kind, gradient) for x, r in zip(xs, rs)] for xs, rs in zip(logp.tolist(), ref.tolist())]
    same(terms, tensor([[v for v, _ in row] for row in twin]), f"{kind} {gradient}")
    same(grad(terms.sum(), logp), tensor([[g for _, g in row] for row in twin]), f"gradient of {kind} {gradient}")


GRPO_KEYWORDS = [{"clip_low": 0.5}, {"clip_high": 3.0}, {"dual_clip": 1.2}, {"ratio_level": "sequence"}, {"how": HOWS[1]},
                 {"how": HOWS[2], "length": 3}, {"empty_rows": "count"}, {"kl_coef": 0.5}]


@pytest.mark.parametrize("keyword", GRPO_KEYWORDS, ids=str)
def test_every_keyword_of_the_loss_changes_its_gradient(keyword):
    old, ref, mask = logp_like(0, 4, 5), logp_like(1, 4, 5), torch.arange(5) < torch.tensor([[5], [3], [2], [0]])
    logp, a = leaf(old + randn(2, 4, 5)), randn(5, 4, 5)
    follow = lambda **k: grad(H.grpo_loss(logp, old, a, mask, logp_ref=ref, **k), logp)
    differs(follow(**keyword), follow(), str(keyword))
    if "kl_coef" in keyword:
        differs(follow(kl_coef=0.5, kl_kind="k1"), follow(**keyword), "kl_kind k1")
        differs(follow(kl_coef=0.5, kl_kind="k2"), follow(**keyword), "kl_kind k2")
        differs(follow(kl_coef=0.5, kl_gradient="ratio"), follow(**keyword), "kl_gradient ratio")
    if "length" in keyword:
        same(follow(**keyword), 2 * follow(how=HOWS[2], length=6), "twice the length, half the gradient")


@pytest.mark.parametrize("garbage", (NAN, INF, -INF))
@pytest.mark.parametrize("level", ("token", "sequence"))
def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient(garbage, level):
    mask = torch.arange(4) < torch.tensor([[4], [2], [0]])
    clean = [logp_like(seed, 3, 4) for seed in range(4)]
    dirty = [x.masked_fill(~mask, garbage) for x in clean]
    def follow(logp, old, a, ref):
        logp = leaf(logp)
        loss = H.grpo_loss(logp, old, a, mask, logp_ref=ref, kl_coef=0.1, ratio_level=level, dual_clip=3.0)
        return loss.detach(), grad(loss, logp)
    for found, expected in zip(follow(*dirty), follow(*clean)):
        bit_equal(found, expected, f"with {garbage} under the mask")


def test_section_4_refuses_with_the_value_named():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    refuses("(2, 4)", H.policy_terms, x, torch.zeros(2, 4), x)
    refuses("(2,)", H.policy_terms, x, x, torch.zeros(2))
    refuses("mask", H.policy_terms, x, x, x, ratio_level="sequence")
    refuses("'word'", H.policy_terms, x, x, x, ratio_level="word")
    refuses("'k4'", H.kl_terms, x, x, "k4")
    refuses("'none'", H.kl_terms, x, x, "k3", "none")
    refuses("(2, 4)", H.kl_terms, x, torch.zeros(2, 4))
    refuses("0.25", H.grpo_loss, x, x, x, mask, kl_coef=0.25)
    refuses("(3, 3)", H.grpo_loss, x, x, x, torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("which", ("advantages of another batch", "advantages without a column", "logp of one row",
                                   "logp of one row, masked", "logp_old of one row", "logp_ref of one row"))
def test_no_loss_broadcasts_by_accident(which):
    x, mask = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shapes differ"):
        if which == "advantages of another batch":
            H.policy_terms(x, x, torch.zeros(2, 1))
        elif which == "advantages without a column":     # would go to columns instead of rows where B = T
            H.grpo_loss(x, x, torch.arange(3.0), mask)
        elif which == "logp of one row":
            H.policy_terms(x[:1], x, x)
        elif which == "logp of one row, masked":         # to fill it under the mask makes three rows of it
            H.grpo_loss(x[:1], x, x, mask)
        elif which == "logp_old of one row":
            H.grpo_loss(x, torch.zeros(1, 3), x, mask)
        else:
            H.grpo_loss(x, x, x, mask, logp_ref=torch.zeros(1, 3), kl_coef=0.1)


@near_miss("policy_terms", "max instead of min: the clip holds back the steps that should go on: takuseno/ppo#3")
def terms_with_max(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    rho = (logp - logp_old).exp()
    return -torch.maximum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)


@near_miss("policy_terms", "clips without the min: a wrong step outside the clip is never taken back")
def terms_only_clipped(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    return -(logp - logp_old).exp().clamp(1 - clip_low, 1 + clip_high) * advantages


@near_miss("policy_terms", "the sign of the loss flipped")
def terms_with_flipped_sign(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    rho = (logp - logp_old).exp()
    return torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)


@near_miss("policy_terms", "logp_old is not detached: the ratio is 1 and its gradient 0")
def terms_with_live_old(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    rho = (logp - (logp_old + logp - logp.detach())).exp()
    return -torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)


@near_miss("policy_terms", "one epsilon for both sides: clip-higher without effect", "clip_high")
def terms_without_clip_higher(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    rho = (logp - logp_old).exp()
    return -torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_low) * advantages)


@near_miss("policy_terms", "the sequence ratio is the exp of the sum, not of the mean, of log-ratios", "sequence")
def terms_with_summed_ratio(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2, *, ratio_level="token", mask=None):
    only(ratio_level == "sequence")
    rho = (logp - logp_old).masked_fill(~mask, 0.0).sum(1, keepdim=True).exp().expand_as(logp)
    return -torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)


@near_miss("policy_terms", "the dual clip also bounds what a positive advantage earns", "dual_clip")
def terms_with_dual_clip_everywhere(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None):
    rho = (logp - logp_old).exp()
    terms = -torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return terms if dual_clip is None else torch.minimum(terms, -dual_clip * advantages)


@near_miss("kl_terms", "the sign of d flipped inside k3: estimates nothing that was asked for")
def k3_flipped(logp, logp_ref):
    d = logp - logp_ref
    return d.exp() - d - 1


@near_miss("kl_terms", "k1 whatever was asked: its expected gradient does not contain the reference: NeMo-RL#2506")
def k1_always(logp, logp_ref, kind="k3"):
    return logp - logp_ref


@near_miss("kl_terms", "the ratio is forgotten: k3 then follows KL(ref, p)", "gradient=ratio")
def k3_without_ratio(logp, logp_ref, kind="k3", gradient="estimator"):
    d = logp_ref - logp
    return -d if kind == "k1" else d.square() / 2 if kind == "k2" else d.exp() - d - 1


def grpo_summed(logp, logp_old, advantages, mask, weights, clip, terms_of=lambda *x, **k: H.policy_terms(*x, **k)):
    """The loss from its parts, some of which a near miss replaces"""
    live = [x.masked_fill(~mask, 0.0) for x in (logp, logp_old, advantages.expand_as(logp))]
    return H.weighted_sum(terms_of(*live, **clip), weights)


@near_miss("grpo_loss", "the mean over all columns, padding included")
def grpo_over_padding(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return grpo_summed(logp, logp_old, advantages, mask, mask.double() / mask.numel(), clip)


@near_miss("grpo_loss", "every token weighs the same, DAPO's mean, although each completion should")
def grpo_with_token_mean(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return grpo_summed(logp, logp_old, advantages, mask, H.token_weights(mask, HOWS[1]), clip)


@near_miss("grpo_loss", "an empty completion counts in the mean although it should be skipped: TRL's convention")
def grpo_counting_empty_rows(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return grpo_summed(logp, logp_old, advantages, mask, H.token_weights(mask, HOWS[0], empty_rows="count"), clip)


@near_miss("grpo_loss", "the sign of the loss flipped")
def grpo_with_flipped_sign(logp, logp_old, advantages, mask, **options):
    return -H.grpo_loss(logp, logp_old, advantages, mask, **options)


@near_miss("grpo_loss", "max instead of min: the clip holds back the steps that should go on: takuseno/ppo#3")
def grpo_with_max(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, how=HOWS[0], length=None, empty_rows="skip"):
    clip, weights = {"clip_low": clip_low, "clip_high": clip_high}, H.token_weights(mask, how, length, empty_rows)
    return -grpo_summed(logp, logp_old, -advantages, mask, weights, clip)


@near_miss("grpo_loss", "no clip at all")
def grpo_without_clip(logp, logp_old, advantages, mask, *, how=HOWS[0], length=None, empty_rows="skip"):
    return H.grpo_loss(logp, logp_old, advantages, mask, how=how, length=length, empty_rows=empty_rows, clip_low=0.999999, clip_high=1e30)


@near_miss("grpo_loss", "multiplies by the mask instead of filling: one padded NaN is the loss of the batch: verl#785")
def grpo_by_product(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None, how=HOWS[0], length=None, empty_rows="skip"):
    terms = H.policy_terms(logp, logp_old, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return (terms * H.token_weights(mask, how, length, empty_rows).to(terms.dtype)).sum()


@near_miss("grpo_loss", "the log-ratio is clamped at 20: the value looks safe, the gradient of a far token is 0: verl's own clamp")
def grpo_with_clamped_ratio(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None, how=HOWS[0],
                            length=None, empty_rows="skip"):
    clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    terms_of = lambda p, old, a, **c: H.policy_terms((p - old).clamp(-20, 20), 0 * old, a, **c)
    return grpo_summed(logp, logp_old, advantages, mask, H.token_weights(mask, how, length, empty_rows), clip, terms_of)


@near_miss("grpo_loss", "-A log p: on-policy the same gradient, off-policy without ratio and clip")
def grpo_without_ratio(logp, logp_old, advantages, mask, *, how=HOWS[0], length=None, empty_rows="skip"):
    terms_of = lambda p, old, a: -a * p
    return grpo_summed(logp, logp_old, advantages, mask, H.token_weights(mask, how, length, empty_rows), {}, terms_of)


# ---------------------------------------------------------------------------------------------------------------------
# 5  On-policy distillation
# ---------------------------------------------------------------------------------------------------------------------


def twin_jsd(s: list, t: list, share: float) -> float:
    m = [share * b + (1 - share) * a for a, b in zip(s, t)]
    return share * twin_kl(t, m) + (1 - share) * twin_kl(s, m)


def twin_opd(logp, teacher, old, mask, how, length=None) -> tuple:
    zero = [[0.0] * len(row) for row in mask]
    a = [[t - o for t, o in zip(ts, os)] for ts, os in zip(teacher, old)]
    return twin_grpo(logp, old, a, mask, how, length, "skip", 0.2, 0.2, None, "token", zero, 0.0, "k1", "estimator")


def test_directions_of_kl_and_jsd_have_their_own_numbers():
    teacher, student = tensor([[[0.9, 0.1]]]).log(), leaf(tensor([[[0.5, 0.5]]]).log())
    same(H.forward_kl(student, teacher), tensor([[0.36806]]), "KL(T, S)", tol=1e-4)
    same(H.reverse_kl(student, teacher), tensor([[0.51083]]), "KL(S, T)", tol=1e-4)
    for share, value in ((0.25, 0.07188), (0.5, 0.10175), (0.75, 0.08330)):
        same(H.generalized_jsd(student, teacher, share), tensor([[value]]), f"JSD at {share}", tol=1e-4)
    same(grad(H.forward_kl(student, teacher).sum(), student), tensor([[[-0.4, 0.4]]]), "p_S - p_T")
    same(grad(H.reverse_kl(student, teacher).sum(), student), tensor([[[-0.25 * math.log(9), 0.25 * math.log(9)]]]),
         "p_S (log(p_S / p_T) - KL)")


def test_a_teachers_opinion_of_two_tokens_works_out_by_hand():
    student, teacher = leaf(tensor([0.8, 0.2]).log()), tensor([0.6, 0.4]).log()[:, None]
    logp, p = on_every_token(student)
    a = H.opd_advantages(logp, teacher)
    same(a, tensor([[-0.2877], [0.6931]]), "A", tol=1e-4)
    one = torch.ones(1, 1, dtype=torch.bool)
    loss = sum(p[y, 0] * H.opd_loss(logp[y:y + 1], teacher[y:y + 1], one) for y in (0, 1))
    same(loss, 0.09152, "expected loss = KL(S, T); 0.1718 = the -A log p form", tol=1e-4)
    same(grad(loss, student), tensor([0.1569, -0.1569]), "gradient", tol=5e-4)
    kl = H.reverse_kl(student[None, None], teacher.reshape(1, 1, 2))
    same(kl, tensor([[0.09152]]), "KL(S, T)", tol=1e-4)
    same(grad(kl.sum(), student), grad(loss, student), "gradient of the KL")
    form = lambda a: grad((p * -a * logp).sum(), student)[0]
    same(form(a), 0.1569, "the -A log p form, same gradient", tol=5e-4)
    same(form(teacher - logp), 0.3787, "wrong: not detached", tol=5e-4)
    same(form(-a), -0.1569, "wrong: sign flipped", tol=5e-4)
    same(form((p * a).sum().expand(2, 1)), 0.0, "wrong: a per-position KL as the advantage teaches nothing")
    same(grad((p * (logp - teacher)).sum(), student)[0], 0.0, "wrong: mean log-ratio teaches nothing")


def test_a_teacher_logp_of_exactly_zero_is_a_value():
    logp = leaf([[-0.7, -0.7]])
    same(H.opd_advantages(logp, tensor([[0.0, -0.7]])), tensor([[0.7, 0.0]]), "A where the teacher is certain")
    g = grad(H.opd_loss(logp, tensor([[0.0, -0.7]]), torch.ones(1, 2, dtype=torch.bool)), logp)
    same(g, tensor([[-0.35, 0.0]]), "gradient where the teacher is certain")


def test_a_teacher_that_is_a_copy_has_exactly_zero_loss_and_gradient():
    logp = leaf(logp_like(0, 3, 4))
    loss = H.opd_loss(logp, logp.detach().clone(), torch.ones(3, 4, dtype=torch.bool))
    assert loss.item() == 0 and (grad(loss, logp) == 0).all(), f"expected exactly 0, got {loss}, {grad(loss, logp)}"


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS), st.booleans())
def test_opd_is_grpo_with_the_teachers_log_ratio_as_advantage(seed, rows, length, how, on_policy):
    old, teacher, mask = logp_like(seed, rows, length), logp_like(seed + 1, rows, length), ragged(seed + 2, rows, length)
    logp = leaf(old if on_policy else old + 0.4 * randn(seed + 3, rows, length))
    loss = H.opd_loss(logp, teacher, mask, how=how, length=4, logp_old=None if on_policy else old)
    value, slopes = twin_opd(logp.tolist(), teacher.tolist(), old.tolist(), mask.tolist(), how, 4)
    same(loss, value, "opd_loss against its loop")
    same(grad(loss, logp), tensor(slopes), "gradient against its loop")
    form = H.grpo_loss(logp, old, teacher - old, mask, how=how, length=4)
    bit_equal(grad(loss, logp), grad(form, logp), "gradient against the GRPO form")
    assert not H.opd_advantages(logp, leaf(teacher)).requires_grad, "expected the advantage detached"


@given(SEEDS, st.integers(2, 6))
def test_opd_follows_the_gradient_of_reverse_kl(seed, vocab):
    student, teacher = leaf(randn(seed, vocab)), randn(seed + 1, vocab)
    logp, p = on_every_token(student)
    t, one = teacher.log_softmax(-1)[:, None], torch.ones(1, 1, dtype=torch.bool)
    expected = sum(p[y, 0] * H.opd_loss(logp[y:y + 1], t[y:y + 1], one) for y in range(vocab))
    kl = H.reverse_kl(student[None, None], teacher[None, None]).sum()
    same(expected, kl, "mean of -A is KL(p_S, p_T)")
    same(grad(expected, student), grad(kl, student), "mean gradient of OPD is the gradient of reverse KL")


class Tabular:
    """A policy over sequences of 3 tokens, one row of logits a prefix; token 0 ends a sequence if `ends`."""

    def __init__(self, seed: int, longest: int, ends: bool):
        self.sequences = [y for n in range(1, longest + 1) for y in itertools.product(range(3), repeat=n)
                          if (n == longest or (ends and y[-1] == 0)) and not (ends and 0 in y[:-1])]
        prefixes = sorted({y[:t] for y in self.sequences for t in range(len(y))})
        self.row = {prefix: i for i, prefix in enumerate(prefixes)}
        self.logits, self.teacher = leaf(randn(seed, len(prefixes), 3)), randn(seed + 1, len(prefixes), 3)

    def along(self, table, y):
        """The logits (1, N, 3) at every position of y, and the log-probs (1, N) of its tokens."""
        z = table[[self.row[y[:t]] for t in range(len(y))]]
        return z[None], z.log_softmax(-1)[range(len(y)), list(y)][None]

    def expected(self, loss):
        """The gradient of the mean of loss(logits, logp, teacher logits, teacher logp), probabilities held constant."""
        total = 0.0
        for y in self.sequences:
            z, logp = self.along(self.logits, y)
            total = total + logp.sum().exp().detach() * loss(z, logp, *self.along(self.teacher, y))
        return grad(total, self.logits)

    def opd(self, how, length=None):
        return self.expected(lambda z, lp, zt, lt: H.opd_loss(lp, lt, lp < 1, how=how, length=length))      # lp < 1: all

    def kl_at_positions(self, how, length=None):
        return self.expected(lambda z, lp, zt, lt: H.aggregate(H.reverse_kl(z, zt), lp < 1, how, length))

    def kl_of_sequences(self):
        pairs = [(self.along(self.logits, y)[1].sum(), self.along(self.teacher, y)[1].sum()) for y in self.sequences]
        return grad(sum(p.exp() * (p - q) for p, q in pairs), self.logits)


@pytest.mark.parametrize("seed", (0, 10, 20))
def test_opd_follows_reverse_kl_until_the_divisor_depends_on_the_sampled_length(seed):
    free = Tabular(seed, 3, ends=True)                   # 15 sequences of length 1 to 3
    same(free.opd(HOWS[2], 3), free.kl_at_positions(HOWS[2], 3), "constant divisor: the identity holds over sampled lengths")
    differs(free.opd(HOWS[0]), free.kl_at_positions(HOWS[0]), "divisor = sampled length: it does not", by=5e-3)
    fixed = Tabular(seed, 2, ends=False)                 # 9 sequences of length 2
    same(fixed.opd(HOWS[0]), fixed.kl_at_positions(HOWS[0]), "equal lengths: every divisor is constant")


@pytest.mark.parametrize("seed", (0, 10, 20))
def test_opd_does_not_follow_the_kl_between_whole_sequences(seed):
    two, one = Tabular(seed, 2, ends=False), Tabular(seed, 1, ends=False)
    differs(two.opd(HOWS[2], 1), two.kl_of_sequences(), "2-token sequences have future terms that OPD drops", by=1e-2)
    last = [i for prefix, i in two.row.items() if len(prefix) == 1]
    same(two.opd(HOWS[2], 1)[last], two.kl_of_sequences()[last], "the last position has no future")
    same(one.opd(HOWS[2], 1), one.kl_of_sequences(), "1-token sequences have none")


@given(SEEDS, st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.sampled_from([0.5, 1.0, 2.0]),
       st.sampled_from([0.1, 0.5, 0.8]))
def test_divergences_equal_their_loops_and_closed_form_residuals(seed, rows, length, vocab, temperature, share):
    student, teacher = leaf(2 * randn(seed, rows, length, vocab)), 2 * randn(seed + 1, rows, length, vocab)
    rkl, fkl = H.reverse_kl(student, teacher, temperature), H.forward_kl(student, teacher, temperature)
    jsd = H.generalized_jsd(student, teacher, share, temperature)
    g_rkl, g_fkl, g_jsd = (temperature * grad(x.sum(), student) for x in (rkl, fkl, jsd))
    for b, t in itertools.product(range(rows), range(length)):
        s, q = twin_softmax(student[b, t].tolist(), temperature), twin_softmax(teacher[b, t].tolist(), temperature)
        m = [share * y + (1 - share) * x for x, y in zip(s, q)]
        same(rkl[b, t], twin_kl(s, q), "reverse KL")
        same(fkl[b, t], twin_kl(q, s), "forward KL")
        same(jsd[b, t], twin_jsd(s, q, share), "JSD")
        same(g_rkl[b, t], tensor([x * (math.log(x / y) - twin_kl(s, q)) for x, y in zip(s, q)]), "residual of reverse KL")
        same(g_fkl[b, t], tensor([x - y for x, y in zip(s, q)]), "residual of forward KL")
        same(g_jsd[b, t], tensor([(1 - share) * x * (math.log(x / y) - twin_kl(s, m)) for x, y in zip(s, m)]), "residual of JSD")


@given(SEEDS, ROWS, LENGTHS, st.integers(2, 5))
def test_residuals_of_sampled_signals_are_minus_a_times_one_hot_minus_p(seed, rows, length, vocab):
    logits, ids = leaf(randn(seed, rows, length + 1, vocab)), randint(seed, vocab, rows, length + 1)
    logp, teacher = H.token_logps(logits, ids), logp_like(seed + 1, rows, length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    reward = randn(seed + 2, rows, 1)
    signals = {"GRPO": (H.grpo_loss(logp, logp.detach(), reward, mask, how=HOWS[2], length=1), reward.expand(rows, length)),
               "OPD": (H.opd_loss(logp, teacher, mask, how=HOWS[2], length=1), teacher - logp.detach()),
               "SFT": (H.sft_loss(logp, mask, how=HOWS[2], length=1), torch.ones(rows, length, dtype=F64))}
    pull = F.one_hot(ids[:, 1:], vocab).double() - logits[:, :-1].softmax(-1).detach()
    for name, (loss, a) in signals.items():
        same(rows * grad(loss, logits)[:, :-1], -a[..., None] * pull, f"residual of {name}")


@given(SEEDS, st.integers(2, 5), st.floats(0.01, 0.99))
def test_divergences_are_never_negative_and_jsd_is_bounded(seed, vocab, share):
    student, teacher = leaf(4 * randn(seed, 1, 1, vocab)), 4 * randn(seed + 1, 1, 1, vocab)
    for f in (H.reverse_kl, H.forward_kl, H.generalized_jsd):
        assert f(student, teacher).item() > 0, f"expected {f.__name__} above 0 between different distributions"
        same(f(student, student), tensor([[0.0]]), f"{f.__name__} of equals")
        same(grad(f(student, student.detach()).sum(), student), torch.zeros(1, 1, vocab), f"gradient of {f.__name__} at equals")
    same(H.generalized_jsd(student, teacher, share), H.generalized_jsd(teacher, student, 1 - share), "roles and shares exchanged")
    assert H.generalized_jsd(student, teacher).item() <= math.log(2), "expected at most log 2"


@given(SEEDS, st.floats(0.1, 0.9))
def test_the_mixture_of_a_jsd_may_be_detached(seed, share):
    student, teacher = leaf(randn(seed, 4)), randn(seed + 1, 4)
    s, t = student.softmax(-1), teacher.softmax(-1)
    m = (share * t + (1 - share) * s).detach()           # its own gradient is -sum dm = 0
    still = share * (t * (t / m).log()).sum() + (1 - share) * (s * (s / m).log()).sum()
    same(grad(still, student), grad(H.generalized_jsd(student, teacher, share), student), "gradient with the mixture held still")


def test_jsd_tends_to_zero_at_the_ends_and_the_ends_are_refused():
    student, teacher = leaf(randn(0, 1, 1, 4)), randn(1, 1, 1, 4)
    for share in (1e-7, 1 - 1e-7):
        same(H.generalized_jsd(student, teacher, share), tensor([[0.0]]), f"JSD at {share}", tol=1e-6)
    for share in (0, 1, 1.5, -0.2):
        refuses(str(share), H.generalized_jsd, student, teacher, share)
    refuses("(1, 1, 5)", H.reverse_kl, student, torch.zeros(1, 1, 5))
    refuses("(2, 1, 4)", H.forward_kl, student, torch.zeros(2, 1, 4))
    refuses("(1, 3)", H.opd_advantages, torch.zeros(2, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("divergence", (H.reverse_kl, H.forward_kl, H.generalized_jsd))
def test_tokens_that_neither_can_say_change_no_divergence(divergence):
    student, teacher = leaf([[[1.0, -INF, 0.3]]]), tensor([[[0.2, -INF, 0.9]]])
    short = leaf(student.detach()[..., [0, 2]])
    value, expected = divergence(student, teacher), divergence(short, teacher[..., [0, 2]])
    same(value, expected, "value")
    g = grad(value.sum(), student)
    assert g[0, 0, 1] == 0, f"expected gradient 0 at the impossible token, got {g}"
    same(g[..., [0, 2]], grad(expected.sum(), short), "gradient")


def test_a_token_that_one_side_cannot_say_is_infinite_in_one_direction_only():
    narrow, wide = leaf([[[1.0, -INF, 0.3]]]), leaf([[[0.2, 0.4, 0.9]]])
    for student, teacher, fine, infinite in ((narrow, wide, H.reverse_kl, H.forward_kl),
                                             (wide, narrow, H.forward_kl, H.reverse_kl)):
        assert infinite(student, teacher).item() == INF, f"expected inf from {infinite.__name__}"
        for f in (fine, H.generalized_jsd):
            assert f(student, teacher).isfinite().all(), f"expected a finite {f.__name__}"
            assert grad(f(student, teacher).sum(), student).isfinite().all(), f"expected a finite gradient of {f.__name__}"
        s, t = twin_softmax(student[0, 0].tolist()), twin_softmax(teacher[0, 0].tolist())
        m, jsd = [0.3 * y + 0.7 * x for x, y in zip(s, t)], H.generalized_jsd(student, teacher, 0.3)
        same(jsd, tensor([[twin_jsd(s, t, 0.3)]]), "JSD against its loop")
        residual = [0.7 * x * (math.log(x / y) - twin_kl(s, m)) if x else 0.0 for x, y in zip(s, m)]
        same(grad(jsd.sum(), student)[0, 0], tensor(residual), "its gradient")


@pytest.mark.parametrize("divergence", (H.reverse_kl, H.forward_kl, H.generalized_jsd))
def test_a_divergence_has_no_gradient_into_the_teacher_and_keywords_matter(divergence):
    student, teacher = leaf(randn(0, 1, 2, 5)), leaf(randn(1, 1, 2, 5))
    assert (grad(divergence(student, teacher).sum(), teacher) == 0).all(), "expected the teacher frozen"
    differs(divergence(student, teacher, temperature=2.0), divergence(student, teacher), "temperature")
    low = divergence(student.detach().bfloat16(), teacher.detach().bfloat16())
    assert low.dtype == torch.float32, f"expected float32, got {low.dtype}"
    exact = divergence(student.detach().bfloat16().double(), teacher.detach().bfloat16().double())
    same(low, exact, "float64 of the same bfloat16 numbers", tol=2e-6)
    if divergence is H.generalized_jsd:
        differs(divergence(student, teacher, 0.2), divergence(student, teacher), "teacher_share")


@near_miss("opd_advantages", "the sign flipped: pushes away from the teacher: torchforge#527")
def opd_advantages_flipped(logp, logp_teacher):
    return (logp - logp_teacher).detach()


@near_miss("opd_advantages", "a teacher logp of exactly 0.0 is taken for `no teacher`: miles#2362")
def opd_advantages_zero_is_missing(logp, logp_teacher):
    return torch.where(logp_teacher == 0, torch.zeros_like(logp), logp_teacher - logp).detach()


@near_miss("opd_advantages", "centred over the row, so that a teacher who likes nothing says nothing")
def opd_advantages_centred(logp, logp_teacher):
    a = (logp_teacher - logp).detach()
    return a - a.mean(1, keepdim=True)


@near_miss("opd_loss", "A is not detached: its own gradient adds to that of the ratio: miles#2362")
def opd_not_detached(logp, logp_teacher, mask, logp_old=None):
    logp, old, logp_teacher = (x.masked_fill(~mask, 0.0) for x in (logp, logp.detach() if logp_old is None else logp_old, logp_teacher))
    terms = -(logp - old).exp() * (logp_teacher - logp)
    return (terms.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum().clamp(min=1)


@near_miss("opd_loss", "the mean log-ratio as a loss: its expected gradient is 0 and does not hold the teacher: torchforge#527")
def opd_mean_log_ratio(logp, logp_teacher, mask):
    terms = (logp - logp_teacher).masked_fill(~mask, 0.0)
    return (terms.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum().clamp(min=1)


def two_logs(student_logits, teacher_logits, temperature):
    """Log-probs of both, with a large negative number for -inf, so that a near miss is wrong in one respect and no other"""
    return [(z / temperature).log_softmax(-1).masked_fill(z == -INF, -1e4) for z in (student_logits, teacher_logits.detach())]


@near_miss("reverse_kl", "the directions exchanged: trl#3043")
def reverse_kl_exchanged(student_logits, teacher_logits, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    return (t.exp() * (t - s)).sum(-1)


@near_miss("reverse_kl", "the weights p_S are detached: in expectation k1, whose gradient teaches nothing")
def reverse_kl_detached_weights(student_logits, teacher_logits, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    return (s.exp().detach() * (s - t)).sum(-1)


@near_miss("forward_kl", "the cross-entropy: the same gradient, but the teacher's entropy is left in the value")
def forward_kl_as_cross_entropy(student_logits, teacher_logits, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    return -(t.exp() * s).sum(-1)


@near_miss("forward_kl", "multiplied by the temperature squared, as Hinton's soft targets, although nothing says so here", "temperature")
def forward_kl_times_t_squared(student_logits, teacher_logits, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    return temperature ** 2 * (t.exp() * (t - s)).sum(-1)


@near_miss("generalized_jsd", "the weights of the mixture and of the sum are crossed: ms-swift#10078")
def jsd_crossed(student_logits, teacher_logits, teacher_share=0.5, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    m = ((1 - teacher_share) * t.exp() + teacher_share * s.exp()).clamp(min=1e-30).log()
    return teacher_share * (t.exp() * (t - m)).sum(-1) + (1 - teacher_share) * (s.exp() * (s - m)).sum(-1)


@near_miss("generalized_jsd", "the halves weigh 1/2 each whatever the mixture's share is")
def jsd_with_equal_halves(student_logits, teacher_logits, teacher_share=0.5, temperature=1.0):
    s, t = two_logs(student_logits, teacher_logits, temperature)
    m = (teacher_share * t.exp() + (1 - teacher_share) * s.exp()).clamp(min=1e-30).log()
    return ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1)) / 2


# ---------------------------------------------------------------------------------------------------------------------
# 6  Auxiliary SFT
# ---------------------------------------------------------------------------------------------------------------------


def test_every_answer_token_is_imitated_and_the_prompt_is_not():
    logp, mask = leaf([[-0.9, -0.1, -0.2]]), torch.ones(1, 3, dtype=torch.bool)
    loss = H.sft_loss(logp, mask, "token_mean")
    same(loss, 0.4, "mean of 0.9, 0.1, 0.2 (0.15 = the first is lost, 0.5 = the last is)")
    same(grad(loss, logp), torch.full((1, 3), -1 / 3, dtype=F64), "gradient")
    for lost, wrong in ((0, 0.15), (2, 0.5)):
        without = mask.clone()
        without[0, lost] = False
        same(H.sft_loss(logp, without, "token_mean"), wrong, f"the wrong number where token {lost} is lost")


@given(SEEDS, ROWS, LENGTHS, st.integers(2, 5))
def test_sft_is_cross_entropy(seed, rows, length, vocab):
    logits, ids = leaf(randn(seed, rows, length + 1, vocab)), randint(seed, vocab, rows, length + 1)
    mask = ragged(seed, rows, length)
    mask[0, 0] = True
    loss = H.sft_loss(H.token_logps(logits, ids), mask, "token_mean")
    other = F.cross_entropy(logits[:, :-1][mask], ids[:, 1:][mask])
    same(loss, other, "torch's cross_entropy")
    same(grad(loss, logits), grad(other, logits), "its gradient")


@given(SEEDS, ROWS, LENGTHS, st.sampled_from(HOWS), st.sampled_from(["skip", "count"]), st.sampled_from([NAN, -INF]))
def test_sft_equals_its_loop_beside_garbage(seed, rows, length, how, empty_rows, garbage):
    mask, clean = ragged(seed, rows, length), logp_like(seed, rows, length)
    logp = leaf(clean.masked_fill(~mask, garbage))
    loss = H.sft_loss(logp, mask, how, length=6, empty_rows=empty_rows)
    same(loss, -twin_mean(clean.tolist(), mask.tolist(), how, 6, empty_rows), "value")
    same(grad(loss, logp), -tensor(twin_weights(mask.tolist(), how, 6, empty_rows)), "gradient")


def test_a_loss_weighs_completions_and_not_tokens_alike_unless_told():
    mask, zero = torch.tensor([[True, False], [True, True]]), torch.zeros(2, 2, dtype=F64)
    logp = leaf([[-3.0, NAN], [-1.0, -1.0]])
    sft, opd = H.sft_loss(logp, mask), H.opd_loss(logp, zero, mask)
    same(sft, 2.0, "mean of 3 and 1 (5/3 = over the three tokens)")
    same(grad(sft, logp), -tensor([[0.5, 0.0], [0.25, 0.25]]), "gradient of sft_loss")
    same(opd, -2.0, "opd_loss: minus the mean of the advantages 3 and 1")
    same(grad(opd, logp), -tensor([[1.5, 0.0], [0.25, 0.25]]), "gradient of opd_loss")


def test_sft_refuses_with_the_value_named():
    refuses("'sum'", H.sft_loss, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), "sum")
    refuses("(1, 3)", H.sft_loss, torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))


@near_miss("sft_loss", "loses the first token of each answer: OpenRLHF#973")
def sft_without_first(logp, mask, how="seq_mean_token_mean", **options):
    live = mask & (mask.cumsum(1) > 1)
    return -tensor(twin_weights(live.tolist(), how, **options)).mul(logp.masked_fill(~live, 0.0)).sum()


@near_miss("sft_loss", "loses the last token, the eos: the student never learns to stop: transformers#47394, trl#4970")
def sft_without_last(logp, mask, how="seq_mean_token_mean", **options):
    live = mask & (mask.cumsum(1) < mask.sum(1, keepdim=True))
    return -tensor(twin_weights(live.tolist(), how, **options)).mul(logp.masked_fill(~live, 0.0)).sum()


@near_miss("sft_loss", "the likelihood instead of its negative")
def sft_with_flipped_sign(logp, mask, how="seq_mean_token_mean", **options):
    return tensor(twin_weights(mask.tolist(), how, **options)).mul(logp.masked_fill(~mask, 0.0)).sum()


# ---------------------------------------------------------------------------------------------------------------------
# 7  RSTG
# ---------------------------------------------------------------------------------------------------------------------


def twin_scores(h: list, d: list, mask: list) -> list:
    def scaled(x):
        live = [v for row, on in zip(x, mask) for v, ok in zip(row, on) if ok]
        low, high = (min(live), max(live)) if live else (0.0, 0.0)
        return [[(v - low) / (high - low) if ok and high > low else 0.0 for v, ok in zip(row, on)] for row, on in zip(x, mask)]
    return [[a + b - a * b for a, b in zip(p, q)] for p, q in zip(scaled(h), scaled(d))]


def twin_count(share: str, n: int) -> int:
    """ceil(share n / 100) with whole numbers only; share as its decimal digits, like "12.5"."""
    whole, _, part = share.partition(".")
    return -(-int(whole + part) * n // (100 * 10 ** len(part)))


def twin_select(scores: list, mask: list, share: str) -> list:
    out = []
    for row, on in zip(scores, mask):
        live = sorted((t for t, ok in enumerate(on) if ok), key=lambda t: (-row[t], t))
        kept = set(live[:twin_count(share, len(live))])
        out.append([t in kept for t in range(len(row))])
    return out


def twin_rstg(outcomes, advantages, opd, entropy, mask, confidence, coef, share) -> list:
    size = len(outcomes[0])
    routed = [[ok and not any(outcomes[b // size]) and confidence[b // size] > 0 for ok in row] for b, row in enumerate(mask)]
    selected = twin_select(twin_scores(entropy, [[abs(x) for x in row] for row in opd], routed), routed, share)
    out = []
    for b, row in enumerate(mask):
        n, g = b // size, b % size
        guided = [coef * confidence[n] * x * kept for x, kept in zip(opd[b], selected[b])]
        out.append([0.0 if not ok else advantages[n][g] if any(outcomes[n]) else x for ok, x in zip(row, guided)])
    return out


def rstg_case(seed: int, groups: int = 3, size: int = 2, length: int = 4) -> dict:
    """Group 0 is all wrong, 1 all right, 2 mixed, later ones random."""
    outcomes = randint(seed, 2, groups, size).double()
    outcomes[0], outcomes[1], outcomes[2] = 0, 1, tensor([1] + [0] * (size - 1))
    b = groups * size
    return {"outcomes": outcomes, "advantages": H.group_advantages(outcomes), "advantages_opd": randn(seed + 1, b, length),
            "entropy": randn(seed + 2, b, length).abs(), "mask": ragged(seed + 3, b, length, 2),
            "confidence": (1 + randint(seed + 4, 8, groups)).double() / 8}


def test_only_groups_without_variance_leave_the_middle_route():
    routes = H.route_groups(tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]))
    assert routes.tolist() == [H.NEGATIVE, H.MIXED, H.POSITIVE] == [-1, 0, 1], f"expected negative, mixed, positive, got {routes}"
    assert routes.dtype == torch.long, f"expected whole numbers, got {routes.dtype}"
    assert H.route_groups(torch.tensor([[False, False]])).tolist() == [-1], "expected booleans to count as outcomes"


@given(SEEDS, ROWS, LENGTHS)
def test_routes_and_confidence_equal_their_loops(seed, groups, size):
    outcomes = randint(seed, 2, groups, size)
    rows = outcomes.tolist()
    assert H.route_groups(outcomes).tolist() == [1 if all(r) else 0 if any(r) else -1 for r in rows], f"expected routes of {rows}"
    same(H.teacher_confidence(outcomes), tensor([sum(r) / len(r) for r in rows]), "mean@K", tol=1e-6)


def test_confidence_is_the_mean_and_not_whether_any_was_right():
    same(H.teacher_confidence(tensor([[1, 0, 0, 0], [0, 0, 0, 0]])), tensor([0.25, 0.0]), "mean@4 (1.0 = pass@4)")


def test_a_shaped_reward_is_no_outcome():
    shaped = tensor([[0.1, 0.0], [0.0, 0.1]])            # all wrong, with a bonus for the format
    for f in (H.route_groups, H.teacher_confidence):
        refuses("(2, 2)", f, shaped)
        refuses("(2,)", f, tensor([0, 1]))
        refuses("(2, 2)", f, tensor([[NAN, 1], [0, 1]]))
        refuses("(2, 0)", f, torch.zeros(2, 0))          # a group of none is neither solved nor failed
    refuses("(2, 2)", H.listening, shaped, "all")


def test_unsure_or_disagreeing_tokens_score_high():
    h, d, mask = tensor([[2, 0, 1, 0.2, 3]]), tensor([[0, 1, 0.5, 0.1, 5]]), torch.tensor([[True] * 4 + [False]])
    scores = H.token_scores(h, d, mask)
    same(scores, tensor([[1, 1, 0.75, 0.19, 0]]), "Soft-OR")
    chosen = H.select_tokens(scores, mask)               # half of them unless told
    assert chosen.tolist() == [[True, True, False, False, False]], f"expected tokens 0 and 1, got {chosen}"
    leaked = H.select_tokens(scores_with_padding(h, d, mask), mask, 50)
    assert leaked.tolist() == [[True, False, True, False, False]], f"expected the leaking pad to pick 0 and 2, got {leaked}"


@given(SEEDS, ROWS, LENGTHS, st.booleans())
def test_token_scores_equal_their_loop_and_are_a_symmetric_or(seed, rows, length, constant):
    h, d, mask = randn(seed, rows, length), randn(seed + 1, rows, length), ragged(seed + 2, rows, length)
    h = torch.full_like(h, 0.7) if constant else h
    s = H.token_scores(h, d, mask)
    same(s, tensor(twin_scores(h.tolist(), d.tolist(), mask.tolist())), "scores")
    same(s, H.token_scores(d, h, mask), "arguments exchanged")
    only = lambda x: H.token_scores(x, torch.zeros_like(x), mask)      # a constant scales to 0, which leaves the other alone
    low = torch.maximum(only(h), only(d))
    assert (s >= low - 1e-12).all() and (s <= 1 + 1e-12).all(), f"expected max(h, d) <= s <= 1, got {s}"
    same(H.token_scores(3 * h + 1, d / 7, mask), s, "units and zero points of h and d")
    low = [x.bfloat16() for x in (h, d)]
    same(H.token_scores(*low, mask), H.token_scores(*(x.double() for x in low), mask), "bfloat16, scaled in float32", tol=1e-5)


def test_scores_are_scaled_over_all_routed_tokens():
    h = tensor([[0.0, 1.0], [0.0, 10.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    same(H.token_scores(h, torch.zeros(2, 2, dtype=F64), mask), h / 10, "one scale for the batch (1.0 = one a row)")
    same(H.token_scores(h, torch.zeros(2, 2, dtype=F64), mask & tensor([[1], [0]]).bool()), tensor([[0, 1], [0, 0]]),
         "a row that is not routed does not enter the scale")


def test_scores_are_detached_and_refuse_infinity_only_at_action_tokens():
    h, d, mask = leaf([[1.0, 2.0, 0.0]]), leaf([[0.0, 3.0, 1.0]]), torch.tensor([[True, True, False]])
    assert not H.token_scores(h, d, mask).requires_grad, "expected no graph"
    for garbage in (NAN, INF, -INF):
        dirty = tensor([[0.0, 3.0, garbage]])
        bit_equal(H.token_scores(h, dirty, mask), H.token_scores(h, d, mask), f"{garbage} under the mask")
        for pair in ((h, dirty), (dirty, h)):
            refuses("not finite", H.token_scores, *pair, torch.ones(1, 3, dtype=torch.bool))
    refuses("divergence (1, 2)", H.token_scores, h, torch.zeros(1, 2), mask)
    refuses("entropy (1, 1)", H.token_scores, h[:, :1], d, mask)
    refuses("mask (1, 1)", H.token_scores, h, d, mask[:, :1])
    bit_equal(H.token_scores(h, d, mask & False), torch.zeros(1, 3, dtype=F64), "nothing routed")


@pytest.mark.parametrize("share, tokens, count", [
    (7, 100, 7), (55, 100, 55), (29, 100, 29), (57, 100, 57), (58, 100, 58), (12.5, 8, 1), (12.5, 9, 2), (12.5, 16, 2),
    (20, 1, 1), (20, 2, 1), (20, 3, 1), (50, 5, 3), (0.1, 1000, 1), (100.0, 7, 7), (50, 0, 0)])
def test_the_selected_count_is_exact(share, tokens, count):
    mask = torch.arange(max(tokens, 1))[None] < tokens
    selected = H.select_tokens(randn(0, 1, max(tokens, 1)), mask, share)
    found = selected.sum().item()
    assert found == count == twin_count(str(share), tokens), f"expected {count} of {tokens} at {share} %, got {found}"


def test_a_share_with_many_digits_counts_a_long_completion_exactly():
    for tokens in (3, 2000, 3000, 8192):
        count = H.select_tokens(randn(0, 1, tokens), torch.ones(1, tokens, dtype=torch.bool), 100 / 3).sum().item()
        expected = twin_count(str(100 / 3), tokens)
        assert count == expected, f"expected {expected} of {tokens} tokens at 33.3 %, got {count} (overflow of whole numbers?)"


@given(SEEDS, ROWS, LENGTHS, st.sampled_from([1, 7, 12.5, 33, 50, 99.9, 100]), st.booleans())
def test_select_tokens_equals_its_loop_and_ties_go_to_the_earlier_token(seed, rows, length, share, ties):
    scores, mask = randn(seed, rows, length), randint(seed + 1, 2, rows, length).bool()
    scores = scores.round() if ties else scores
    selected = H.select_tokens(scores, mask, share)
    expected = twin_select(scores.tolist(), mask.tolist(), str(share))
    assert selected.tolist() == expected, f"expected {expected} at {share} %, got {selected}"
    bit_equal(H.select_tokens(scores, mask, 100), mask, "100 percent")


def test_ties_go_to_the_earlier_token_in_a_long_completion_too():
    scores, mask = randint(0, 3, 2, 1000).double(), ragged(1, 2, 1000, 900)      # short rows tie the right way in any sort
    expected = tensor(twin_select(scores.tolist(), mask.tolist(), "50")).bool()
    bit_equal(H.select_tokens(scores, mask), expected, "three scores for a thousand tokens")


@given(SEEDS, st.integers(3, 5), st.integers(2, 3), LENGTHS, st.sampled_from([0.1, 1.0]), st.sampled_from([20, 50, 100]))
def test_rstg_advantages_equal_their_loop(seed, groups, size, length, coef, share):
    case = rstg_case(seed, groups, size, length + 1)
    case["confidence"][-1] = 0
    a = H.rstg_advantages(**case, opd_coef=coef, select_share=share)
    same(a, tensor(twin_rstg(*(x.tolist() for x in case.values()), coef, str(share))), "rstg_advantages")


@given(SEEDS, st.sampled_from([50, 100]))
def test_each_route_hears_exactly_one_voice(seed, share):
    case = rstg_case(seed)
    a = H.rstg_advantages(**case, opd_coef=0.3, select_share=share)
    plain = case["advantages"].reshape(-1, 1) * case["mask"]
    bit_equal(a[4:6], plain[4:6], "a mixed group: plain GRPO")
    bit_equal(a[2:4], torch.zeros_like(a[2:4]), "an all-right group: nothing")
    noise = H.rstg_advantages(**case | {"advantages": randn(seed + 9, 3, 2)}, opd_coef=0.3, select_share=share)
    bit_equal(a[:2], noise[:2], "an all-wrong group does not hear the reward")
    deaf = H.rstg_advantages(**case | {"advantages_opd": randn(seed + 8, 6, 4)}, opd_coef=0.3, select_share=share)
    bit_equal(a[2:], deaf[2:], "the others do not hear the teacher")
    if share == 100:
        same(a[:2], 0.3 * case["confidence"][0] * case["advantages_opd"][:2] * case["mask"][:2], "beta omega A_opd")


@given(SEEDS)
def test_a_teacher_that_never_solves_the_prompt_is_not_heard(seed):
    case = rstg_case(seed)
    case["confidence"][0] = 0
    a = H.rstg_advantages(**case, opd_coef=0.3)
    bit_equal(a[:2], torch.zeros_like(a[:2]), "omega 0")
    logp = leaf(logp_like(seed, 6, 4))
    g = grad(H.grpo_loss(logp, logp.detach(), a, case["mask"]), logp)
    assert (g[:4] == 0).all() and g.isfinite().all() and (g[4:] != 0).any(), f"expected gradient 0 in silent groups only, got {g}"


@given(SEEDS)
def test_a_silent_group_changes_no_other(seed):
    case = rstg_case(seed, groups=4)
    case["outcomes"][3], case["confidence"][3] = 0, 0    # a second all-wrong group, which the teacher never solves
    loud = {**case, "entropy": case["entropy"].clone(), "advantages_opd": case["advantages_opd"].clone()}
    loud["entropy"][6:], loud["advantages_opd"][6:] = 100, -200
    found, expected = (H.rstg_advantages(**c, opd_coef=0.3) for c in (loud, case))
    bit_equal(found, expected, "extreme scores in the silent group")


@given(SEEDS, st.sampled_from([NAN, INF, -INF]))
def test_garbage_under_the_mask_reaches_no_rstg_advantage(seed, garbage):
    case = rstg_case(seed)
    dirty = {**case, **{k: case[k].masked_fill(~case["mask"], garbage) for k in ("advantages_opd", "entropy")}}
    a = H.rstg_advantages(**dirty, opd_coef=0.3)
    bit_equal(a, H.rstg_advantages(**case, opd_coef=0.3), f"{garbage} under the mask")
    assert (a[~case["mask"]] == 0).all(), "expected 0 outside the mask"
    live = {**case, "advantages_opd": leaf(case["advantages_opd"]), "entropy": leaf(case["entropy"])}
    assert not H.rstg_advantages(**live, opd_coef=0.3).requires_grad, "expected the advantages detached"


def test_tokens_that_are_not_selected_stay_in_the_denominator():
    case = rstg_case(0)
    case["mask"][0] = True
    a = H.rstg_advantages(**case, opd_coef=1.0, select_share=25)
    logp = leaf(logp_like(0, 6, 4))
    g = grad(H.grpo_loss(logp, logp.detach(), a, case["mask"]), logp)[0]
    assert (g != 0).sum() == 1, f"expected one selected token of four, got {g}"
    same(g, -a[0] / (6 * 4), "its share is 1 / (B N) with N = 4, not 1")


def test_rstg_keywords_matter_and_wrong_ones_are_named():
    case = rstg_case(1)
    base = H.rstg_advantages(**case, opd_coef=0.3)
    same(H.rstg_advantages(**case, opd_coef=0.6)[:2], 2 * base[:2], "twice the coefficient")
    bit_equal(H.rstg_advantages(**case, opd_coef=0.3, select_share=50), base, "half of the tokens unless told")
    differs(H.rstg_advantages(**case, opd_coef=0.3, select_share=100), base, "select_share")
    differs(H.rstg_advantages(**case | {"confidence": case["confidence"] / 2}, opd_coef=0.3), base, "confidence")
    for share in (0, -5, 100.5):
        refuses(str(share), H.select_tokens, case["entropy"], case["mask"], share)
    refuses("(6, 3)", H.select_tokens, case["entropy"], case["mask"][:, :3], 50)
    refuses("(3, 3)", H.rstg_advantages, **case | {"advantages": torch.zeros(3, 3)}, opd_coef=0.3)
    for name in ("advantages_opd", "entropy", "mask"):
        shapes = ", ".join(f"{x} {'(1, 4)' if x == name else '(6, 4)'}" for x in ("advantages_opd", "entropy", "mask"))
        refuses(shapes, H.rstg_advantages, **case | {name: case[name][:1]}, opd_coef=0.3)


def test_the_papers_weight_reaches_its_floor_at_step_80():
    beta = [H.anneal(step, 5e-3, 5e-5, 1e-3) for step in range(200)]
    same(tensor(beta[:2] + [beta[40]]), tensor([5e-3, 4.95e-3, 3e-3]), "steps 0, 1, 40")
    same(tensor(beta[79:82]), tensor([1.05e-3, 1e-3, 1e-3]), "steps 79, 80, 81", tol=1e-15)
    assert set(beta[81:]) == {1e-3}, f"expected the floor from step 80 on, got {beta[78:82]}"
    assert H.anneal(10**6, 0.2, 0.0, 0.1) == 0.2, "expected slope 0 to be constant"
    assert H.anneal(7, 0.2, 0.01, 0.2) == 0.2, "expected a start on the floor to stay there"
    refuses("0.3", H.anneal, 0, 0.2, 0.01, 0.3)
    refuses("-0.01", H.anneal, 0, 0.2, -0.01, 0.1)


@near_miss("route_groups", "routes by the group's mean against one half: a mixed group listens to the teacher")
def routes_by_majority(outcomes):
    return torch.where(outcomes.mean(1) > 0.5, 1, -1)


@near_miss("route_groups", "every zero-variance group is negative: solved prompts are distilled too")
def routes_by_variance(outcomes):
    return torch.where(outcomes.amax(1) == outcomes.amin(1), -1, 0)


@near_miss("teacher_confidence", "pass@k: one right of eight counts as certainty: human-eval#68")
def confidence_as_pass_at_k(outcomes):
    return outcomes.bool().any(1).double()


@near_miss("token_scores", "padding enters the scaling: trl#3709")
def scores_with_padding(entropy, divergence, mask):
    h, d = ((x - x.min()) / (x.max() - x.min()) for x in (entropy, divergence))
    return (h + d - h * d).masked_fill(~mask, 0.0)


def scaled_or(entropy, divergence, mask, join):
    h, d = (((x - x[mask].min()) / (x[mask].max() - x[mask].min())).masked_fill(~mask, 0.0) for x in (entropy, divergence))
    return join(h, d)


@near_miss("token_scores", "the sum instead of the Soft-OR: leaves [0, 1]")
def scores_as_sum(entropy, divergence, mask):
    return scaled_or(entropy, divergence, mask, lambda h, d: h + d)


@near_miss("token_scores", "the product, a Soft-AND: a certain token on which the teacher disagrees is lost")
def scores_as_and(entropy, divergence, mask):
    return scaled_or(entropy, divergence, mask, lambda h, d: h * d)


@near_miss("token_scores", "scaled in each completion by itself")
def scores_by_row(entropy, divergence, mask):
    rows = [[x[b:b + 1] for x in (entropy, divergence, mask)] for b in range(len(mask))]
    return torch.cat([scaled_or(*row, lambda h, d: h + d - h * d) if row[2].any() else torch.zeros_like(row[0]) for row in rows])


def select_counted(scores, mask, counts):
    order = scores.masked_fill(~mask, -INF).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return mask & (order < tensor(counts)[:, None])


@near_miss("select_tokens", "ceil of the float product: 7 % of 100 is 8: trl#6167", "hundred")
def select_by_float_ceil(scores, mask, share=50.0):
    return select_counted(scores, mask, [math.ceil(share / 100 * n) for n in mask.sum(1).tolist()])


@near_miss("select_tokens", "floor: 20 % of one token is none")
def select_by_floor(scores, mask, share=50.0):
    return select_counted(scores, mask, [share * n // 100 for n in mask.sum(1).tolist()])


@near_miss("select_tokens", "counts padding: short completions keep everything")
def select_of_all_columns(scores, mask, share=50.0):
    return select_counted(scores, mask, [math.ceil(share * scores.shape[1] / 100)] * len(mask))


@near_miss("select_tokens", "one threshold for the batch instead of a share of each completion")
def select_over_the_batch(scores, mask, share=50.0):
    live = scores[mask].sort(descending=True).values
    return mask & (scores >= live[math.ceil(share * len(live) / 100) - 1])


def rstg_wrong(outcomes, advantages, advantages_opd, entropy, mask, confidence, opd_coef, select_share, change):
    """RSTG from its equations with one change; the test of the right one is twin_rstg."""
    advantages_opd, entropy = (x.masked_fill(~mask, 0.0) for x in (advantages_opd, entropy))
    if change == "every zero-variance group":
        outcomes = outcomes * (outcomes.amin(1, keepdim=True) < 1)
    d = advantages_opd if change == "signed" else advantages_opd.abs()
    size, weight = outcomes.shape[1], torch.ones_like(confidence) if change == "no omega" else confidence
    negative = (outcomes.sum(1) == 0).repeat_interleave(size)[:, None].expand_as(mask)
    routed = mask if change in ("scores of all groups", "all groups") else negative & mask
    score = tensor(twin_scores(entropy.tolist(), d.tolist(), routed.tolist()))
    selected = tensor(twin_select(score.tolist(), routed.tolist(), str(select_share))).bool()
    guided = opd_coef * weight.repeat_interleave(size)[:, None] * advantages_opd * selected
    reward = advantages.reshape(-1, 1).expand_as(guided)
    return (guided + reward if change == "all groups" else torch.where(negative, guided, reward)) * mask


RSTG_CHANGES = {
    "every zero-variance group": "also the all-right groups are distilled", "no omega": "the teacher's confidence is dropped",
    "signed": "scores by A_opd instead of its size: strong disagreement counts as none",
    "all groups": "no gate: the teacher is added where the reward already speaks",
    "scores of all groups": "tokens of groups that are not routed enter the scaling"}


def rstg_with(change: str):
    def wrong(*args, opd_coef, select_share=50.0):
        return rstg_wrong(*args, opd_coef, select_share, change)
    wrong.__name__ = "rstg_" + change.replace(" ", "_").replace("-", "_")
    return wrong


for _change, _line in RSTG_CHANGES.items():
    near_miss("rstg_advantages", _line)(rstg_with(_change))


@near_miss("anneal", "min instead of max: falls without end after the floor, and starts at it")
def anneal_with_min(step, start, slope, floor):
    return min(start - slope * step, floor)


@near_miss("anneal", "the slope is taken for a factor")
def anneal_geometric(step, start, slope, floor):
    return max(start * (1 - slope) ** step, floor)


# ---------------------------------------------------------------------------------------------------------------------
# 8  M3 and the cross-signal NTK
# ---------------------------------------------------------------------------------------------------------------------


def twin_residuals(z: list, z_teacher: list, y: int, a: float, share: float) -> dict:
    """dLoss/dz of one position, from the table in the module's docstring."""
    s, t = twin_softmax(z), twin_softmax(z_teacher)
    m = [share * q + (1 - share) * p for p, q in zip(s, t)]
    return {"reward": [-a * ((v == y) - p) for v, p in enumerate(s)],
            "forward_kl": [p - q for p, q in zip(s, t)],
            "reverse_kl": [p * (math.log(p / q) - twin_kl(s, t)) for p, q in zip(s, t)],
            "jsd": [(1 - share) * p * (math.log(p / q) - twin_kl(s, m)) for p, q in zip(s, m)]}


def twin_dot(a: list, b: list) -> float:
    return math.fsum(x * y for x, y in zip(a, b))


def twin_unit(x: list, eps: float) -> list:
    length = math.sqrt(twin_dot(x, x))
    return [v / (length + eps) for v in x]


def logit_case(seed: int, rows: int = 3, length: int = 4, vocab: int = 5) -> tuple:
    """Student logits (a leaf), teacher logits, sampled ids, one advantage a row."""
    return (leaf(2 * randn(seed, rows, length, vocab)), 2 * randn(seed + 1, rows, length, vocab),
            randint(seed + 2, vocab, rows, length), randn(seed + 3, rows, 1))


def residual_pair(seed: int, *shape: int) -> tuple:
    """The two residuals that M3 joins: p_S - p_T and -A (e_y - p_S)."""
    student, teacher, ids, a = logit_case(seed, *shape)
    return H.distillation_residual(student, teacher), H.reward_residual(student, ids, a)


def residual_cosine(d, r):
    return H.cross_signal_ntk(H.unit_residual(d, 0), H.unit_residual(r, 0))


def gathered(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def little_gpt2(seed: int, layers: int = 1):
    """Random weights in float64, hidden 8, 11 tokens: GPT-2, since Qwen3 in transformers keeps its norms in float32."""
    import transformers as t
    torch.manual_seed(seed)
    config = t.GPT2Config(vocab_size=11, n_embd=8, n_layer=layers, n_head=2, n_positions=16, initializer_range=0.5,
                          bos_token_id=None, eos_token_id=2)
    return t.GPT2LMHeadModel(config).double().eval()         # eval: dropout is off


class Scene:
    """3 completions of 4 tokens after prompts of 2, under a student and a teacher; everything the two losses need."""

    def __init__(self, seed: int, layers: int = 1):
        self.model, teacher = little_gpt2(seed, layers), little_gpt2(seed + 1, layers)
        self.parameters = list(self.model.parameters())
        self.whole, self.a = randint(seed + 2, 11, 3, 6), randn(seed + 3, 3, 1)
        self.ids = self.whole[:, 2:]
        self.logits, self.teacher = self.say(), teacher(input_ids=self.whole).logits[:, 1:-1].detach()
        self.d, self.r = H.distillation_residual(self.logits, self.teacher), H.reward_residual(self.logits, self.ids, self.a)
        self.weights = H.token_weights(torch.arange(4) < torch.tensor([[4], [2], [3]]), HOWS[0])

    def say(self):
        return self.model(input_ids=self.whole).logits[:, 1:-1]

    def gradient(self, terms):
        """The flat gradient of the weighted sum of terms."""
        found = torch.autograd.grad((self.weights * terms).sum(), self.parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in found])

    def pull(self, residual):
        """J_n residual_n of every position, one plain backward pass each                  (3, 4, 11) -> (3, 4, P)"""
        rows = []
        for b, t in itertools.product(range(3), range(4)):
            value = sum(self.logits[b, t, v] * residual[b, t, v].item() for v in range(11))
            found = torch.autograd.grad(value, self.parameters, retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in found]))
        return torch.stack(rows).view(3, 4, -1)

    def reward_terms(self):
        logp = gathered(self.logits, self.ids)
        return H.policy_terms(logp, logp.detach(), self.a)


def test_two_tokens_and_two_signals_work_out_by_hand():
    student, teacher, y = tensor([[[0.5, 0.5]]]).log(), tensor([[[0.9, 0.1]]]).log(), torch.tensor([[0]])
    d, r = H.distillation_residual(student, teacher), H.reward_residual(student, y, tensor([[-2.0]]))
    same(d, tensor([[[-0.4, 0.4]]]), "the teacher wants token 0")
    same(r, tensor([[[1.0, -1.0]]]), "the reward punishes it")
    same(H.cross_signal_ntk(d, r), tensor([[-0.8]]), "K_DR = -A (sigma + eta) = 2 (-0.4 + 0)")
    half = 0.5 ** 0.5
    same(H.unit_residual(d, 0.0), tensor([[[-half, half]]]), "unit residual of the teacher")
    same(H.cross_signal_ntk(H.unit_residual(d, 0.0), H.unit_residual(r, 0.0)), tensor([[-1.0]]), "cosine")
    same(H.select_gate(H.cross_signal_ntk(d, r)), tensor([[0.0]]), "Select rejects the teacher")
    soft = H.soft_gate(tensor([[-1.0]]))
    same(soft, tensor([[0.5 / (1 + math.e)]]), "Soft turns it down to 0.13")
    same(H.m3_residual(d, r, soft, 0.0), (1 - 2 * soft)[..., None] * tensor([[[half, -half]]]), "the step goes with the reward")


@given(SEEDS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.sampled_from([0.1, 0.5, 0.8]))
def test_residuals_equal_their_loops(seed, rows, length, vocab, share):
    student, teacher, ids, _ = logit_case(seed, rows, length, vocab)
    a = randn(seed + 4, rows, length)
    reward, jsd = H.reward_residual(student, ids, a), H.distillation_residual(student, teacher, "jsd", share)
    forward, reverse = (H.distillation_residual(student, teacher, kind) for kind in ("forward_kl", "reverse_kl"))
    bit_equal(H.distillation_residual(student, teacher), forward, "the forward KL is the default")
    for b, t in itertools.product(range(rows), range(length)):
        twin = twin_residuals(student[b, t].tolist(), teacher[b, t].tolist(), ids[b, t].item(), a[b, t].item(), share)
        for name, found in {"reward": reward, "forward_kl": forward, "reverse_kl": reverse, "jsd": jsd}.items():
            same(found[b, t], tensor(twin[name]), f"residual of {name}")
            same(found[b, t].sum(), 0.0, f"a constant added to all logits changes nothing, so {name} sums to 0")


@given(SEEDS, ROWS, LENGTHS, st.integers(2, 6))
def test_reward_residuals_are_the_gradients_of_grpo_opd_and_sft(seed, rows, length, vocab):
    student, teacher, ids, a = logit_case(seed, rows, length, vocab)
    logp, logp_teacher = gathered(student, ids), gathered(teacher, ids)
    a_opd = H.opd_advantages(logp, logp_teacher)
    weights, everywhere = torch.full((rows, length), 1 / rows, dtype=F64), torch.ones(rows, length, dtype=torch.bool)
    signals = {"GRPO": ((weights * H.policy_terms(logp, logp.detach(), a)).sum(), a),
               "OPD": (H.opd_loss(logp, logp_teacher, everywhere, HOWS[2], length=1), a_opd),
               "SFT": (H.sft_loss(logp, everywhere, HOWS[2], length=1), torch.ones(rows, 1, dtype=F64))}
    for name, (loss, advantages) in signals.items():
        same(H.reward_residual(student, ids, advantages) / rows, grad(loss, student), f"residual of {name} against autograd")


@given(SEEDS, ROWS, LENGTHS, st.integers(2, 6), st.sampled_from([0.1, 0.5, 0.9]))
def test_distillation_residuals_are_the_gradients_of_the_divergences(seed, rows, length, vocab, share):
    student, teacher, _, _ = logit_case(seed, rows, length, vocab)
    jsd = H.generalized_jsd(student, teacher, share)
    divergences = {"forward_kl": H.forward_kl(student, teacher), "reverse_kl": H.reverse_kl(student, teacher), "jsd": jsd}
    for kind, terms in divergences.items():
        same(H.distillation_residual(student, teacher, kind, share), grad(terms.sum(), student), f"{kind} against autograd")
    tau = jsd.detach().flatten().sort().values[jsd.numel() // 2].item() - 1e-6       # about half of the tokens are above it
    clipped = H.distillation_residual(student, teacher, "jsd", share, clip=tau)
    same(clipped, grad(jsd.clamp(max=tau).sum(), student), "min(JSD, tau) against autograd")
    bit_equal(clipped.ne(0).any(-1), jsd < tau, "exactly the clipped tokens are silent")


@given(SEEDS)
def test_a_clipped_token_is_silent_in_every_form_of_the_residual(seed):
    student, teacher, _, _ = logit_case(seed)
    tau = H.generalized_jsd(student, teacher).median().item()
    above = H.generalized_jsd(student, teacher) > tau
    assert 0 < above.sum() < above.numel(), f"expected tokens on both sides of {tau}, got {above}"
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        found, free = H.distillation_residual(student, teacher, kind, clip=tau), H.distillation_residual(student, teacher, kind)
        bit_equal(found, free.masked_fill(above[..., None], 0.0), f"{kind} where JSD_1/2 > tau")
        bit_equal(H.distillation_residual(student, teacher, kind, clip=0.0), torch.zeros_like(free), f"{kind} at a tau of 0")
    unit = H.unit_residual(H.distillation_residual(student, teacher, clip=tau))
    bit_equal(unit.norm(dim=-1) > 0.5, ~above, "it is clipped before it is normalised")


@given(SEEDS, st.integers(2, 6))
def test_the_mean_residual_of_pg_style_opd_is_that_of_reverse_kl(seed, vocab):
    student, teacher, _, _ = logit_case(seed, 1, 1, vocab)
    p, mean = student.detach().softmax(-1)[0, 0], 0.0
    for y in range(vocab):
        ids = torch.tensor([[y]])
        a = H.opd_advantages(gathered(student, ids), gathered(teacher, ids))
        mean = mean + p[y] * H.reward_residual(student, ids, a)
    same(mean, H.distillation_residual(student, teacher, "reverse_kl"), "expectation over y ~ p_S")


def test_near_agreement_all_divergences_point_one_way():
    student = randn(0, 2, 3, 5)
    teacher = student + 1e-5 * randn(1, 2, 3, 5)
    forward = H.distillation_residual(student, teacher)
    same(H.distillation_residual(student, teacher, "reverse_kl") / forward, torch.ones(2, 3, 5), "reverse KL", tol=1e-3)
    for share in (0.25, 0.5):
        ratio = H.distillation_residual(student, teacher, "jsd", share) / forward
        same(ratio, torch.full((2, 3, 5), share * (1 - share)), f"JSD at {share}: 1/4 of it at one half", tol=1e-3)


@given(SEEDS, ROWS, LENGTHS, st.integers(2, 6))
def test_k_dr_is_minus_a_times_sigma_plus_eta(seed, rows, length, vocab):
    student, teacher, ids, a = logit_case(seed, rows, length, vocab)
    k_dr = H.cross_signal_ntk(H.distillation_residual(student, teacher), H.reward_residual(student, ids, a))
    for b, t in itertools.product(range(rows), range(length)):
        s, q, y = twin_softmax(student[b, t].tolist()), twin_softmax(teacher[b, t].tolist()), ids[b, t].item()
        sigma, eta = s[y] - q[y], twin_dot(q, s) - twin_dot(s, s)
        same(k_dr[b, t], -a[b, 0].item() * (sigma + eta), "K_DR")


@given(SEEDS, ROWS, LENGTHS, st.sampled_from([0.0, 1e-6, 0.1]))
def test_unit_residuals_equal_their_loops_and_their_product_is_the_cosine(seed, rows, length, eps):
    d, r = residual_pair(seed, rows, length, 5)
    unit_d, unit_r = H.unit_residual(d, eps), H.unit_residual(r, eps)
    cosine = residual_cosine(d, r)
    for b, t in itertools.product(range(rows), range(length)):
        x, y = d[b, t].tolist(), r[b, t].tolist()
        same(unit_d[b, t], tensor(twin_unit(x, eps)), "unit residual of the teacher")
        same(unit_r[b, t], tensor(twin_unit(y, eps)), "unit residual of the reward")
        same(cosine[b, t], twin_dot(x, y) / math.sqrt(twin_dot(x, x) * twin_dot(y, y)), "cosine")


def test_noise_does_not_become_a_unit_vector():
    student = 3 * randn(0, 20, 1000).float()
    teacher = student + 5.3                                  # the same distribution; rounded, the logits are not quite the same
    noise = H.distillation_residual(student, teacher)
    assert (noise != 0).any(-1).all(), "expected rounding to leave a residual at every token"
    length = H.unit_residual(noise).norm(dim=-1)
    assert length.max() < 0.5, f"expected noise of 1e-7 to stay short beside an eps of 1e-6, got lengths up to {length.max()}"
    long = H.unit_residual(noise, eps=1e-12).norm(dim=-1)
    assert long.min() > 0.99, f"expected an eps of 1e-12 to blow it up, got {long.min()}"
    real = H.unit_residual(H.distillation_residual(student, 3 * randn(1, 20, 1000).float())).norm(dim=-1)
    assert real.min() > 0.9999, f"expected a teacher with an opinion at full length, got {real.min()}"


def test_zero_stays_zero():
    d, r = residual_pair(0)
    zero, alpha = torch.zeros_like(d), torch.full(d.shape[:2], 0.3, dtype=F64)
    bit_equal(H.unit_residual(zero), zero, "unit residual of nothing")
    bit_equal(H.m3_residual(zero, zero, alpha), zero, "M3 of nothing")
    bit_equal(H.m3_residual(zero[..., :1], zero[..., :1], alpha), zero[..., :1], "M3 over a vocabulary of one token")
    same(H.m3_residual(zero, r, alpha), 0.7 * H.unit_residual(r), "a silent teacher leaves the reward its share")
    same(H.m3_residual(d, zero, alpha), 0.3 * H.unit_residual(d), "a silent reward leaves the teacher its share")


# The kernel: the exact K_DR of a model, and the two whole gradients


@pytest.mark.parametrize("bias", [False, True])
@given(seed=SEEDS)
def test_for_the_lm_head_alone_both_forms_of_k_dr_have_one_sign(bias, seed):
    hidden, head = randn(seed, 3, 4, 6), [leaf(randn(seed + 1, 5, 6)), leaf(randn(seed + 2, 5))]
    logits = hidden @ head[0].T + (head[1] if bias else 0.0)
    d = H.distillation_residual(logits, 2 * randn(seed + 3, 3, 4, 5))
    r = H.reward_residual(logits, randint(seed, 5, 3, 4), randn(seed + 4, 3, 1))
    exact, cosine = H.exact_cross_signal_ntk(logits, head[:1 + bias], d, r, eps=0.0)
    residual = H.cross_signal_ntk(d, r)
    kernel = hidden.square().sum(-1) + bias      # J_n delta = delta outer (h_n, 1), so K(n, n) = (|h_n|^2 + 1) identity
    same(exact, kernel * residual, "exact K_DR is the residual form times a positive number")
    bit_equal(exact.sign(), residual.sign(), "signs")
    same(cosine, residual_cosine(d, r), "and the two cosines are one")


@pytest.mark.parametrize("seed, layers", [(0, 1), (10, 2), (20, 2)])
def test_exact_k_dr_is_two_backward_passes_a_position(seed, layers, monkeypatch):
    scene = Scene(seed, layers)
    scene.d[0, 1], scene.r[2, 2] = 0.0, 0.0                  # two silent positions
    scene.d[1, 1, 3], scene.r[1, 2, 5] = 0.0, 0.0            # two that are silent on one token of the vocabulary only
    plain, passes = torch.autograd.grad, []
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", lambda y, x, probes, **k: (passes.append(len(probes)), plain(y, x, probes, **k))[1])
        found, cosine = H.exact_cross_signal_ntk(scene.logits, scene.parameters, scene.d, scene.r)
    assert sum(passes) == 2 * 10, f"expected two passes for each of the 10 positions that speak, got {passes}"
    h_d, h_r = scene.pull(scene.d), scene.pull(scene.r)
    for b, t in itertools.product(range(3), range(4)):
        x, y = h_d[b, t].tolist(), h_r[b, t].tolist()
        lengths = math.sqrt(twin_dot(x, x) * twin_dot(y, y))
        same(found[b, t], twin_dot(x, y), f"K_DR at {b}, {t}")
        same(cosine[b, t], twin_dot(x, y) / lengths if lengths else 0.0, f"cosine at {b}, {t}")
    assert found[0, 1] == found[2, 2] == cosine[0, 1] == cosine[2, 2] == 0, "expected exactly 0 where a residual is 0"
    agree = (found.sign() == H.cross_signal_ntk(scene.d, scene.r).sign()).double().mean()
    assert agree < 1, f"expected some position where the residual form has the other sign on a whole model, got {agree}"


def test_exact_k_dr_of_bfloat16_logits_is_summed_in_float32_and_passes_over_unused_parameters():
    hidden, head, unused = (randint(seed, 8, *shape).bfloat16() for seed, shape in enumerate(((3, 4, 6), (5, 6), (2, 2))))
    d, r = ((randint(seed, 9, 3, 4, 5) - 4).double() / 4 for seed in (3, 4))     # products of a few digits: bfloat16 holds them
    parameters = [x.requires_grad_() for x in (unused, head)]
    k_dr, cosine = H.exact_cross_signal_ntk(hidden @ head.T, parameters, d, r)
    assert k_dr.dtype == cosine.dtype == torch.float32, f"expected float32, got {k_dr.dtype} and {cosine.dtype}"
    bit_equal(k_dr.double(), hidden.double().square().sum(-1) * (d * r).sum(-1), "K_DR without a rounding")


def test_the_cosine_of_the_exact_k_dr_fades_below_a_product_of_lengths_of_1e_12():
    weight, one = leaf([[[2.0, 3.0]]]), tensor([[[1.0, 0.0]]])
    for slope, expected in ((1.0, 1.0), (1e-6, 0.5), (0.0, 0.0)):
        k_dr, cosine = H.exact_cross_signal_ntk(slope * weight, [weight], one, one)
        same(k_dr, tensor([[slope ** 2]]), f"K_DR where both pulls have length {slope}", tol=1e-16)
        same(cosine, tensor([[expected]]), f"its cosine: {slope ** 2} / ({slope ** 2} + 1e-12)")


def test_exact_k_dr_of_silence_is_zero_and_costs_no_backward_pass():
    logits, weight = randn(0, 2, 3, 5), leaf(randn(1, 5))
    nothing = torch.zeros(2, 3, 5, dtype=F64)
    for pair in ((nothing, logits), (logits, nothing)):
        found, cosine = H.exact_cross_signal_ntk(logits, [weight], *pair)       # logits without a graph: a pass would raise
        bit_equal(found, nothing[..., 0], "K_DR of silence")
        bit_equal(cosine, nothing[..., 0], "its cosine")


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_exact_k_dr_and_the_cross_position_terms_are_the_product_of_the_gradients(seed):
    scene = Scene(seed, layers=2)
    g_r, g_d = scene.gradient(scene.reward_terms()), scene.gradient(H.forward_kl(scene.logits, scene.teacher))
    k_dr, _ = H.exact_cross_signal_ntk(scene.logits, scene.parameters, scene.d, scene.r)
    w, h_d, h_r = scene.weights.flatten(), scene.pull(scene.d).flatten(0, 1), scene.pull(scene.r).flatten(0, 1)
    remainder = sum(w[n] * w[m] * (h_d[n] @ h_r[m]) for n, m in itertools.permutations(range(12), 2))
    same((scene.weights.square() * k_dr).sum() + remainder, g_d @ g_r, "sum_n w_n^2 K_DR(n) + cross-position terms = <g_D, g_R>")
    differs(remainder, 0.0, "the remainder is not nothing")
    differs((scene.weights * k_dr).sum() + remainder, g_d @ g_r, "the weights must be squared")


@pytest.mark.parametrize("seed", [0, 10, 20, 30])
def test_the_drowning_inequality_decides_whether_the_teachers_loss_rises(seed):
    scene = Scene(seed)
    tau = H.generalized_jsd(scene.logits, scene.teacher).max().item() * 0.9
    loss_d = lambda: (scene.weights * H.generalized_jsd(scene.say(), scene.teacher).clamp(max=tau)).sum()
    g_d, g_r = scene.gradient(H.generalized_jsd(scene.logits, scene.teacher).clamp(max=tau)), scene.gradient(scene.reward_terms())
    if g_d @ g_r > 0:                                        # the reward of the other sign: now the two conflict
        g_r = -g_r
    kappa, cosine = H.gradient_geometry(g_r, g_d)
    even = (-kappa * cosine / (1 - kappa * cosine)).item()    # the share at which the threshold is cos phi itself
    same(H.drowning_threshold(kappa, even), cosine, "threshold at that share")
    before, start = loss_d().item(), [p.detach().clone() for p in scene.parameters]
    for share in (0.0, 0.5 * even, 0.97 * even, 1.03 * even, (1 + even) / 2, 1.0):
        step = 1e-7 * ((1 - share) * g_r + share * g_d)
        torch.nn.utils.vector_to_parameters(torch.cat([p.flatten() for p in start]) - step, scene.parameters)
        with torch.no_grad():
            change = loss_d().item() - before
        drowned = bool(cosine < H.drowning_threshold(kappa, share))
        assert drowned == (share < even), f"expected drowning below the share {even}, got {drowned} at {share}"
        assert (change > 0) == drowned, f"expected L_D to {'rise' if drowned else 'fall'} at share {share}, got {change}"
        slope = share + (1 - share) * kappa * cosine
        same(change / (1e-7 * g_d.norm() ** 2), -slope, "first-order change", tol=1e-3)


# The gates, and the M3 residual


def select_geometry(scene, gate_of, max_share: float) -> tuple:
    """<h_H, h_R> and |h_R|^2 of every position, where the gate is that of K_DR = gate_of(unit_D, unit_R)."""
    d, r = H.unit_residual(scene.d), H.unit_residual(scene.r)
    h_h = scene.pull(H.m3_residual(scene.d, scene.r, H.select_gate(gate_of(d, r), max_share)))
    h_r = scene.pull(r)
    return (h_h * h_r).sum(-1), h_r.square().sum(-1)


@pytest.mark.parametrize("seed, max_share", [(0, 0.5), (10, 0.9), (20, 1.0), (30, 0.15)])
def test_select_with_the_exact_gate_works_at_no_token_against_its_own_reward(seed, max_share):
    scene = Scene(seed, layers=2)
    exact = lambda d, r: H.exact_cross_signal_ntk(scene.logits, scene.parameters, d, r)[0]
    joint, alone = select_geometry(scene, exact, max_share)
    assert (alone > 0).all() and (joint >= (1 - max_share) * alone - 1e-9).all(), \
        f"expected <h_H, h_R> >= (1 - max share) |h_R|^2 at every token, got {joint} against {(1 - max_share) * alone}"
    always = lambda d, r: torch.ones(3, 4)
    joint, alone = select_geometry(scene, always, max_share)
    assert (joint < (1 - max_share) * alone - 1e-3).any(), "expected the bound broken where no gate is"


def test_select_with_the_residual_gate_can_work_against_the_reward():
    scene = Scene(20, layers=2)             # the first of seeds 0, 10, 20 ... where it fails by half of |h_R|^2
    joint, alone = select_geometry(scene, H.cross_signal_ntk, 0.5)
    gap = (joint - 0.5 * alone) / alone
    assert gap.min() < -0.5, f"expected a token where the bound fails by half of |h_R|^2, got {gap}"


@given(SEEDS, ROWS, LENGTHS, st.sampled_from([0.0, 0.15, 0.5, 1.0]), st.sampled_from([0.0, 1.0, 5.0]))
def test_gates_and_the_m3_residual_equal_their_loops(seed, rows, length, max_share, sharpness):
    d, r = residual_pair(seed, rows, length, 4)
    k_dr = H.cross_signal_ntk(d, r)
    cosine = residual_cosine(d, r)
    select, soft = H.select_gate(k_dr, max_share), H.soft_gate(cosine, max_share, sharpness)
    mixes = [(gate, H.m3_residual(d, r, gate, 1e-3)) for gate in (select, soft)]
    for b, t in itertools.product(range(rows), range(length)):
        same(select[b, t], max_share if k_dr[b, t].item() >= 0 else 0.0, "Select: alpha_max [K_DR >= 0]")
        same(soft[b, t], max_share / (1 + math.exp(-sharpness * cosine[b, t].item())), "Soft: alpha_max sigmoid(beta cos phi)")
        x, y = twin_unit(d[b, t].tolist(), 1e-3), twin_unit(r[b, t].tolist(), 1e-3)
        for gate, mix in mixes:
            alpha = gate[b, t].item()
            same(mix[b, t], tensor([alpha * u + (1 - alpha) * v for u, v in zip(x, y)]), "alpha unit_D + (1 - alpha) unit_R")


def test_a_k_dr_of_exactly_zero_admits_the_teacher():
    k_dr = tensor([[-1e-300, -0.0, 0.0, 1e-300]])
    same(H.select_gate(k_dr), tensor([[0.0, 0.5, 0.5, 0.5]]), "Select at its edge")
    same(H.select_gate(k_dr, 0.15), tensor([[0.0, 0.15, 0.15, 0.15]]), "with another share")


def test_sharpness_to_infinity_turns_soft_into_select():
    cosine = tensor([[-1.0, -0.3, -1e-3, 1e-3, 0.3, 1.0]])
    gaps = [(H.soft_gate(cosine, 0.4, beta) - H.select_gate(cosine, 0.4)).abs().max().item() for beta in (1.0, 1e2, 1e4, 1e6)]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.1, f"expected Soft to come nearer to Select, got gaps {gaps}"
    bit_equal(H.soft_gate(cosine, 0.4, INF), H.select_gate(cosine, 0.4), "at infinity")
    assert gaps[-1] < 1e-12, f"expected Select at a sharpness of 1e6, got a gap of {gaps[-1]}"
    for beta in (1.0, 1e6):
        same(H.soft_gate(tensor([[0.0]]), 0.4, beta), tensor([[0.2]]), "at exactly zero: half of Select's share")


def test_gates_carry_no_gradient_and_neither_does_any_residual():
    student, teacher, ids, a = logit_case(0)
    teacher, a, k = leaf(teacher), leaf(a), leaf(randn(4, 3, 4))
    d, r = H.distillation_residual(student, teacher, clip=0.3), H.reward_residual(student, ids, a)
    d_leaf, r_leaf = leaf(d), leaf(r)
    made = {"reward_residual": r, "distillation_residual": d, "unit_residual": H.unit_residual(d_leaf),
            "cross_signal_ntk": H.cross_signal_ntk(d_leaf, r_leaf), "select_gate": H.select_gate(k), "soft_gate": H.soft_gate(k),
            "m3_residual": H.m3_residual(d_leaf, r_leaf, k),
            "pcgrad": torch.cat(H.pcgrad(leaf(randn(5, 4)), leaf(randn(6, 4))))}
    for name, found in made.items():
        assert not found.requires_grad, f"expected {name} to be a constant"
    terms = H.residual_terms(student, r_leaf)
    bit_equal(grad(terms.sum(), student), r, "gradient of residual_terms with respect to the logits")
    assert (grad(terms.sum(), r_leaf) == 0).all(), "expected none with respect to the residual"


@given(SEEDS)
def test_a_rejected_teacher_restores_the_full_weight_of_the_reward(seed):
    d, r = residual_pair(seed)
    k_dr = -H.cross_signal_ntk(d, r).abs()
    bit_equal(H.m3_residual(d, r, H.select_gate(k_dr)), H.unit_residual(r), "M3 where every token conflicts")


@given(SEEDS, st.booleans(), st.sampled_from([1e-3, 1e3]))
def test_rescaling_a_signal_leaves_the_m3_residual_unchanged(seed, of_teacher, factor):
    d, r = residual_pair(seed)
    scaled_d, scaled_r = (d * factor, r) if of_teacher else (d, r * factor)

    def mix(x, y, eps):
        gates = H.select_gate(H.cross_signal_ntk(x, y)), H.soft_gate(residual_cosine(x, y))
        return [H.m3_residual(x, y, gate, eps) for gate in gates]

    smallest = min(x.norm(dim=-1).min().item() for x in (d, r, scaled_d, scaled_r))
    for eps in (0.0, 1e-6):
        for found, before in zip(mix(scaled_d, scaled_r, eps), mix(d, r, eps)):
            same(found, before, f"M3, a signal times {factor}: the same up to eps over the norm", tol=1e-9 + eps / smallest)
    loud = (scaled_d + scaled_r - d - r).abs().max()
    assert loud > 0.1 * max(d.abs().max(), r.abs().max()), "expected the naive sum of the two to change"


def test_equal_rewards_leave_the_teachers_part_alone():
    student, teacher, ids, _ = logit_case(0, 4)
    a = H.group_advantages(tensor([[0.2, 0.2, 0.2, 0.2]])).reshape(-1, 1)
    d, r = H.distillation_residual(student, teacher), H.reward_residual(student, ids, a)
    same(H.m3_residual(d, r, H.select_gate(H.cross_signal_ntk(d, r))), 0.5 * H.unit_residual(d), "Select")
    cosine = H.cross_signal_ntk(H.unit_residual(d), H.unit_residual(r))
    same(H.m3_residual(d, r, H.soft_gate(cosine, 0.6)), 0.3 * H.unit_residual(d), "Soft")


@given(SEEDS, st.sampled_from([0.15, 0.5, 1.0]))
def test_a_teacher_equal_to_the_student_leaves_the_reward_alone(seed, max_share):
    student, _, ids, a = logit_case(seed)
    d, r = H.distillation_residual(student, student.detach().clone()), H.reward_residual(student, ids, a)
    cosine = H.cross_signal_ntk(H.unit_residual(d), H.unit_residual(r))
    for gate, left in ((H.select_gate, 1 - max_share), (H.soft_gate, 1 - max_share / 2)):
        same(H.m3_residual(d, r, gate(cosine, max_share)), left * H.unit_residual(r), f"{gate.__name__}: the reward times {left}")


@pytest.mark.parametrize("seed", [0, 10, 20])
@pytest.mark.parametrize("soft", [False, True])
def test_one_backward_pass_adds_the_gated_unit_pulls_of_all_tokens(seed, soft):
    scene = Scene(seed, layers=2)
    exact, cosine = H.exact_cross_signal_ntk(scene.logits, scene.parameters, scene.d, scene.r)
    alpha = H.soft_gate(cosine, 0.4) if soft else H.select_gate(exact, 0.4)
    found = scene.gradient(H.residual_terms(scene.logits, H.m3_residual(scene.d, scene.r, alpha)))
    unit = lambda x: tensor([[twin_unit(row, 1e-6) for row in rows] for rows in x.tolist()])
    h_d, h_r, total = scene.pull(unit(scene.d)), scene.pull(unit(scene.r)), 0.0
    for b, t in itertools.product(range(3), range(4)):
        total = total + scene.weights[b, t] * (alpha[b, t] * h_d[b, t] + (1 - alpha[b, t]) * h_r[b, t])
    same(found, total, "one backward pass against J_n [alpha_n unit_D + (1 - alpha_n) unit_R], a token at a time")


@given(SEEDS, st.booleans())
def test_a_token_that_cannot_come_changes_no_residual(seed, of_both):
    student, teacher, ids, a = logit_case(seed, 2, 3, 4)
    wide = lambda x, fill: torch.cat([x.detach(), torch.full((2, 3, 1), fill, dtype=F64)], dim=-1)
    never, teachers = leaf(wide(student, -INF)), wide(teacher, -INF if of_both else 0.7)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        found = H.distillation_residual(never, teachers, kind)
        assert found.isfinite().all(), f"expected {kind} finite beside a logit of -inf, got {found}"
        if of_both:
            same(found[..., :-1], H.distillation_residual(student, teacher, kind), f"{kind} over the others")
        wanted = 0.0 if of_both or kind != "forward_kl" else 1.0         # by the teacher alone, and only the forward KL listens
        same(found[..., -1], -wanted * teachers.softmax(-1)[..., -1], f"{kind} at the token")
    r = H.reward_residual(never, ids, a)
    same(r[..., :-1], H.reward_residual(student, ids, a), "reward residual over the others")
    bit_equal(r[..., -1], torch.zeros(2, 3, dtype=F64), "reward residual at the token")
    residual = randn(seed, 2, 3, 5)
    terms = H.residual_terms(never, residual)
    same(terms, (student * residual[..., :-1]).sum(-1), "a logit of -inf adds 0")
    same(grad(terms.sum(), never), residual * torch.tensor([1, 1, 1, 1, 0]), "and has no gradient")


# The diagnostics, GradNorm and PCGrad


@given(SEEDS, st.integers(1, 6))
def test_kappa_and_cosine_equal_their_loops(seed, size):
    r, d = randn(seed, size), 3 * randn(seed + 1, size)
    kappa, cosine = H.gradient_geometry(r, d)
    x, y = r.tolist(), d.tolist()
    same(kappa, math.sqrt(twin_dot(x, x) / twin_dot(y, y)), "kappa = |g_R| / |g_D|")
    same(cosine, twin_dot(x, y) / math.sqrt(twin_dot(x, x) * twin_dot(y, y)), "cos phi")
    same(H.drowning_threshold(kappa, 0.2), -0.25 / kappa, "threshold at a share of 0.2")


def test_a_zero_gradient_has_no_angle():
    one, zero = torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64)
    for (r, d), expected in {(one, zero): (INF, 0.0), (zero, one): (0.0, 0.0)}.items():
        kappa, cosine = H.gradient_geometry(r, d)
        assert (kappa.item(), cosine.item()) == expected, f"expected kappa and cosine {expected}, got {kappa}, {cosine}"
    kappa, cosine = H.gradient_geometry(zero, zero)
    assert kappa.isnan() and cosine == 0, f"expected no kappa and a cosine of 0 for two silent signals, got {kappa}, {cosine}"


def test_the_louder_the_reward_the_milder_the_conflict_that_drowns():
    found = [H.drowning_threshold(kappa, 0.5).item() for kappa in (0.5, 1.0, 100.0, INF)]
    same(tensor(found), tensor([-2.0, -1.0, -0.01, 0.0]), "kappa 1/2: no angle suffices; infinite: any conflict", tol=1e-6)
    found = [H.drowning_threshold(2.0, share).item() for share in (0.0, 0.5, 0.8, 1.0)]
    same(tensor(found), tensor([0.0, -0.5, -2.0, -INF]), "at shares of the teacher 0, 1/2, 4/5 and 1", tol=1e-6)


def test_silent_tokens_are_counted_once_and_left_out_once():
    k_dr = tensor([[-1.0, 0.0, 2.0, -9.0], [-3.0, 0.0, -9.0, NAN]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    of_all, of_scored = H.conflict_rate(k_dr, mask)
    same(of_all, 2 / 5, "2 conflicts of 5 tokens", tol=1e-6)
    same(of_scored, 2 / 3, "2 conflicts of the 3 tokens where both signals speak", tol=1e-6)
    rate = H.conflict_rate(torch.zeros(2, 4), mask)
    assert rate[0] == 0 and rate[1].isnan(), f"expected 0 of all and no share of none, got {rate}"
    assert all(x.isnan() for x in H.conflict_rate(k_dr, mask & False)), "expected NaN without a token"


def test_the_scale_starts_at_the_first_step_with_a_reward_gradient():
    seen, scale = [], None
    for norm in (0.0, 0.0, 2.0, 0.0, 4.0, 1.0):
        scale = H.ema(scale, norm)
        seen.append(scale)
    second = 0.99 * 2 + 0.01 * 4
    assert seen[:4] == [None, None, 2.0, 2.0], f"expected the scale to start at 2 and to pass over zeros, got {seen}"
    same(tensor(seen[4:]), tensor([second, 0.99 * second + 0.01 * 1]), "0.99 of the old, 0.01 of the new")
    same(tensor([H.ema(3.0, 5.0, 0.5), H.ema(0.0, 5.0, 0.5)]), tensor([4.0, 2.5]), "decay one half; a scale of 0 is a scale")
    assert (H.ema(3.0, 5.0, 0.0), H.ema(3.0, 5.0, 1.0)) == (5.0, 3.0), "expected the new at decay 0 and the old at 1"


def gradnorm_by_hand(share: float, norm_r: float, norm_d: float, rate: float) -> float:
    """Of w_D |g_D| and w_R |g_R| the louder loses `rate` of its log weight, the other wins it; then the sum is made 1."""
    louder = (share * norm_d > (1 - share) * norm_r) - (share * norm_d < (1 - share) * norm_r)
    w_d, w_r = (math.exp(math.log(w) - by) for w, by in ((share, rate * louder), (1 - share, -rate * louder)))
    return w_d / (w_d + w_r)


@pytest.mark.parametrize("kappa", [0.2, 1.0, 9.0, 5000.0])
@pytest.mark.parametrize("start, scale, rate", [(0.001, 1.0, 0.025), (0.5, 1e-6, 0.02), (0.999, 1e6, 0.05)])
def test_gradnorm_settles_where_the_two_norms_are_equal(kappa, start, scale, rate):
    share, seen = start, []
    for _ in range(700):
        share = H.gradnorm_step(share, kappa * scale, scale, rate)
        seen.append(share)
    for share in seen[-100:]:
        odds = share / (1 - share)
        assert abs(math.log(odds / kappa)) <= 2 * rate + 1e-9, f"expected odds within a step of kappa {kappa}, got {odds}"


@given(st.floats(0.1, 0.9), st.floats(0.1, 10), st.floats(0.1, 10), st.sampled_from([0.001, 0.025]))
def test_a_gradnorm_step_equals_its_loop(share, norm_r, norm_d, rate):
    found = H.gradnorm_step(share, norm_r, norm_d, rate)
    if abs(share * norm_d / ((1 - share) * norm_r) - 1) > 1e-9:              # on the edge itself the subgradient has both signs
        same(found, gradnorm_by_hand(share, norm_r, norm_d, rate), "share after one step")
        assert (found < share) == (share * norm_d > (1 - share) * norm_r), "expected the louder part to lose"


def test_gradnorm_stands_still_in_silence_and_at_its_equilibrium():
    same(H.gradnorm_step(0.5, 1.0, 3.0), gradnorm_by_hand(0.5, 1.0, 3.0, 0.025), "the rate is 0.025")
    assert H.gradnorm_step(0.3, 0.0, 2.0) == H.gradnorm_step(0.3, 2.0, 0.0) == 0.3, "expected no step where a norm is 0"
    assert H.gradnorm_step(0.75, 3.0, 1.0) == 0.75 and H.gradnorm_step(0.5, 2.0, 2.0) == 0.5, "expected rest where both are equally loud"


@given(SEEDS, st.integers(2, 6), st.sampled_from([0.01, 1.0, 1000.0]))
def test_pcgrad_leaves_kappa_what_it_was(seed, size, louder):
    r, d = louder * randn(seed, size), randn(seed + 1, size)
    if r @ d > 0:
        r = -r
    new_r, new_d = H.pcgrad(r, d)
    kappa, cosine = H.gradient_geometry(r, d)
    sine = (1 - cosine ** 2).sqrt()
    same(new_r.norm() / r.norm(), sine, "the reward shrinks by the sine", tol=1e-6)
    same(new_d.norm() / d.norm(), sine, "the teacher shrinks by the sine", tol=1e-6)
    same(new_r @ d / (r.norm() * d.norm()), 0.0, "nothing of the reward is left against the teacher")
    same(new_d @ r / (r.norm() * d.norm()), 0.0, "nothing of the teacher is left against the reward")
    if sine > 1e-3:
        same(H.gradient_geometry(new_r, new_d)[0] / kappa, 1.0, "kappa", tol=1e-6)


@given(SEEDS, st.integers(1, 6))
def test_pcgrad_does_nothing_without_a_conflict(seed, size):
    r, d = randn(seed, size), randn(seed + 1, size)
    if r @ d < 0:
        r = -r
    zero = torch.zeros(size, dtype=F64)
    for pair in ((r, d), (zero, d), (r, zero), (zero, zero)):
        for found, before in zip(H.pcgrad(*pair), pair):
            bit_equal(found, before, "a gradient without conflict")


def test_pcgrad_of_opposite_gradients_is_nothing():
    r = tensor([3.0, 4.0])
    for found in H.pcgrad(r, -0.5 * r):
        same(found, tensor([0.0, 0.0]), "what is left of a gradient that only fights")


@pytest.mark.parametrize("rewards, expected", [
    ([0.04] * 9, False), ([0.04] * 10, True), ([0.9] + [0.0] * 10 + [0.9], True), ([0.0] * 9 + [0.5] + [0.0] * 9, False),
    ([0.05] * 20, False), ([0.049] * 10, True), ([0.0] * 9 + [0.05] + [0.0] * 10, True), ([], False)])
def test_collapse_is_ten_steps_in_a_row_under_a_reward_of_five_percent(rewards, expected):
    assert H.collapsed(rewards) is expected, f"expected {expected} for {rewards}"


def test_collapse_has_a_level_and_a_length():
    for below, steps, expected in ((0.3, 2, True), (0.3, 3, False), (0.2, 2, False)):
        assert H.collapsed([0.2, 0.2], below, steps) is expected, f"expected {expected} of two rewards of 0.2 at {below}, {steps}"


@pytest.mark.parametrize("kappa, name", [(0.1, "hybrid"), (1000.0, "hybrid"), (1000.1, "m3-soft"), (5000.0, "m3-soft"),
                                         (5000.1, "m3-select"), (INF, "m3-select")])
def test_the_rule_of_thumb_reads_the_strategy_from_kappa(kappa, name):
    assert H.strategy_for(kappa) == name, f"expected {name} at kappa {kappa}, got {H.strategy_for(kappa)}"


def test_m3_computes_in_float32_at_least():
    student, teacher, ids, a = logit_case(0)
    half = [x.detach().bfloat16() for x in (student, teacher, a, randn(4, 3, 4))]
    z, z_teacher, a, k = half
    d, r = H.distillation_residual(z, z_teacher), H.reward_residual(z, ids, a)
    made = [r, d, H.distillation_residual(z, z_teacher, "jsd", clip=0.3), H.unit_residual(z), H.cross_signal_ntk(z, z_teacher),
            H.select_gate(k), H.soft_gate(k), H.m3_residual(z, z_teacher, k), H.residual_terms(z, z_teacher),
            *H.gradient_geometry(k.flatten(), k.flatten()), *H.pcgrad(k.flatten(), -k.flatten())]
    assert {x.dtype for x in made} == {torch.float32}, f"expected float32 throughout, got {[x.dtype for x in made]}"
    exact = H.distillation_residual(z.double(), z_teacher.double())
    same(d, exact, "the residual of the rounded logits, computed in float32", tol=1e-6)
    assert exact.dtype == F64, "expected float64 to stay"
    assert H.reward_residual(z.float(), ids, a.double()).dtype == torch.float32, "expected float64 advantages to widen nothing"
    g_r, g_d = z.flatten(), z_teacher.flatten()
    for found, expected in zip(H.gradient_geometry(g_r, g_d), H.gradient_geometry(g_r.double(), g_d.double())):
        same(found, expected, "kappa and cosine of the rounded gradients, computed in float32", tol=1e-6)


def test_m3_names_the_shape_the_word_or_the_share_that_it_refuses():
    student, teacher, ids, a = logit_case(0)                 # (3, 4, 5)
    d, k = randn(0, 3, 4, 5), randn(1, 3, 4)
    refuses("ids (3, 3)", H.reward_residual, student, ids[:, :3], a)
    refuses("advantages (1, 4)", H.reward_residual, student, ids, randn(0, 1, 4))
    refuses("teacher_logits (3, 4, 4)", H.distillation_residual, student, teacher[..., :4])
    refuses("'reverse'", H.distillation_residual, student, teacher, "reverse")
    refuses("teacher_share 1.5", H.distillation_residual, student, teacher, "jsd", 1.5)
    refuses("residual_r (3, 1, 5)", H.cross_signal_ntk, d, d[:, :1])
    for name, three in {"logits": (d[..., :1], d, d), "residual_d": (d, d[..., :1], d), "residual_r": (d, d, d[..., :1])}.items():
        refuses(f"{name} (3, 4, 1)", H.exact_cross_signal_ntk, three[0], [], *three[1:])
    refuses("residual_r (3, 4, 1)", H.m3_residual, d, d[..., :1], k)
    refuses("gate (3, 1)", H.m3_residual, d, d, k[:, :1])
    refuses("residual (3, 4, 1)", H.residual_terms, d, d[..., :1])
    refuses("grad_d (1,)", H.gradient_geometry, k.flatten(), k.flatten()[:1])
    refuses("grad_d (1,)", H.pcgrad, k.flatten(), k.flatten()[:1])
    refuses("mask (3, 1)", H.conflict_rate, k, k[:, :1] > 0)
    for share in (-0.1, 1.1, NAN):
        for function in (lambda x: H.select_gate(k, x), lambda x: H.soft_gate(k, x), lambda x: H.drowning_threshold(2.0, x)):
            refuses(f"share {share}", function, share)
        refuses(f"decay {share}", H.ema, 1.0, 2.0, share)


@near_miss("reward_residual", "the sign: climbs the loss, and every punished token becomes likelier")
def reward_residual_flipped(logits, ids, advantages):
    return advantages[..., None] * (F.one_hot(ids, logits.shape[-1]) - logits.softmax(-1))


@near_miss("reward_residual", "-A e_y: the log-softmax differentiated as if it were the logit")
def reward_residual_of_the_logit(logits, ids, advantages):
    return -advantages[..., None] * F.one_hot(ids, logits.shape[-1])


@near_miss("reward_residual", "the gradient of -A p(y) instead of -A log p(y): likely tokens count for more")
def reward_residual_of_the_probability(logits, ids, advantages):
    p = logits.softmax(-1)
    return -advantages[..., None] * p.gather(-1, ids[..., None]) * (F.one_hot(ids, logits.shape[-1]) - p)


@near_miss("reward_residual", "shifts the ids as token_logps does, though these are aligned already")
def reward_residual_shifted(logits, ids, advantages):
    return -advantages[..., None] * (F.one_hot(ids.roll(-1, 1), logits.shape[-1]) - logits.softmax(-1))


def wrong_distillation(student, teacher, kind="forward_kl", teacher_share=0.5, clip=None, change=""):
    """The residuals from their equations with one change; the test of the right ones is twin_residuals."""
    s, t, share = student.softmax(-1), teacher.softmax(-1), teacher_share
    if change == "shares swapped":
        share = 1 - share
    m = share * t + (1 - share) * s if kind == "jsd" else t
    log_ratio = (s / m).log()
    inner = s * (log_ratio - (0.0 if change == "not centred" else (s * log_ratio).sum(-1, keepdim=True)))
    if kind == "jsd" and change != "no outer share":
        inner = (1 - share) * inner
    residual = t - s if change == "p_T - p_S" else s - t if kind == "forward_kl" else inner
    if clip is not None and change != "never clipped":
        height = twin_jsd_of(student, teacher, teacher_share) if change != "clips the forward KL" else (t * (t / s).log()).sum(-1)
        residual = residual.masked_fill((height > clip)[..., None], 0.0)
    if clip is not None and change == "clips each entry":
        residual = (s - t).clamp(-clip, clip)
    return residual


def twin_jsd_of(student, teacher, share):
    pairs = zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1).tolist())
    return tensor([twin_jsd(twin_softmax(s), twin_softmax(t), share) for s, t in pairs]).view(student.shape[:2])


DISTILLATION_CHANGES = {
    "p_T - p_S": ("plain", "the sign: away from the teacher"),
    "not centred": ("reverse", "without -KL: the residual does not sum to 0"),
    "no outer share": ("jsd", "without (1 - l)"), "shares swapped": ("jsd", "l and 1 - l swapped"),
    "never clipped": ("clip", "a token that tau clips still teaches"),
    "clips the forward KL": ("clip", "tau is compared with another divergence"),
    "clips each entry": ("clip", "entries are clamped to tau: a clipped token should be silent")}


def distillation_with(change: str):
    def wrong(*args, **keywords):
        return wrong_distillation(*args, **keywords, change=change)
    wrong.__name__ = "distillation_" + re.sub(r"\W+", "_", change)
    return wrong


for _change, (_case, _line) in DISTILLATION_CHANGES.items():
    near_miss("distillation_residual", _line, _case)(distillation_with(_change))


@near_miss("unit_residual", "one norm for the whole tensor: a loud token still drowns a quiet one")
def unit_over_the_tensor(residual, eps=1e-6):
    return residual / (residual.norm() + eps)


@near_miss("unit_residual", "eps inside the root: lets through a thousandth of what it should hold down", "small")
def unit_with_eps_inside(residual, eps=1e-6):
    return residual / (residual.square().sum(-1, keepdim=True) + eps).sqrt()


@near_miss("unit_residual", "the norm as a floor, max(|delta|, eps): noise above it becomes a unit vector", "small")
def unit_with_floor(residual, eps=1e-6):
    return residual / residual.norm(dim=-1, keepdim=True).clamp(min=eps)


@near_miss("unit_residual", "no eps: nothing over nothing", "zero")
def unit_without_eps(residual, eps=1e-6):
    return residual / residual.norm(dim=-1, keepdim=True)


@near_miss("unit_residual", "the sum of sizes instead of the Euclidean norm")
def unit_by_sum(residual, eps=1e-6):
    return residual / (residual.abs().sum(-1, keepdim=True) + eps)


@near_miss("cross_signal_ntk", "the mean over the vocabulary: K_DR shrinks with the tokenizer")
def ntk_as_mean(residual_d, residual_r):
    return (residual_d * residual_r).mean(-1)


@near_miss("cross_signal_ntk", "the product of the sums, which is 0: a residual sums to 0")
def ntk_of_sums(residual_d, residual_r):
    return residual_d.sum(-1) * residual_r.sum(-1)


@near_miss("cross_signal_ntk", "the sign: the product of the two descent directions with one of them turned")
def ntk_flipped(residual_d, residual_r):
    return -(residual_d * residual_r).sum(-1)


@near_miss("cross_signal_ntk", "summed over the row: one number a completion, spread over its tokens")
def ntk_of_the_row(residual_d, residual_r):
    return (residual_d * residual_r).sum((-2, -1))[:, None].expand(residual_d.shape[:2])


def pulled_wrong(logits, parameters, residual_d, residual_r, mixed: bool, cosine_of: str):
    """Exact K_DR by loops; `mixed` pulls the teacher's residuals of all positions at once."""
    flat = lambda seed: torch.cat([g.flatten() for g in torch.autograd.grad(logits, parameters, seed, retain_graph=True)])
    k_dr, cosine = torch.zeros(2, *logits.shape[:2], dtype=F64)
    for b, t in itertools.product(*map(range, logits.shape[:2])):
        at = torch.zeros_like(logits)
        at[b, t] = 1.0
        h_d, h_r = flat(residual_d if mixed else at * residual_d), flat(at * residual_r)
        k_dr[b, t] = h_d @ h_r
        x, y = (h_d, h_r) if cosine_of == "gradients" else (residual_d[b, t], residual_r[b, t])
        cosine[b, t] = k_dr[b, t] / (x.norm() * y.norm())
    return k_dr, cosine


@near_miss("exact_cross_signal_ntk", "one backward pass of the teacher for all positions: their terms mix")
def exact_ntk_mixed(logits, parameters, residual_d, residual_r, eps=1e-12):
    return pulled_wrong(logits, parameters, residual_d, residual_r, True, "gradients")


@near_miss("exact_cross_signal_ntk", "the cosine divides by the norms of the residuals, not of their pulls: it leaves [-1, 1]")
def exact_ntk_with_cosine_of_residuals(logits, parameters, residual_d, residual_r, eps=1e-12):
    return pulled_wrong(logits, parameters, residual_d, residual_r, False, "residuals")


@near_miss("exact_cross_signal_ntk", "the residual form under the name of the exact one")
def exact_ntk_of_residuals(logits, parameters, residual_d, residual_r, eps=1e-12):
    return (residual_d * residual_r).sum(-1), F.cosine_similarity(residual_d, residual_r, -1)


@near_miss("exact_cross_signal_ntk", "the first parameter only: a layer's kernel is not the model's")
def exact_ntk_of_one_layer(logits, parameters, residual_d, residual_r, eps=1e-12):
    return pulled_wrong(logits, parameters[:1], residual_d, residual_r, False, "gradients")


@near_miss("select_gate", "> 0: where the reward is silent the teacher is too, and nothing is learned")
def select_gate_strict(k_dr, max_share=0.5):
    return max_share * (k_dr > 0).double()


@near_miss("select_gate", "the sign: listens to the teacher exactly where it works against the reward")
def select_gate_inverted(k_dr, max_share=0.5):
    return max_share * (k_dr <= 0).double()


@near_miss("select_gate", "all or nothing: an admitted teacher takes the whole token")
def select_gate_full(k_dr, max_share=0.5):
    return (k_dr >= 0).double()


@near_miss("soft_gate", "without max_share: the teacher may take the whole token")
def soft_gate_full(cosine, max_share=0.5, sharpness=1.0):
    return (sharpness * cosine).sigmoid()


@near_miss("soft_gate", "sharpness forgotten")
def soft_gate_blunt(cosine, max_share=0.5, sharpness=1.0):
    return max_share * cosine.sigmoid()


@near_miss("soft_gate", "tanh: a negative share pushes away from the teacher")
def soft_gate_signed(cosine, max_share=0.5, sharpness=1.0):
    return max_share * (sharpness * cosine).tanh()


@near_miss("soft_gate", "max_share inside the sigmoid")
def soft_gate_inside(cosine, max_share=0.5, sharpness=1.0):
    return (max_share * sharpness * cosine).sigmoid()


def m3_wrong(of_d, of_r, unit=lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6)):
    """M3 with the shares of_d(alpha) and of_r(alpha)"""
    return lambda d, r, gate, eps=1e-6: of_d(gate[..., None]) * unit(d) + of_r(gate[..., None]) * unit(r)


@near_miss("m3_residual", "the shares swapped: a rejected teacher gets everything")
def m3_swapped(residual_d, residual_r, gate, eps=1e-6):
    return m3_wrong(lambda a: 1 - a, lambda a: a)(residual_d, residual_r, gate)


@near_miss("m3_residual", "the teacher is added, the reward keeps its full weight")
def m3_added(residual_d, residual_r, gate, eps=1e-6):
    return m3_wrong(lambda a: a, lambda a: 1.0)(residual_d, residual_r, gate)


@near_miss("m3_residual", "gated but not normalised: the loud signal still drowns the quiet one")
def m3_not_normalised(residual_d, residual_r, gate, eps=1e-6):
    return m3_wrong(lambda a: a, lambda a: 1 - a, lambda x: x)(residual_d, residual_r, gate)


@near_miss("m3_residual", "normalised after they were mixed: the louder one decides the direction")
def m3_normalised_last(residual_d, residual_r, gate, eps=1e-6):
    mix = gate[..., None] * residual_d + (1 - gate[..., None]) * residual_r
    return mix / (mix.norm(dim=-1, keepdim=True) + eps)


@near_miss("residual_terms", "multiplied before it is filled: one logit of -inf makes the loss NaN", "student cannot")
def residual_terms_unfilled(logits, residual):
    return (logits * residual.detach()).sum(-1)


@near_miss("residual_terms", "the residual is not detached: gradients flow through gates and norms", "plain")
def residual_terms_attached(logits, residual):
    return (logits.masked_fill(logits == -INF, 0.0) * residual).sum(-1)


@near_miss("residual_terms", "the probabilities instead of the logits: a second softmax Jacobian")
def residual_terms_of_probabilities(logits, residual):
    return (logits.softmax(-1) * residual.detach()).sum(-1)


@near_miss("residual_terms", "the mean over the vocabulary: the step shrinks with the tokenizer")
def residual_terms_as_mean(logits, residual):
    return (logits.masked_fill(logits == -INF, 0.0) * residual.detach()).mean(-1)


@near_miss("gradient_geometry", "kappa upside down: drowning reads as harmony")
def geometry_inverted(grad_r, grad_d):
    return grad_d.norm() / grad_r.norm(), F.cosine_similarity(grad_r, grad_d, 0)


@near_miss("gradient_geometry", "the ratio of the squared norms")
def geometry_squared(grad_r, grad_d):
    return (grad_r @ grad_r) / (grad_d @ grad_d), F.cosine_similarity(grad_r, grad_d, 0)


@near_miss("gradient_geometry", "the cosine of a zero gradient is 0 / 0", "zero")
def geometry_without_silence(grad_r, grad_d):
    return grad_r.norm() / grad_d.norm(), grad_r @ grad_d / (grad_r.norm() * grad_d.norm())


@near_miss("gradient_geometry", "the plain product, which grows with both norms, for the cosine")
def geometry_without_lengths(grad_r, grad_d):
    return grad_r.norm() / grad_d.norm(), grad_r @ grad_d


@near_miss("drowning_threshold", "alpha and 1 - alpha swapped")
def threshold_swapped(kappa, share):
    return torch.as_tensor(-(1 - share) / (share * kappa))


@near_miss("drowning_threshold", "-alpha / kappa: the reward's own share forgotten")
def threshold_without_the_rewards_share(kappa, share):
    return torch.as_tensor(-share / kappa)


@near_miss("drowning_threshold", "kappa on the wrong side: a louder reward seems safer")
def threshold_times_kappa(kappa, share):
    return torch.as_tensor(-share * kappa / (1 - share))


@near_miss("conflict_rate", "counts what lies outside the mask")
def conflicts_everywhere(k_dr, mask):
    return (k_dr < 0).sum() / mask.sum(), (k_dr < 0).sum() / (k_dr != 0).sum()


@near_miss("conflict_rate", "a silent token is a conflict")
def conflicts_with_silence(k_dr, mask):
    return ((k_dr <= 0) & mask).sum() / mask.sum(), ((k_dr < 0) & mask).sum() / ((k_dr != 0) & mask).sum()


@near_miss("conflict_rate", "one share twice: silent tokens dilute both")
def conflicts_once(k_dr, mask):
    rate = ((k_dr < 0) & mask).sum() / mask.sum()
    return rate, rate


@near_miss("conflict_rate", "the mean of the rows' rates: short completions count for more")
def conflicts_by_row(k_dr, mask):
    found = (k_dr < 0) & mask
    return (found.sum(1) / mask.sum(1)).mean(), (found.sum(1) / ((k_dr != 0) & mask).sum(1)).nanmean()


@near_miss("ema", "starts at 0: the first steps are scaled to a hundredth", "start")
def ema_from_zero(average, value, decay=0.99):
    return decay * (average or 0.0) + (1 - decay) * value


@near_miss("ema", "a step without reward gradient pulls the scale down")
def ema_with_zeros(average, value, decay=0.99):
    return decay * average + (1 - decay) * value


@near_miss("ema", "the decay weighs the new value")
def ema_swapped(average, value, decay=0.99):
    return (1 - decay) * average + decay * value if value else average


@near_miss("gradnorm_step", "the sign: the louder signal gets the larger weight")
def gradnorm_flipped(share, norm_r, norm_d, rate=0.025):
    return gradnorm_by_hand(share, norm_r, norm_d, -rate)


@near_miss("gradnorm_step", "the weights do not sum to 1: the step size drifts")
def gradnorm_without_rescaling(share, norm_r, norm_d, rate=0.025):
    return share * math.exp(-rate if share * norm_d > (1 - share) * norm_r else rate)


@near_miss("gradnorm_step", "as published, descent on the weights themselves: the step depends on the scale of the loss", "loud")
def gradnorm_of_raw_norms(share, norm_r, norm_d, rate=0.025):
    sign = math.copysign(1.0, share * norm_d - (1 - share) * norm_r)
    w_d, w_r = share - rate * norm_d * sign, 1 - share + rate * norm_r * sign
    return w_d / (w_d + w_r)


@near_miss("gradnorm_step", "compares the norms without their weights, so it never rests")
def gradnorm_of_unweighted_norms(share, norm_r, norm_d, rate=0.025):
    return gradnorm_by_hand(share, norm_r / (1 - share), norm_d / share, rate)


def without(of, other):
    return of - (of @ other) / (other @ other) * other


@near_miss("pcgrad", "projects also where the two agree: what both want is lost", "agree")
def pcgrad_always(grad_r, grad_d):
    return without(grad_r, grad_d), without(grad_d, grad_r)


@near_miss("pcgrad", "the second projection uses the already projected first, and finds no conflict left", "conflict")
def pcgrad_in_sequence(grad_r, grad_d):
    new_r = without(grad_r, grad_d)
    return new_r, grad_d if new_r @ grad_d > -1e-12 else without(grad_d, new_r)


@near_miss("pcgrad", "divides by its own norm instead of the other's", "conflict")
def pcgrad_by_its_own_norm(grad_r, grad_d):
    dot = grad_r @ grad_d
    return grad_r - dot / (grad_r @ grad_r) * grad_d, grad_d - dot / (grad_d @ grad_d) * grad_r


@near_miss("pcgrad", "adds the component instead of removing it", "conflict")
def pcgrad_reflected(grad_r, grad_d):
    return 2 * grad_r - without(grad_r, grad_d), 2 * grad_d - without(grad_d, grad_r)


@near_miss("collapsed", "ten bad steps in all, not in a row", "broken")
def collapsed_in_all(rewards):
    return sum(reward < 0.05 for reward in rewards) >= 10


@near_miss("collapsed", "the mean of the last ten: a collapse that was followed by a good step is missed", "passed")
def collapsed_by_mean(rewards):
    return sum(rewards[-10:]) / 10 < 0.05


@near_miss("collapsed", "nine are enough", "nine")
def collapsed_after_nine(rewards):
    return any(all(reward < 0.05 for reward in rewards[i:i + 9]) for i in range(len(rewards) - 8))


@near_miss("collapsed", "at five percent already", "edge")
def collapsed_at_the_edge(rewards):
    return any(all(reward <= 0.05 for reward in rewards[i:i + 10]) for i in range(len(rewards) - 9))


@near_miss("strategy_for", "Soft and Select swapped")
def strategy_swapped(kappa):
    return "m3-soft" if kappa > 5000 else "m3-select" if kappa > 1000 else "hybrid"


@near_miss("strategy_for", ">= 1000: the naive mix is enough up to and with 1000", "edge")
def strategy_at_the_edge(kappa):
    return "m3-select" if kappa >= 5000 else "m3-soft" if kappa >= 1000 else "hybrid"


# ---------------------------------------------------------------------------------------------------------------------
# 9  The hybrid objective
# ---------------------------------------------------------------------------------------------------------------------


@given(SEEDS, ROWS, LENGTHS)
def test_who_listens_is_read_from_the_outcomes(seed, groups, size):
    outcomes = randint(seed, 2, groups, size)
    for n, row in enumerate(outcomes.tolist()):
        expected = {"all": [True] * size, "failed": [r == 0 for r in row], "negative": [not any(row)] * size}
        for where, hears in expected.items():
            assert H.listening(outcomes, where)[n].tolist() == hears, f"expected {hears} for {where} at outcomes {row}"
    refuses("'positive'", H.listening, outcomes, "positive")


def all_streams(name: str, case: dict, coef: float = 0.3, share: float = 50.0):
    c = case
    return H.advantage_streams(H.METHODS[name], c["outcomes"], c["advantages"], c["mask"], coef, c["advantages_opd"],
                               c["entropy"], c["confidence"], share)


@pytest.mark.parametrize("name", list(H.METHODS))
def test_every_method_gets_the_streams_that_its_row_names(name):
    row = H.METHODS[name]
    for seed in range(5):
        case = rstg_case(100 * seed)
        case["advantages"] = randn(seed, 3, 2)           # not zero in equal groups, so that the gate shows
        reward, distillation = all_streams(name, case)
        mask, outcomes = case["mask"], case["outcomes"]
        plain = case["advantages"].reshape(-1, 1) * mask
        negative = (outcomes.sum(dim=1) == 0).repeat_interleave(2)[:, None]
        hears = {"all": negative | True, "negative": negative, "failed": outcomes.reshape(-1, 1) == 0}[row.where]
        guided = 0.3 * case["advantages_opd"] * (hears & mask)
        if row.where == "negative" and row.selected:
            routed = (negative & mask).tolist()
            scores = twin_scores(case["entropy"].tolist(), case["advantages_opd"].abs().tolist(), routed)
            guided = guided * tensor(twin_select(scores, routed, "50")) * case["confidence"].repeat_interleave(2)[:, None]
        gated = plain * ~negative if row.where == "negative" else plain
        same(reward, gated if row.reward else torch.zeros_like(plain), f"reward stream of {name}")
        same(distillation, guided if row.distillation == "pg" else torch.zeros_like(plain), f"distillation stream of {name}")


def test_rstg_without_its_distillation_keeps_the_gate():
    case = rstg_case(0)
    case["advantages"] = randn(0, 3, 2)
    row = H.Config(method="rstg", no_opd=True).row
    reward, distillation = H.advantage_streams(row, case["outcomes"], case["advantages"], case["mask"], 0.3)
    bit_equal(distillation, torch.zeros(6, 4, dtype=F64), "distillation")
    bit_equal(reward, case["advantages"].reshape(-1, 1) * case["mask"] * tensor([[0], [0], [1], [1], [1], [1]]), "reward")
    weightless = H.Config(method="rstg", no_weighting=True).row
    full = case | {"confidence": torch.ones(3, dtype=F64)}
    args = (full["outcomes"], full["advantages"], full["mask"], 0.3, full["advantages_opd"], full["entropy"])
    bit_equal(H.advantage_streams(weightless, *args)[1], all_streams("rstg", full)[1], "no weighting = confidence 1")
    of_booleans = H.advantage_streams(weightless, full["outcomes"].bool(), *args[1:])[1]
    bit_equal(of_booleans, all_streams("rstg", full)[1], "outcomes as booleans: the coefficient stays float64")


@given(SEEDS)
def test_a_mixed_or_solved_group_is_bit_equal_to_plain_grpo_in_gated_methods(seed):
    case = rstg_case(seed)
    for name in ("rstg", "grpo+opd-negative"):
        reward, distillation = all_streams(name, case)
        bit_equal(reward[2:], all_streams("grpo", case)[0][2:], f"reward stream of {name}")
        bit_equal(distillation[2:], torch.zeros(4, 4, dtype=F64), f"distillation of {name} outside the all-wrong group")
        assert not ((reward != 0) & (distillation != 0)).any(), "expected the two never to meet at one token"


def loss_parts(seed: int, case: dict, name: str = "rstg", coef: float = 0.3) -> tuple:
    """(logits, trajectory logits, streams with weights made once) for one step of 6 completions and 2 trajectories."""
    logits, ids, mask = leaf(randn(seed, 6, 5, 4)), randint(seed + 1, 4, 6, 5), case["mask"]
    other, gold, gold_mask = leaf(randn(seed + 2, 2, 4, 4)), randint(seed + 3, 4, 2, 4), ragged(seed + 4, 2, 3, 1)
    logp, weights = H.token_logps(logits, ids), H.token_weights(mask, HOWS[0])
    old = logp.detach() + 0.05 * randn(seed + 5, 6, 4)
    reward, distillation = all_streams(name, case, coef)
    return logits, other, {"reward": (H.policy_terms(logp, old, reward), weights),
                           "distillation": (H.policy_terms(logp, old, distillation), weights),
                           "imitation": (-H.token_logps(other, gold), coef * H.token_weights(gold_mask, HOWS[0]))}


@given(SEEDS, st.sampled_from(["rstg", "grpo+opd", "grpo+opd-failed", "opd", "grpo"]))
def test_the_hybrid_loss_is_the_sum_of_its_streams(seed, name):
    logits, other, streams = loss_parts(seed, rstg_case(seed), name)
    total, parts = H.hybrid_loss(streams), [H.weighted_sum(*pair) for pair in streams.values()]
    same(total, sum(parts), "value")
    for x in (logits, other):
        same(grad(total, x), sum(grad(part, x) for part in parts), "gradient")
    pairs = [(terms.flatten().tolist(), weights.flatten().tolist()) for terms, weights in streams.values()]
    loop = math.fsum(t * w for ts, ws in pairs for t, w in zip(ts, ws))
    same(total, loop, "value against a loop")


@given(SEEDS, st.sampled_from(["rstg", "grpo+opd"]))
def test_the_hybrid_loss_has_the_same_gradient_for_every_split(seed, name):
    logits, other, streams = loss_parts(seed, rstg_case(seed), name)
    whole = grad(H.hybrid_loss(streams), logits, other)
    for size in (1, 4, 6):                               # 4: the last micro-batch is smaller, and holds no trajectory
        parts = [H.hybrid_loss({k: (t[i:i + size], w[i:i + size]) for k, (t, w) in streams.items()}) for i in range(0, 6, size)]
        for index, x in enumerate((logits, other)):
            same(sum(grad(part, x) for part in parts), whole[index], f"gradient in micro-batches of {size}")


@given(SEEDS, st.sampled_from([0.0, NAN, INF]))
def test_a_stream_of_zero_weight_leaves_the_total_bit_equal(seed, value):
    logits, other, streams = loss_parts(seed, rstg_case(seed))
    alone, terms = {"reward": streams["reward"]}, streams["imitation"][0] + value
    both = H.hybrid_loss(alone | {"imitation": (terms, torch.zeros_like(terms))})
    bit_equal(both, H.hybrid_loss(alone), "total")
    bit_equal(grad(both, logits), grad(H.hybrid_loss(alone), logits), "gradient")
    assert (grad(both, other) == 0).all(), "expected gradient exactly 0 in the stream of no weight"


@given(SEEDS)
def test_without_a_negative_group_rstg_is_grpo_bit_for_bit(seed):
    case = rstg_case(seed)
    case["outcomes"][0] = 1
    case["advantages"] = H.group_advantages(case["outcomes"])
    logits, _, streams = loss_parts(seed, case)
    assert (streams["distillation"][0] == 0).all(), "expected no distillation"
    total = H.hybrid_loss({k: streams[k] for k in ("reward", "distillation")})
    plain_logits, _, plain = loss_parts(seed, case, "grpo")
    bit_equal(total, H.weighted_sum(*plain["reward"]), "total")
    bit_equal(grad(total, logits), grad(H.weighted_sum(*plain["reward"]), plain_logits), "gradient")


@given(SEEDS, st.sampled_from(["grpo+opd", "grpo+opd-failed", "grpo+opd-negative", "rstg"]))
def test_half_a_coefficient_adds_half_of_the_terms_own_gradient(seed, name):
    def follow(coef, *which):
        logits, other, streams = loss_parts(seed, rstg_case(seed), name, coef)
        return torch.cat([g.flatten() for g in grad(H.hybrid_loss({k: streams[k] for k in which}), logits, other)])
    every = ("reward", "distillation", "imitation")
    gain = follow(0.5, *every) - follow(0.0, *every)
    same(gain, 0.5 * follow(1.0, *every[1:]), "gradient gained from coefficient 0 to .5")
    differs(gain, torch.zeros_like(gain), "the gradient itself", by=1e-4)


@near_miss("listening", "`failed` read as the groups that failed")
def listening_failed_groups(outcomes, where):
    return (outcomes.amax(1, keepdim=True) == 0).expand_as(outcomes)


@near_miss("advantage_streams", "the reward stays beside the teacher in all-wrong groups, whose gate should replace it")
def streams_without_gate(row, outcomes, advantages, mask, opd_coef, advantages_opd, entropy, confidence, select_share=50.0):
    given_lists = [x.tolist() for x in (outcomes, 0 * advantages, advantages_opd, entropy, mask, confidence)]
    guided = tensor(twin_rstg(*given_lists, opd_coef, str(select_share)))
    return advantages.reshape(-1, 1) * mask, guided


@near_miss("hybrid_loss", "the mean of the streams: an empty stream weakens the others: LUFFY#24")
def hybrid_as_mean(streams):
    return sum((terms * weights).sum() for terms, weights in streams.values()) / len(streams)


@near_miss("hybrid_loss", "a weighted stream is detached: the printed loss moves, the gradient does not: axolotl#3660")
def hybrid_with_dead_stream(streams):
    total = [(terms * weights).sum() for terms, weights in streams.values()]
    return total[0] + sum(x.detach() for x in total[1:])


def test_new_tensors_are_made_on_the_device_of_those_that_were_given():
    scene, ids = Scene(0), torch.tensor([[5, 2, 2], [5, 6, 7]])
    mask, cut, everywhere = torch.tensor([[True, True, False], [True, True, True]]), torch.tensor([False, True]), ids > 0
    chosen = torch.tensor([[True, True, False], [False, True, True]])
    with torch.device("meta"):                           # where a tensor comes to be that names no device: one without numbers
        bit_equal(H.action_mask(ids, [2, 3]), mask, "action_mask")
        bit_equal(H.truncated(ids, [2, 3]), cut, "truncated")
        bit_equal(H.select_tokens(ids.double(), everywhere), chosen, "select_tokens")
        k_dr, cosine = H.exact_cross_signal_ntk(scene.logits, scene.parameters, scene.d, scene.r)
    assert k_dr.isfinite().all() and cosine.isfinite().all(), "expected the kernel on the device of the logits"


# Cases for the functions that SPEC of section 13 leaves out, since they take no tensors or a model: {function: {case: seed -> arguments}}.

STRATEGIES = ("hybrid", "m3-soft", "m3-select")


def two_layers_case(s: int) -> tuple:
    """Logits of a small net that mixes its positions, its parameters, two residuals."""
    first, head = leaf(randn(s, 4, 4)), leaf(randn(s + 1, 5, 6))
    logits = (first @ randn(s + 2, 3, 4, 6)).tanh() @ head.T
    return (logits, [first, head], *residual_pair(s, 3, 4, 5)), {}


def streams_case(s: int) -> tuple:
    case = rstg_case(s) | {"advantages": randn(s, 3, 2)}
    return (H.METHODS["rstg"], *(case[k] for k in ("outcomes", "advantages", "mask")), 0.3, *(case[k] for k in ("advantages_opd", "entropy", "confidence"))), {}


CASES = {
    "exact_cross_signal_ntk": {"plain": two_layers_case},
    "ema": {"plain": lambda s: ((2.0, s / 10, 0.9), {}), "start": lambda s: ((None, 3.0 + s), {})},
    "gradnorm_step": {"plain": lambda s: ((0.2, 1.0 + s / 100, 3.0), {}), "loud": lambda s: ((0.5, 50.0 + s, 70.0), {"rate": 0.001})},
    "collapsed": {"broken": lambda s: (([0.0] * 9 + [0.5] + [0.0] * 9,), {}), "passed": lambda s: (([0.0] * 10 + [0.9] * 9,), {}),
                  "nine": lambda s: (([0.0] * 9,), {}), "edge": lambda s: (([0.05] * 10,), {})},
    "strategy_for": {"plain": lambda s: ((6000.0,), {}), "edge": lambda s: ((1000.0 if s else 5000.0,), {})},
    "advantage_streams": {"plain": streams_case},
}


def tensors_in(x) -> list:
    found = []
    H.over_tensors(found.append, x)
    return found


def outcome(name: str, function, case: str, seed: int) -> list:
    """Values of a call, as a list of float64 tensors."""
    args, keywords = CASES[name][case](seed)
    value = function(*args, **keywords)
    values = tensors_in(value) or [tensor(STRATEGIES.index(value) if isinstance(value, str) else value)]
    return [x.detach().double() for x in values]


@pytest.mark.parametrize("name", [name for name, (function, _, _) in NEAR_MISSES.items() if function in CASES])
def test_every_near_miss_of_what_the_oracle_does_not_judge_is_rejected(name):
    function, wrong, seen = NEAR_MISSES[name]
    gaps = []
    for seed in (0, 10, 20, 30):
        of_wrong, of_right = (outcome(function, f, MISSED_AT[name] or "plain", seed) for f in (wrong, getattr(H, function)))
        for found, right in zip(of_wrong, of_right, strict=True):
            assert found.shape == right.shape and right.isfinite().all(), f"{name}: expected a wrong number, not another shape"
            gaps.append((found - right).abs().nan_to_num(INF, INF).max().item())
    assert max(gaps) > 1e-3, f"expected {name} ({seen}) to differ from {function} by more than 1e-3, got {max(gaps)}"


@pytest.mark.parametrize("name", H.SPEC)
def test_no_function_changes_what_it_was_given(name):
    row = H.SPEC[name]
    for label in H.labels_of(name):
        given = dict(H.make_case(name, label, 3, "float32").arguments)
        before = H.over_tensors(torch.clone, given)
        call = lambda: row.reference(*(given[x] for x in row.inputs.split()), **{k: x for k, x in given.items() if k not in row.inputs.split()})
        first, second = tensors_in(call()), tensors_in(call())
        for x, y in zip(tensors_in(given), tensors_in(before), strict=True):
            bit_equal(x.nan_to_num(7.25), y.nan_to_num(7.25), f"an input of {name}")
        for x, y in zip(first, second, strict=True):
            bit_equal(x.nan_to_num(7.25), y.nan_to_num(7.25), f"{name} called twice")


# ---------------------------------------------------------------------------------------------------------------------
# The toy: tasks, rewards, tokenizer
# ---------------------------------------------------------------------------------------------------------------------

os.environ["HF_HUB_OFFLINE"] = "1"      # the whole specification runs without a network
SMALL = dict(steps=3, prompts_per_step=6, group_size=4, train_prompts=24, eval_problems=8, save_every=0)
STUDENT, TEACHER = (str(toy_tasks.MODELS / name) for name in ("student", "teacher"))


@pytest.mark.parametrize("completion, gold, reward", [
    ("-3", "-3", 1), ("3", "-3", 0), ("+5", "5", 1), ("1,000", "1000", 1), ("The total is 72 clips, altogether.", "72", 1), ("12.0", "12", 1),
    ("012", "12", 1), ("12.5", "12", 0), ("1,0", "10", 0), ("10-4", "4", 1), ("\N{MINUS SIGN}3", "-3", 1), ("", "0", 0), ("no idea", "0", 0),
    ("8 17", "17", 1), ("17 8", "17", 0), ("9" * 100_000, "9", 0), ("1," * 50_000, "1", 1)])
def test_a_reward_reads_the_last_number_exactly(completion, gold, reward):
    began = time.perf_counter()
    assert toy_tasks.number_reward(completion, Decimal(gold)) == reward
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("task", toy_tasks.TASKS.values(), ids=lambda task: task.name)
def test_train_and_evaluation_problems_never_overlap_and_solutions_are_right(task):
    train = {p for seed in range(3) for p in task.problems("train", 300, seed)}
    held_out = {p for seed in range(3) for p in task.problems("eval", 300, seed)}
    assert train and held_out and not train & held_out
    assert task.problems("train", 50, 1) == task.problems("train", 50, 1) != task.problems("train", 50, 2)
    assert {task.difficulty(p) for p in train} == set(task.levels)
    assert all(task.reward(p, task.solution(p)) == 1.0 and task.reward(p, f"{task.answer(p) + 1}") == 0.0 for p in train)


def test_addition_shows_its_columns_with_carry():
    assert toy_tasks.TASKS["addition"].solution((347, 285)) == "12 13 6 632"


def test_the_tokenizer_saves_loads_and_gives_back_every_text(tmp_path):
    from toy_tasks.pretrain import build_tokenizer
    from transformers import AutoTokenizer
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(STUDENT).get_vocab() == AutoTokenizer.from_pretrained(TEACHER).get_vocab()
    for text in ("3 + 5 + 9 =", "8 17", "347 + 285 =", "12 13 6 632", "63 2", "632"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("3 + 5 + 9 =").input_ids) == 6, "one token a number"
    assert len(tokenizer("632").input_ids) == 3 and len(tokenizer("63 2").input_ids) == 2


# ---------------------------------------------------------------------------------------------------------------------
# 10  Models and rollouts
# ---------------------------------------------------------------------------------------------------------------------


def tiny(family: str, vocab: int = 40, **extra):
    import transformers as t
    torch.manual_seed(0)
    size = dict(vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=2)
    if family == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=2,
                                               initializer_range=0.5, **extra))
    elif family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**size, initializer_range=0.5))
    elif family == "gemma":     # layers that see 4 tokens back and layers that see all
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**size, head_dim=8, initializer_range=0.5, sliding_window=4,
                                                       layer_types=["sliding_attention", "full_attention"]))
    elif family == "falcon_mamba":
        model = t.FalconMambaForCausalLM(t.FalconMambaConfig(vocab_size=vocab, hidden_size=16, state_size=4, num_hidden_layers=2, bos_token_id=None,
                                                             eos_token_id=2, pad_token_id=2, initializer_range=0.5))
    else:
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**size, head_dim=8, initializer_range=0.5))
    return model.eval()


class Numbers:
    """The least tokenizer that rollouts need: a text is its ids, written as numbers."""
    eos_token_id, pad_token_id = 2, 2

    def __call__(self, text):
        return type("Encoded", (), {"input_ids": [int(word) for word in text.split()]})

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(i)) for i in ids if int(i) != 2)


def sample(model, prompts=("5 6 7", "8"), group=4, seed=0, length=6, micro_batch=64):
    torch.manual_seed(seed)
    return H.rollout(model, Numbers(), list(prompts), group, temperature=1.0, max_new_tokens=length, micro_batch=micro_batch)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma"])
def test_left_padding_changes_no_score(family):
    model = tiny(family)
    completion = torch.tensor([[7, 8, 2]])
    alone, _ = H.score(model, torch.tensor([[5, 6]]), torch.tensor([[1, 1]]), completion)
    padded, _ = H.score(model, torch.tensor([[0, 0, 0, 5, 6]]), torch.tensor([[0, 0, 0, 1, 1]]), completion)
    assert torch.allclose(alone, padded, atol=1e-5), "left padding must be invisible (position ids, attention mask)"
    if family == "gpt2":        # near miss: no position ids; a rotary model would not show it
        ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 2]])
        wrong = H.token_logps(model(input_ids=ids, attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])).logits, ids)[:, -3:]
        assert (wrong - alone).abs().max() > 0.1


class FixedLogits(torch.nn.Module):
    """A model that says what it is told to say."""
    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids, logits_to_keep, **_):
        return type("Output", (), {"logits": self.logits[:, -logits_to_keep:]})


def test_the_prompt_never_leaks_into_the_loss():
    model = FixedLogits(torch.randn(1, 7, 9, generator=torch.Generator().manual_seed(0)))
    ask = lambda: H.score(model, torch.tensor([[0, 0, 5, 6]]), torch.tensor([[0, 0, 1, 1]]), torch.tensor([[7, 8, 2]]))[0]
    logp = ask()
    logp.sum().backward()
    used = model.logits.grad.abs().sum(dim=-1)[0] > 0
    assert used.tolist() == [False] * 3 + [True] * 3 + [False], "exactly the logits at 3, 4, 5 predict the completion"
    assert logp.shape == (1, 3)


def test_the_score_is_the_cross_entropy_of_the_library():
    model = tiny("llama")
    prompt, answer = torch.tensor([[5]]), torch.tensor([[6, 7, 8]])
    labels = torch.tensor([[-100, 6, 7, 8]])
    theirs = model(input_ids=torch.cat([prompt, answer], 1), labels=labels).loss
    logp, _ = H.score(model, prompt, torch.ones_like(prompt), answer)
    ours = H.sft_loss(logp, torch.ones_like(answer).bool(), "token_mean")
    ours.backward()
    grad = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    theirs.backward()
    assert abs(ours.item() - theirs.item()) < 1e-6
    assert torch.allclose(grad, model.get_input_embeddings().weight.grad, atol=1e-6)


def test_generation_settings_of_a_checkpoint_do_not_reach_a_rollout():
    model = tiny("llama")
    clean = sample(model)
    settings = dict(repetition_penalty=1.3, top_k=3, temperature=0.7, do_sample=True, min_p=0.3, no_repeat_ngram_size=1, suppress_tokens=[5, 9])
    model.generation_config.update(**settings)
    poisoned = sample(model)
    assert torch.equal(clean.completion_ids, poisoned.completion_ids), "a rollout samples softmax(logits / T) and nothing else"
    assert all(getattr(model.generation_config, key) == value for key, value in settings.items()), "the model's own settings come back"
    torch.manual_seed(0)        # near miss: do_sample alone inherits them
    wrong = model.generate(input_ids=clean.prompt_ids, attention_mask=clean.prompt_mask, do_sample=True, max_new_tokens=6, pad_token_id=2)
    assert wrong.shape[1] - 3 != clean.completion_ids.shape[1] or not torch.equal(wrong[:, 3:], clean.completion_ids)


def test_rollouts_are_drawn_with_the_probabilities_that_score_reports():
    model = tiny("qwen3", vocab=5)
    made = sample(model, ["3"], 4000, length=1, micro_batch=4000)
    logits = H.completion_logits(model, made.prompt_ids[:1], made.prompt_mask[:1], made.completion_ids[:1])[0, 0]
    counted = torch.bincount(made.completion_ids[:, 0], minlength=5) / 4000
    assert torch.allclose(counted, logits.softmax(-1).detach(), atol=0.035), "0.035 is over 4 standard errors of a share at 4,000"


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma", "falcon_mamba"])
def test_a_prompt_is_read_once_for_its_group_and_the_same_is_sampled(family, monkeypatch):
    """Left padding, absolute positions, prompts longer than a sliding window; a mamba's state is no keys and values"""
    model, prompts, read = tiny(family), ["5 6 7 8 9 10 11", "8", "9 3 4 4"], []
    model.register_forward_pre_hook(lambda _module, _given, named: read.append(named["input_ids"].shape), with_kwargs=True)
    once, forwards = sample(model, prompts, 4), list(read)
    with monkeypatch.context() as patch:
        patch.setattr(H, "read_once", lambda *_: {})
        read.clear()
        every = sample(model, prompts, 4)
    assert torch.equal(once.completion_ids, every.completion_ids) and torch.equal(once.mask, every.mask)
    assert read[0] == (12, 7) and forwards[0] == (3, 6)
    assert forwards[1] == ((12, 7) if family == "falcon_mamba" else (12, 1)), "only the last prompt token is read by every copy"
    if family != "falcon_mamba":    # and what the first token is drawn from is what score reports, to rounding
        mask = once.prompt_mask[::4]
        with torch.no_grad(), H.sampling_from(model):
            cache = H.read_once(model, once.prompt_ids[::4], mask, 4)
            drawn = model(input_ids=once.prompt_ids[:, -1:], attention_mask=once.prompt_mask, **cache,
                          position_ids=once.prompt_mask.sum(dim=1, keepdim=True) - 1).logits[:, -1]
            scored = H.completion_logits(model, once.prompt_ids, once.prompt_mask, once.completion_ids)[:, 0]
            assert torch.allclose(drawn, scored, atol=1e-5)
            wrong = H.read_once(model, once.prompt_ids[::4].flip(0), mask.flip(0), 4)       # near miss: the cache of other prompts
            drawn = model(input_ids=once.prompt_ids[:, -1:], attention_mask=once.prompt_mask, **wrong,
                          position_ids=once.prompt_mask.sum(dim=1, keepdim=True) - 1).logits[:, -1]
            assert not torch.allclose(drawn, scored, atol=1e-2)


def test_dropout_is_off_and_the_mode_is_restored():
    model = tiny("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    for mode in (True, False):
        model.train(mode)
        first, second = sample(model), sample(model)
        assert model.training is mode and torch.equal(first.completion_ids, second.completion_ids)
    run = make_run(student=model, tokenizer=Numbers())
    made = sample(model)
    everyone = torch.ones(len(made.mask), dtype=torch.bool)
    old, _ = run.score_all(model, made, everyone)
    new, _ = run.forward(model, made, torch.arange(len(made.mask)))
    ratio = (new - old[:, :new.shape[1]]).exp()[made.mask[:, :new.shape[1]]]
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-6)


def test_any_eos_id_ends_a_completion_and_is_part_of_it():
    model = tiny("llama", vocab=6)
    model.generation_config.eos_token_id = [2, 4]
    made = sample(model, ["3", "5 3"], 32, length=12)
    ends = [ids[mask][-1].item() for ids, mask, cut in zip(made.completion_ids, made.mask, made.truncated) if not cut]
    assert set(ends) == {2, 4}, "both ids must be seen to end a completion"
    for ids, mask in zip(made.completion_ids, made.mask):
        assert not torch.isin(ids[mask][:-1], torch.tensor([2, 4])).any(), "nothing is trained after the first eos"


def test_rows_are_cut_to_their_own_length_without_losing_a_token():
    made = sample(tiny("llama"), ["5 6 7", "8"], 8)
    short = made.mask.sum(1).argsort()[:3]
    cut = made.rows(short)
    assert cut.completion_ids.shape[1] == made.mask[short].sum(1).max()
    for row, whole in zip(range(3), short):
        assert cut.completion_ids[row][cut.mask[row]].tolist() == made.completion_ids[whole][made.mask[whole]].tolist()
        assert cut.prompt_ids[row][cut.prompt_mask[row].bool()].tolist() == made.prompt_ids[whole][made.prompt_mask[whole].bool()].tolist()


def tokenizer_with(template=None, adds_bos=True):
    """The toy's words and a <bos>, which the tokenizer puts first, or a template, or both, or none of them"""
    from toy_tasks.pretrain import build_tokenizer
    from tokenizers import processors
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
    tokenizer.chat_template = template
    return tokenizer


TURNS = "{% for m in messages %}{{ {'system': '(', 'user': '*', 'assistant': ')'}[m['role']] }} {{ m['content'] }} {% endfor %}="


@pytest.mark.parametrize("template, adds_bos", [
    (None, True), (TURNS, True), ("{{ bos_token }}" + TURNS, True), ("{{ bos_token }}" + TURNS, False)])
def test_a_prompt_opens_with_one_bos_never_two(template, adds_bos, tmp_path):
    tokenizer, task = tokenizer_with(template, adds_bos), questions(tmp_path)
    task.render(tokenizer)
    prompt, bos = task.prompt(task.rows[0]), tokenizer.bos_token_id
    ids = H.encode(tokenizer, prompt)
    assert ids[0] == bos and ids.count(bos) == 1 and len(ids) > 5
    if adds_bos and prompt.startswith("<bos>"):
        assert tokenizer(prompt).input_ids[:2] == [bos, bos], "near miss: a template's BOS and the tokenizer's"


def folder_of(path: Path, family: str, vocab: int = 120, tokenizer=None) -> str:
    """A tiny random model and the toy's tokenizer, saved as anyone's would be"""
    from toy_tasks.pretrain import build_tokenizer
    tiny(family, vocab).save_pretrained(path)
    (tokenizer or build_tokenizer()).save_pretrained(path)
    return str(path)


def test_rows_that_pad_a_vocabulary_are_never_sampled_and_have_no_probability(tmp_path):
    from transformers import AutoModelForCausalLM
    student, teacher = folder_of(tmp_path / "s", "llama", 128), folder_of(tmp_path / "t", "qwen3", 160)
    run, _, _ = H.prepare(H.Config(method="jsd", student=student, teacher=teacher, out=str(tmp_path / "run")))
    torch.manual_seed(0)
    made = H.rollout(run.student, run.tokenizer, ["3 + 5 =", "7 +"], 64, temperature=1.0, max_new_tokens=8, micro_batch=128)
    raw = AutoModelForCausalLM.from_pretrained(student)
    wrong = H.rollout(raw, run.tokenizer, ["3 + 5 =", "7 +"], 64, temperature=1.0, max_new_tokens=8, micro_batch=128)
    assert made.completion_ids.max() < 120 <= wrong.completion_ids.max(), "near miss: the model as it is"
    ids = made.prompt_ids, made.prompt_mask, made.completion_ids
    for model in (run.student, run.teacher):
        assert H.completion_logits(model, *ids).shape[-1] == 120
    whole = H.completion_logits(raw, *ids)[..., :120]
    sliced = H.token_logps(whole, torch.cat([made.prompt_ids[:, -1:], made.completion_ids], 1))
    logp, _ = H.score(run.student, *ids)
    assert torch.allclose(logp, sliced, atol=1e-5), "the softmax is over real tokens alone"
    assert (logp - H.score(raw, *ids)[0]).max() > 0.01, "near miss: over all rows"
    assert run.student.config.vocab_size == 128, "the weights keep their shape"


# ---------------------------------------------------------------------------------------------------------------------
# 11  One update, and the loop
# ---------------------------------------------------------------------------------------------------------------------


class Scripted:
    """A task whose rewards are given: prompt n, completion g gets rewards[n][g]."""
    name = "scripted"

    def __init__(self, rewards):
        self.rewards, self.asked = rewards, [0] * len(rewards)

    def prompt(self, problem):
        return toy_tasks.TASKS["chain_sum"].prompt((3, 4, 5 + problem % 5, 1 + problem // 5))

    def reward(self, problem, _completion):
        self.asked[problem] += 1
        return float(self.rewards[problem][(self.asked[problem] - 1) % len(self.rewards[problem])])


@functools.cache
def read_model(path):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def make_run(rewards=((1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)), confidence=(1.0, 0.5, 1.0, 0.25), student=None, teacher=None,
             tokenizer=None, trajectory=True, **settings):
    from transformers import AutoTokenizer
    sampled = {} if settings.get("method") == "sft" else {"group_size": len(rewards[0])}
    config = H.Config(**({"prompts_per_step": len(rewards)} | sampled | settings))
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(STUDENT)
    load = lambda path: copy.deepcopy(read_model(path))
    student, task = student or load(STUDENT), Scripted(rewards)
    ids = tokenizer("7 12").input_ids + [1] if not isinstance(tokenizer, Numbers) else [5, 2]
    pool = {task.prompt(n): {"confidence": c, "trajectory": ids if trajectory and c else None} for n, c in enumerate(confidence)}
    return H.Run(config, task, tokenizer, student, teacher or load(TEACHER), load(STUDENT) if config.kl_coef else None,
                         torch.optim.AdamW(student.parameters(), lr=config.lr, weight_decay=0.0), list(range(len(rewards))), pool)


def gradient(run, step=0):
    """The unclipped gradient of one step, as one vector"""
    run.config = dataclasses.replace(run.config, max_grad_norm=1e9)
    metrics = H.train_step(run, step)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in run.student.parameters()]), metrics


def close(a, b, tolerance=2e-5):
    return (a - b).norm() <= tolerance * max(a.norm(), b.norm())


EVERY = [("rstg", {}), ("rstg", {"updates": 2}), ("grpo", {"kl_coef": 0.1}), ("grpo+opd", {"aggregation": "token_mean"}), ("grpo+opd-failed", {}),
         ("opd", {"aggregation": "seq_mean_token_sum_norm"}), ("reverse-kl", {}), ("jsd", {}), ("forward-kl", {}), ("sft", {}), ("teacher-sft", {}),
         ("hybrid", {}), ("gradnorm", {}), ("pcgrad", {"diagnose": True}), ("m3-select", {}), ("m3-soft", {"aggregation": "token_mean"}),
         ("m3-eg", {"lookahead_lr": 0.5})]


@pytest.mark.parametrize("method, settings", EVERY, ids=lambda x: str(x))
def test_any_split_into_micro_batches_gives_the_same_gradient_of_a_step(method, settings, monkeypatch):
    made = H.rollout            # sample once, so that the split alone differs
    monkeypatch.setattr(H, "rollout", lambda *a, **k: made(*a, **(k | {"micro_batch": 256})))
    whole, a = gradient(make_run(method=method, **settings))
    split, b = gradient(make_run(method=method, micro_batch=3, **settings))
    assert whole.norm() > 0 and close(whole, split), "divide once, before the split"
    assert abs(a["loss"] - b["loss"]) < 1e-5


@pytest.mark.parametrize("method, settings", EVERY, ids=lambda x: str(x))
def test_slices_of_the_vocabulary_change_no_gradient(method, settings, monkeypatch):
    whole, a = gradient(make_run(method=method, **settings))
    monkeypatch.setattr(H.InSlices, "SIZE", 1)          # one position at a time
    sliced, b = gradient(make_run(method=method, **settings))
    assert whole.norm() > 0 and close(whole, sliced) and abs(a["loss"] - b["loss"]) < 1e-5


@pytest.mark.parametrize("method, settings", [*EVERY, ("hybrid", {"diagnose": True})], ids=lambda x: str(x))
def test_the_logits_of_a_whole_batch_never_exist_at_once(method, settings):
    run = make_run(method=method, micro_batch=3, **settings)
    seen, look = [], lambda _module, _given, logits: seen.append(logits.shape[:2])
    for model in filter(None, (run.student, run.teacher, run.reference)):
        model.get_output_embeddings().register_forward_hook(look)
    H.train_step(run, 0)
    sampled, scored = {s for s in seen if s[1] == 1}, {s for s in seen if s[1] > 1}
    assert scored and max(rows for rows, _ in scored) <= 3, f"16 completions in micro-batches of 3, seen {scored}"
    assert all(rows <= 4 for rows, _ in sampled), "sampling: a prompt's group, and of its prompt the last position alone"


@pytest.mark.parametrize("method", ["rstg", "m3-soft"])
def test_the_step_whose_memory_is_measured_uses_every_part_of_its_method(method):
    from toy_tasks import memory
    run = memory.build(method, micro_batch=4, vocabulary=300, tokens=6)
    metrics = H.train_step(run, 0)
    assert metrics["grad_norm"] > 0 and metrics["negative_share"] > 0 and metrics["mixed_share"] > 0 and metrics["selected_share"] > 0


@pytest.mark.parametrize("method", ["rstg", "m3-soft", "m3-eg", "gradnorm"])
def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient(method, monkeypatch):
    plain, _ = gradient(make_run(method=method))
    run = make_run(method=method, gradient_checkpointing=True)
    passes, layer = [], run.student.model.layers[0]
    layer.self_attn.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    again, _ = gradient(run)
    assert close(plain, again, 1e-6) and sum(passes) > 0 and len(passes) > sum(passes)
    assert layer.training and not layer.self_attn.training and not run.student.training, "the layers are awake, dropout is not"
    train_twice = len(passes)
    passes.clear()
    other = make_run(method=method)
    other.student.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    gradient(other)
    assert train_twice > len(passes), "a layer is computed once more on the way back"


@pytest.mark.parametrize("method", ["grpo", "rstg", "grpo+opd-failed"])
def test_rows_that_cannot_matter_are_not_computed_and_change_nothing(method, monkeypatch):
    pruned, _ = gradient(make_run(method=method))
    live = H.Signals.live
    monkeypatch.setattr(H.Signals, "live", lambda self, everything: live(self, True))
    assert close(pruned, gradient(make_run(method=method))[0])


@pytest.mark.parametrize("method, passes", [("rstg", 1), ("grpo+opd", 1), ("opd", 1), ("grpo", 1)])
def test_on_policy_the_pass_that_scores_is_the_pass_that_trains(method, passes, monkeypatch):
    made = H.rollout            # sample once, so that the split alone differs
    monkeypatch.setattr(H, "rollout", lambda *a, **k: made(*a, **(k | {"micro_batch": 256})))

    def counted(**settings):
        run, seen = make_run(method=method, **settings), []
        forward = H.Run.forward
        monkeypatch.setattr(H.Run, "forward", lambda self, model, *rest: (seen.append(model is self.student), forward(self, model, *rest))[1])
        found = gradient(run)[0]
        monkeypatch.setattr(H.Run, "forward", forward)
        return found, sum(seen) - (method == "rstg")            # the trajectories take one of their own
    (one, calls), (split, many) = counted(), counted(micro_batch=3)
    assert calls == passes < many and close(one, split), "and the gradient is that of scoring first and training after"


def test_without_a_negative_group_a_step_of_rstg_is_one_of_grpo_bit_for_bit():
    rewards = ((1, 0, 0, 1), (0, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1))
    a, b = gradient(make_run(rewards, method="rstg"))[0], gradient(make_run(rewards, method="grpo"))[0]
    assert a.norm() > 0 and torch.equal(a, b)


def test_the_parts_of_rstg_add_up_and_each_switch_takes_one_away():
    whole = gradient(make_run(method="rstg"))[0]
    no_sft, no_opd = (gradient(make_run(method="rstg", **{part: True}))[0] for part in ("no_sft", "no_opd"))
    neither = gradient(make_run(method="rstg", no_sft=True, no_opd=True))[0]
    reward = gradient(make_run(method="grpo"))[0]
    assert close(neither, reward), "RSTG without both parts is GRPO where rewards are binary"
    assert close(whole - no_sft, no_opd - neither, 1e-4) and (whole - no_sft).norm() > 1e-3, "the parts are a sum"
    for part in (dict(no_weighting=True), dict(select_share=10.0), dict(opd_coef=0.2)):
        assert not close(whole, gradient(make_run(method="rstg", **part))[0], 1e-3), f"{part} must change the gradient"


def test_imitation_is_divided_by_all_prompts():
    run = make_run(method="rstg", no_opd=True)
    value = H.imitate(run, [run.task.prompt(1), run.task.prompt(3)], 4, 0.5)
    logps = []
    for n in (1, 3):
        prompt = torch.tensor([run.tokenizer(run.task.prompt(n)).input_ids])
        answer = torch.tensor([run.pool[run.task.prompt(n)]["trajectory"]])
        logps.append(H.score(run.student, prompt, torch.ones_like(prompt), answer)[0].mean().item())
    assert abs(value - 0.5 * -sum(logps) / 4) < 1e-5, "token mean a trajectory, summed over routed prompts, over all 4 prompts of the step"


def test_a_teacher_that_never_solves_a_prompt_is_silent_there():
    all_wrong = ((0, 0, 0, 0),) * 4
    silent, metrics = gradient(make_run(all_wrong, (0.0,) * 4, method="rstg"))
    assert silent.norm() == 0 and metrics["loss"] == 0 and metrics["negative_share"] == 1


def test_a_step_without_signal_moves_nothing():
    run = make_run(((1, 0), (0, 1)), (1.0, 1.0), method="grpo")
    H.train_step(run, 0)        # builds momentum
    run.task.rewards = ((1, 1), (1, 1))
    before = [p.clone() for p in run.student.parameters()]
    metrics = H.train_step(run, 1)
    assert metrics["positive_share"] == 1 and metrics["grad_norm"] == 0
    assert all(torch.equal(p, q) for p, q in zip(before, run.student.parameters()))


@pytest.mark.parametrize("method", ["rstg", "opd", "jsd", "forward-kl"])
def test_the_teacher_is_frozen(method):
    run = make_run(method=method)
    before = {name: p.clone() for name, p in run.teacher.named_parameters()}
    for step in range(3):
        H.train_step(run, step)
    moved = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    for name, p in run.teacher.named_parameters():
        assert p.grad is None and id(p) not in moved and not p.requires_grad and torch.equal(p, before[name])
    assert not run.teacher.training


def test_teacher_and_student_as_one_object_are_refused_and_a_copy_gives_exactly_nothing():
    run = make_run()
    with pytest.raises(H.UsageError, match="one object"):
        dataclasses.replace(run, teacher=run.student)
    nothing, metrics = gradient(make_run(method="opd", student=run.student, teacher=copy.deepcopy(run.student)))
    assert nothing.norm() == 0 and metrics["loss"] == 0


def test_step_problems_visit_every_prompt_once_an_epoch_whatever_the_batch():
    problems = list(range(10))
    seen = [p for step in range(10) for p in H.step_problems(problems, step, 3, seed=1)]
    assert all(sorted(seen[e * 10:e * 10 + 10]) == problems for e in range(3)) and seen[:10] != seen[10:20]
    assert len(H.step_problems(problems, 0, 25, seed=1)) == 25


def test_the_pool_keeps_the_shortest_finished_correct_trajectory_as_it_was_sampled(monkeypatch):
    ids = torch.tensor([[9, 9, 6, 2], [9, 6, 2, 2], [8, 2, 2, 2], [9, 9, 9, 6], [5, 2, 2, 2], [5, 2, 2, 2], [5, 2, 2, 2], [5, 2, 2, 2]])
    made = H.Rollouts(torch.ones(8, 1).long(), torch.ones(8, 1).long(), ids, H.action_mask(ids, 2), H.truncated(ids, 2))
    monkeypatch.setattr(H, "rollout", lambda *a, **k: made)
    task = type("Six", (), {"prompt": staticmethod(str), "reward": staticmethod(lambda p, text: float(text.split()[-1] == "6"))})
    pool = H.make_pool(None, Numbers(), task, [0, 1], H.Config(teacher_samples=4))
    assert pool["0"] == {"confidence": 0.75, "trajectory": [9, 6, 2]}, "mean@4 counts the truncated one, the trajectory may not be it"
    assert pool["1"] == {"confidence": 0.0, "trajectory": None}


# Reward and divergence together (M3's family)


def double_run(**settings):
    """In float32 a token on which both models are sure leaves 1 - p_S and 1 - p_T only rounding, and normalising blows it up"""
    run = make_run(**settings)
    run.student.double(), run.teacher.double()
    return run


def sampled(run):
    """What train_step samples at step 0, and the signals it makes of it"""
    torch.manual_seed(0)
    problems = H.step_problems(run.problems, 0, run.config.prompts_per_step, 0)
    batch, rewards = H.collect(run, problems)
    return batch, H.listen(run, batch, rewards, torch.ones(len(problems)), 1.0)[0]


def positions(run, batch, signals):
    """Row by row without padding: (student logits with a graph, teacher logits, sampled ids, advantage, weight of each of its tokens)"""
    rows = len(batch.mask)
    for b in range(rows):
        prompt, ids = batch.prompt_ids[b][batch.prompt_mask[b].bool()], batch.completion_ids[b][batch.mask[b]]
        z, teacher = (model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1:-1] for model in (run.student, run.teacher))
        yield z, teacher.detach(), ids, signals.reward[b, 0].item(), 1 / (rows * len(ids))


def pull(run, z, direction):
    found = torch.autograd.grad(z, list(run.student.parameters()), direction, retain_graph=True, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, run.student.parameters())])


def by_hand(run, batch, signals, coefficients):
    """(1/N) sum_n J_n [a unit_D + b unit_R] with two backward passes a token, from the paper's formulas; a, b of K_DR and the exact one"""
    total = 0.0
    for z, zt, ids, a, weight in positions(run, batch, signals):
        for t, y in enumerate(ids):
            p, q = z[t].detach().softmax(0), zt[t].softmax(0)
            m = (p + q) / 2
            near = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2 <= 0.05
            d, r = (p - q) * near, -a * (F.one_hot(y, len(p)) - p)
            unit_d, unit_r = (x / (x.norm() + 1e-6) for x in (d, r))
            at = lambda direction: pull(run, z, torch.zeros_like(z).index_put((torch.tensor(t),), direction))
            h_d, h_r = at(unit_d), at(unit_r)
            a_d, a_r = coefficients(unit_d @ unit_r, h_d @ h_r)
            total = total + weight * (a_d * h_d + a_r * h_r)
    return total


def select(k, exact):
    return (0.5, 0.5) if k >= 0 else (0.0, 1.0)


def soft(k, exact, most=0.5, sharpness=1.0):
    alpha = most / (1 + math.exp(-sharpness * k))
    return alpha, 1 - alpha


@pytest.mark.parametrize("method, settings, coefficients", [
    ("m3-select", {}, select), ("m3-soft", {}, soft),
    ("m3-soft", {"gate_sharpness": 4.0, "max_teacher_share": 0.2}, lambda k, exact: soft(k, exact, 0.2, 4.0)),
    ("m3-select", {"exact_gate": True}, lambda k, exact: select(exact, k))], ids=["select", "soft", "sharp", "exact"])
def test_m3_is_the_gated_sum_of_unit_residuals_scaled_by_the_reward_gradients_norm(method, settings, coefficients):
    run = double_run(method=method, **settings)
    batch, signals = sampled(run)
    expected, reward = by_hand(run, batch, signals, coefficients), gradient(double_run(method="grpo"))[0]
    found, metrics = gradient(run)
    assert abs(metrics["scale"] - reward.norm().item()) < 1e-5 and close(found, metrics["scale"] * expected, 1e-4)


def test_the_gate_follows_the_kernel_it_is_given():
    run = double_run(method="m3-select", exact_gate=True)
    batch, signals = sampled(run)
    kernel = H.exact_kernel(run, batch, signals)
    disagree = 0
    for b, (z, zt, ids, a, _) in enumerate(positions(run, batch, signals)):
        pair = H.two_residuals(run.config, z[None], zt[None], ids[None], torch.full((1, len(ids)), a), torch.ones(1, len(ids), dtype=torch.bool))
        for t in range(len(ids)):
            h_d, h_r = (pull(run, z, torch.zeros_like(z).index_put((torch.tensor(t),), x[0, t] / (x[0, t].norm() + 1e-6))) for x in pair)
            assert abs(kernel[0, b, t] - h_d @ h_r) <= 1e-4 * (h_d.norm() * h_r.norm()) + 1e-9
            assert abs(kernel[1, b, t] - F.cosine_similarity(h_d, h_r, dim=0, eps=1e-12)) < 1e-3
            disagree += int(((h_d @ h_r) * (pair[0][0, t] @ pair[1][0, t])) < 0)
    scored = kernel[0] != 0
    assert abs(gradient(run)[1]["kernel_agreement"] - (1 - disagree / scored.sum().item())) < 1e-6
    for given in (kernel, -kernel):
        signals.kernel = given
        closed = (H.accumulate(run, batch, signals, {"reward": 0.5, "distillation": 0.5})[1]["gate"] == 0).sum()
        assert closed == (given[0] < 0).sum() > 0


def test_the_naive_mix_is_the_weighted_sum_of_its_two_losses():
    run = double_run(method="hybrid", teacher_share=0.3)
    batch, signals = sampled(run)
    loss = 0.0
    for z, zt, ids, a, weight in positions(run, batch, signals):
        p, q = z.softmax(-1), zt.softmax(-1)
        jsd = ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2
        loss = loss + weight * (0.7 * -a * z.log_softmax(-1).gather(1, ids[:, None])[:, 0] + 0.3 * torch.where(jsd > 0.05, 0.05, jsd)).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.student.parameters()), materialize_grads=True)])
    assert close(gradient(run)[0], expected, 1e-4)
    assert close(gradient(double_run(method="hybrid", teacher_share=0.0))[0], gradient(double_run(method="grpo"))[0], 1e-5)


def test_gradnorm_and_pcgrad_join_the_same_two_gradients():
    reward = gradient(double_run(method="grpo"))[0]
    distilled = 2 * gradient(double_run(method="hybrid"))[0] - reward
    assert reward @ distilled != 0 and not close(reward, distilled, 0.1)
    run = double_run(method="gradnorm")
    assert close(gradient(run)[0], (reward + distilled) / 2, 1e-4), "starts at the share given"
    assert run.memory["teacher_share"] == pytest.approx(H.gradnorm_step(0.5, reward.norm().item(), distilled.norm().item()), abs=1e-5)
    assert close(gradient(double_run(method="pcgrad"))[0], sum(H.pcgrad(reward, distilled)) / 2, 1e-3)


def test_eg_restores_parameters_and_optimizer_bit_for_bit_before_its_step():
    run = double_run(method="m3-eg", lookahead_lr=0.5)
    H.train_step(run, 0)        # builds momentum, so that there is an optimizer state to restore
    before = [p.clone() for p in run.student.parameters()], copy.deepcopy(run.optimizer.state_dict())
    step, seen = run.optimizer.step, []

    def watched():
        seen.append(all(torch.equal(p, q) for p, q in zip(run.student.parameters(), before[0]))
                    and str(run.optimizer.state_dict()) == str(before[1]))
        step()

    run.optimizer.step = watched
    H.train_step(run, 1)
    assert seen == [True] and not all(torch.equal(p, q) for p, q in zip(run.student.parameters(), before[0]))


def test_eg_looks_ahead_by_a_plain_step():
    run = double_run(method="m3-eg", lookahead_lr=0.5)
    batch, signals = sampled(run)
    gated_teacher = by_hand(run, batch, signals, lambda k, exact: (select(k, exact)[0], 0.0))
    here = by_hand(run, batch, signals, lambda k, exact: (0.0, 1.0))
    ahead = double_run(method="m3-eg", student=copy.deepcopy(run.student))
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(ahead.student.parameters()).detach() - 0.5 * gated_teacher, ahead.student.parameters())
    expected = by_hand(ahead, batch, signals, lambda k, exact: (0.0, 1.0))
    found = gradient(run)[0]
    assert close(found, expected, 1e-3) and not close(found, here, 1e-2), "the normalised reward's gradient, at the look-ahead"


def test_before_the_first_reward_the_scale_is_one():
    run = double_run(rewards=((0, 0, 0, 0),) * 4, method="m3-soft")
    batch, signals = sampled(run)
    expected = by_hand(run, batch, signals, soft)
    found, metrics = gradient(run)
    assert metrics["scale"] is None and close(found, expected, 1e-5) and found.norm() > 0


def test_with_the_teacher_equal_to_the_student_m3_is_the_reward_times_what_the_gate_leaves():
    for method, left in (("m3-select", 0.5), ("m3-soft", 0.75)):
        run = double_run(method=method)
        run.teacher = copy.deepcopy(run.student)
        alone = double_run(method=method, max_teacher_share=0.0)
        alone.teacher = copy.deepcopy(run.student)
        assert close(gradient(run)[0], left * gradient(alone)[0], 2e-3)


def test_a_group_of_equal_rewards_leaves_the_teachers_part_alone():
    run = double_run(rewards=((1, 1, 1, 1), (0, 0, 0, 0)), confidence=(1.0, 1.0), method="m3-select")
    batch, signals = sampled(run)
    expected = by_hand(run, batch, signals, lambda k, exact: (0.5, 0.0))
    assert expected.norm() > 0 and close(gradient(run)[0], expected, 1e-5)


@pytest.mark.parametrize("method", ["hybrid", "gradnorm", "pcgrad", "m3-select", "m3-soft", "m3-eg", "grpo+opd", "rstg"])
def test_diagnosing_changes_no_gradient(method):
    plain, looked = gradient(make_run(method=method)), gradient(make_run(method=method, diagnose=True))
    assert torch.equal(plain[0], looked[0]) and {"kappa", "cos_phi", "conflict_rate", "drowning"} <= set(looked[1])
    assert "kappa" not in plain[1], "what nobody asked for costs nothing"


@pytest.mark.parametrize("share", [0.5, 0.01, 0.99])
def test_the_diagnosis_is_that_of_the_two_gradients(share):
    reward, mix = gradient(make_run(method="grpo"))[0], gradient(make_run(method="hybrid", teacher_share=share, diagnose=True))
    distilled = (gradient(make_run(method="hybrid"))[0] - reward / 2) * 2
    kappa, cos_phi = (reward.norm() / distilled.norm()).item(), F.cosine_similarity(reward, distilled, dim=0).item()
    assert mix[1]["kappa"] == pytest.approx(kappa, rel=1e-4) and mix[1]["cos_phi"] == pytest.approx(cos_phi, abs=1e-4)
    assert mix[1]["drowning"] == (cos_phi < -share / ((1 - share) * kappa)), "of the naive mix the inequality decides"


def test_drowning_is_seen_where_the_reward_opposes_the_teacher():
    run = make_run(method="hybrid", teacher_share=0.001, diagnose=True)
    batch, signals = sampled(run)
    opposed = [pull(run, z, weight * (zt.softmax(-1) - z.softmax(-1)).detach()) for z, zt, _, _, weight in positions(run, batch, signals)]
    apart = {"reward": sum(opposed), "distillation": -sum(opposed)}
    H.set_gradient(run.student, apart["reward"])
    logs = H.geometry(run, signals, {"k_dr": torch.tensor([-1.0])}, apart, 1.0)
    assert logs["drowning"] and logs["kappa"] == pytest.approx(1, abs=1e-4) and logs["cos_phi"] == pytest.approx(-1, abs=1e-4) and logs["conflict_rate"] == 1


def test_in_a_sampled_token_hybrid_conflict_is_opposite_advantages():
    run = make_run(method="grpo+opd", diagnose=True)
    batch, signals = sampled(run)
    against = (signals.reward * signals.distillation < 0) & batch.mask
    assert gradient(run)[1]["conflict_rate"] == pytest.approx(against.sum().item() / batch.mask.sum().item()) and against.any()


def test_the_logged_change_of_the_distillation_loss_is_the_one_that_the_step_made():
    run = make_run(method="hybrid", diagnose=True, lr=0.01)
    batch, signals = sampled(run)

    def value():
        total = 0.0
        for z, zt, _, _, weight in positions(run, batch, signals):
            p, q = z.detach().softmax(-1), zt.softmax(-1)
            total += weight * (((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2).clamp(max=0.05).sum().item()
        return total

    before, metrics = value(), H.train_step(run, 0)
    assert metrics["distillation_loss"] == pytest.approx(before, abs=1e-6)
    assert metrics["distillation_change"] == pytest.approx(value() - before, abs=1e-6) and abs(value() - before) > 1e-5


def test_m3_keeps_the_stated_defaults():
    c = H.Config(method="m3-soft")
    assert (c.max_teacher_share, c.gate_sharpness, c.divergence_clip, c.scale_decay) == (0.5, 1.0, 0.05, 0.99)
    with pytest.raises(H.UsageError, match="does not read it"):         # it has no ratio, so a second update would be off-policy
        H.Config(method="m3-soft", updates=2)


def run_small(folder, **settings):
    unread = {"group_size"} if settings.get("method") == "sft" else set()
    return H.train(H.Config(**({k: v for k, v in SMALL.items() if k not in unread} | {"out": str(folder)} | settings)))


def metrics_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("method", H.METHODS)
def test_every_method_trains_without_nan(method, tmp_path):
    run_small(tmp_path, method=method)
    lines = metrics_of(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert all(v is None or math.isfinite(v) for v in line.values()) and line["grad_norm"] >= 0
    assert any(line["grad_norm"] > 0 for line in lines), "three steps with not one gradient teach nothing"


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_small(tmp_path / name, seed=seed)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b") != metrics_of(tmp_path / "c")


@pytest.mark.parametrize("method", ["rstg", "m3-soft", "gradnorm"])      # the last two carry a scale and a share from step to step
def test_a_run_stopped_by_a_signal_resumes_to_the_same_weights_bit_for_bit(method, tmp_path, monkeypatch):
    run_small(tmp_path / "whole", steps=4, method=method)
    step = H.train_step

    def stopped(run, number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, number)

    monkeypatch.setattr(H, "train_step", stopped)
    with pytest.raises(SystemExit) as caught:
        run_small(tmp_path / "parts", steps=4, method=method)
    assert caught.value.code == 143 and len(metrics_of(tmp_path / "parts")) == 2, "the step in progress is finished and saved"
    monkeypatch.setattr(H, "train_step", step)
    (tmp_path / "parts" / "checkpoint-3").mkdir()       # an incomplete newer one is passed over
    run_small(tmp_path / "parts", steps=4, method=method, resume=True)
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "parts")
    from safetensors.torch import load_file
    a, b = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def words_of(settings: dict) -> list[str]:
    return [word for name, value in settings.items() for word in (H.flag_of(name), str(value))]


def same_run(a: Path, b: Path):
    from safetensors.torch import load_file
    assert metrics_of(a) == metrics_of(b) and (a / "evaluation.json").read_text() == (b / "evaluation.json").read_text()
    one, two = (load_file(folder / "final" / "model.safetensors") for folder in (a, b))
    assert all(torch.equal(one[key], two[key]) for key in one)


def killed_at(folder: Path, moment: int, **settings) -> int:
    """A child process trains and kills itself with SIGKILL at its n-th write or rename; its exit status"""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    count = itertools.count(1)
    for place, name in ((H.os, "replace"), (H.torch, "save"), (H.shutil, "rmtree"), (H, "train_step")):
        def reached(*given, what=getattr(place, name), **more):
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return what(*given, **more)
        setattr(place, name, reached)
    try:
        run_small(folder, **settings)
    finally:
        os._exit(0)


def test_a_run_killed_at_any_moment_resumes_bit_for_bit(tmp_path):
    settings = dict(steps=4, save_every=1, method="rstg", train_prompts=12, eval_problems=4)
    run_small(tmp_path / "whole", **settings)
    for moment in range(1, 14, 2):      # each resumes what the one before left, and gets a little further
        status = killed_at(tmp_path / "parts", moment, resume=True, **settings)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL or moment > 9
    run_small(tmp_path / "parts", resume=True, **settings)
    same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.pt", "config.json", "tokenizer.json"])
def test_a_broken_checkpoint_is_passed_over_with_one_warning(file, tmp_path, capsys):
    settings = dict(steps=4, save_every=1, method="grpo", eval_problems=0)
    run_small(tmp_path / "whole", **settings)
    run_small(tmp_path / "parts", **settings)
    broken = tmp_path / "parts" / "checkpoint-3" / file
    broken.write_bytes(broken.read_bytes()[:-100])
    capsys.readouterr()
    run_small(tmp_path / "parts", resume=True, **settings)
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == 1 and "checkpoint-3 (" in warned[0] and "goes on from checkpoint-2" in warned[0]
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_resume_goes_on_with_the_same_settings_or_more_steps_only(tmp_path, capsys):
    settings = dict(method="grpo", steps=2, save_every=1, eval_problems=0)
    run_small(tmp_path / "run", **settings)
    words = lambda **more: words_of(SMALL | settings | more)
    capsys.readouterr()
    for change, expected in [(dict(lr=0.5), "--lr 0.5: the run in --out"), (dict(seed=3), "has --seed 0"),
                             (dict(method="rstg"), "--method rstg: the run"), (dict(steps=1), "--steps 1: the run in --out")]:
        assert H.main([*words(**change), "--resume", "--out", str(tmp_path / "run")]) == 2
        printed = capsys.readouterr().err.strip()
        assert expected in printed and len(printed.splitlines()) == 1
    assert H.main([*words(steps=3, save_every=2), "--resume", "--out", str(tmp_path / "run")]) == 0
    run_small(tmp_path / "whole", method="grpo", steps=3, eval_problems=0)
    same_run(tmp_path / "whole", tmp_path / "run")
    assert H.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "4"]) == 0, "what is not given is as it was"
    run_small(tmp_path / "longer", method="grpo", steps=4, eval_problems=0)
    same_run(tmp_path / "longer", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    assert H.main([*words(), "--resume", "--out", str(tmp_path / "run")]) == 2 and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["student", "tokenizer", "torch", "limit"])
def test_a_full_disk_ends_the_run_in_one_line_with_the_last_checkpoint_intact(place, tmp_path, capsys, monkeypatch):
    import resource
    import transformers
    settings = dict(steps=3, save_every=1, method="grpo", eval_problems=0)
    run_small(tmp_path / "whole", **settings)
    step, before = H.train_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(run, number):
        line = step(run, number)
        if number == 1 and place == "limit":            # no file may grow beyond 1,000 bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        elif number == 1:
            owner, name, error = {
                "student": (transformers.PreTrainedModel, "save_pretrained", Exception("I/O error: No space left on device")),
                "tokenizer": (transformers.PreTrainedTokenizerBase, "save_pretrained", OSError(28, "No space left on device")),
                "torch": (torch, "save", RuntimeError("PytorchStreamWriter failed writing file"))}[place]
            def stuck(*_, **__):
                raise error
            monkeypatch.setattr(owner, name, stuck)
        return line

    with monkeypatch.context() as patched:
        patched.setattr(H, "train_step", full)
        try:
            code = H.main([*words_of(SMALL | settings), "--out", str(tmp_path / "run")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    printed = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert code == 1 and len(printed) == 1 and "checkpoint-2 cannot be written" in printed[0] and "--resume" in printed[0]
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "run").glob("checkpoint*")) == ["checkpoint-1"], "complete, or not there"
    run_small(tmp_path / "run", resume=True, **settings)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_resume_starts_a_run_that_was_stopped_before_it_wrote_anything(tmp_path, capsys):
    run_small(tmp_path / "whole", method="grpo", steps=1, eval_problems=0)
    run_small(tmp_path / "run", method="grpo", steps=1, eval_problems=0, resume=True)
    assert "starts from the beginning" in capsys.readouterr().err
    same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("line, expected", [
    ({"truncated_share": 1.0}, "not one completion ended within --max-new-tokens 16"),
    ({"reward_mean": 0.0, "mixed_share": 0.0}, "every reward was 0"),
    ({"mixed_share": 0.0}, "no group held right and wrong answers both"),
    ({}, None), ({"reward_mean": None, "truncated_share": None}, None)])
def test_a_run_that_cannot_learn_says_so_once(line, expected, tmp_path, monkeypatch, capsys):
    line = {"reward_mean": 0.5, "mixed_share": 0.5, "negative_share": 0.2, "positive_share": 0.3, "truncated_share": 0.1} | line
    monkeypatch.setattr(H, "train_step", lambda run, step: {"step": step} | line)
    run_small(tmp_path / "run", method="grpo", steps=19, eval_problems=0)
    assert "warning" not in capsys.readouterr().err, "19 steps may be chance"
    run_small(tmp_path / "run", method="grpo", steps=60, eval_problems=0, overwrite=True)
    warned = [text for text in capsys.readouterr().err.splitlines() if "warning" in text]
    assert len(warned) == (expected is not None) and (not warned or f"warning: for 20 steps {expected}" in warned[0])
    run_small(tmp_path / "run", method="grpo", steps=60, eval_problems=0, overwrite=True, warn_after=0)
    assert "warning" not in capsys.readouterr().err


def test_what_a_run_wrote_loads_in_a_pipeline_and_the_teacher_pool_is_reused(tmp_path, monkeypatch):
    import transformers
    run_small(tmp_path, method="rstg", steps=1)
    speak = transformers.pipeline("text-generation", str(tmp_path / "final"))
    assert "generated_text" in speak("3 + 5 + 9 =", max_new_tokens=4)[0]
    monkeypatch.setattr(H, "make_pool", lambda *a: pytest.fail("the pool of the same teacher and settings is there already"))
    run_small(tmp_path, method="rstg", steps=1, overwrite=True)
    with pytest.raises(H.UsageError, match="--teacher-pool"):
        run_small(tmp_path / "other", method="rstg", seed=5, teacher_pool=str(tmp_path / "teacher_pool.json"))


def test_the_opd_coef_of_the_toy_anneals_in_the_papers_ratio():
    c = H.Config()
    ours, papers = ([H.anneal(t, *x) / x[0] for t in range(120)] for x in ((c.opd_coef, c.opd_coef_slope, c.opd_coef_floor), (5e-3, 5e-5, 1e-3)))
    assert c.opd_coef == 0.1 and all(abs(a - b) < 1e-9 for a, b in zip(ours, papers)), "20 times the paper's, the same shape"


def test_training_on_the_toy_really_teaches_it(tmp_path):
    result = run_small(tmp_path, method="rstg", steps=30, prompts_per_step=24, group_size=8, train_prompts=96, eval_problems=200)
    before, after = (sum(right for right, _ in result[when].values()) / sum(n for _, n in result[when].values()) for when in ("before", "after"))
    assert after > before + 0.10, f"30 steps took accuracy from {before:.2f} to {after:.2f}; expected at least 0.10 more"


# ---------------------------------------------------------------------------------------------------------------------
# 12  Sparse to dense
# ---------------------------------------------------------------------------------------------------------------------

SHORT = dict(teacher_steps=2, warmup_steps=2, opd_steps=2, rl_steps=2, train_prompts=12, prompts_per_step=4, group_size=4, eval_problems=8)


def weights_of(model) -> int:
    return hash(tuple(zlib.crc32(p.detach().cpu().numpy().tobytes()) for p in model.parameters()))


def short_workflow(folder, **settings) -> list[dict]:
    return H.workflow(H.WorkflowConfig(**SHORT | {"out": str(folder)} | settings))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """All stages once, with a checksum of every model before the first and after the last step of each"""
    folder, seen, patch = tmp_path_factory.mktemp("workflow") / "all", {}, pytest.MonkeyPatch()
    step = H.train_step

    def watch(run, number):
        teacher = run.teacher and weights_of(run.teacher)
        known = seen.setdefault(Path(run.config.out).name, {"start": weights_of(run.student), "teacher": teacher, "config": run.config})
        line = step(run, number)
        known |= {"end": weights_of(run.student), "teacher after": run.teacher and weights_of(run.teacher)}
        return line
    patch.setattr(H, "train_step", watch)
    rows = short_workflow(folder, controls="all")
    patch.undo()
    return folder, rows, seen


def test_each_stage_starts_where_the_last_one_ended(watched):
    _, rows, seen = watched
    original = {who: weights_of(H.load_model("--student", path, "cpu")[0])
                for who, path in (("student", STUDENT), ("teacher", str(toy_tasks.MODELS / "teacher-raw")))}
    ends = original | {name: known["end"] for name, known in seen.items()}
    assert list(seen) == list(H.STAGES) == [row["stage"] for row in rows]
    for name, stage in H.STAGES.items():
        assert seen[name]["start"] == ends[stage.start] != seen[name]["end"], f"{name} goes on from {stage.start} and moves"
    for row in rows:
        before = next((r["after"] for r in rows if r["stage"] == row["start"]), None)
        assert before is None or row["before"] == before, "and it is measured as the last one was"


def test_the_teacher_of_a_stage_is_the_one_named_and_stays_as_it_is(watched):
    _, _, seen = watched
    raw = weights_of(H.load_model("--teacher", str(toy_tasks.MODELS / "teacher-raw"), "cpu")[0])
    for name, stage in H.STAGES.items():
        heard = {"": None, "teacher": raw}.get(stage.teacher) if stage.teacher in ("", "teacher") else seen[stage.teacher]["end"]
        assert seen[name]["teacher"] == seen[name]["teacher after"] == heard, name


def test_the_four_stages_are_those_of_the_paper_and_every_control_leaves_one_thing_out():
    main = {name: (s.method, s.start, s.teacher, s.part) for name, s in H.STAGES.items() if s.arm == "sparse to dense"}
    assert main == {"teacher-rl": ("grpo", "teacher", "", "first"), "warm-up": ("forward-kl", "student", "teacher-rl", "first"),
                    "opd": ("reverse-kl", "warm-up", "teacher-rl", "first"), "held-out-rl": ("grpo", "opd", "", "second")}
    assert H.STAGES["raw-opd"].teacher == "teacher" and H.STAGES["replay-rl"].part == "first" and H.STAGES["opd-only"].start == "student"
    assert list(H.WorkflowConfig().stages) == [*main, "raw-warm-up", "raw-opd", "direct-rl"]


def test_the_stages_have_the_stated_lengths(watched):
    config = H.WorkflowConfig()
    assert (config.teacher_steps, config.warmup_steps, config.opd_steps, config.rl_steps) == (60, 100, 100, 100)
    assert config.kl_coef == 0 and config.clip_low == config.clip_high == 0.2 and config.group_size == 8
    assert {row["stage"]: row["steps"] for row in watched[1] if row["steps"] != 2} == {
        "direct-rl": 6, "opd-only": 4, "teacher-sft": 4, "warm-up-only": 4}


def test_direct_grpo_has_the_labels_and_the_steps_of_all_stages(watched):
    rows = {row["stage"]: row for row in watched[1]}
    assert rows["direct-rl"]["labels_so_far"] == rows["held-out-rl"]["labels_so_far"] == 12
    assert rows["direct-rl"]["steps"] == sum(rows[name]["steps"] for name in ("warm-up", "opd", "held-out-rl"))


def test_label_counts_are_what_the_table_says(watched):
    folder, rows, _ = watched
    counts = {row["stage"]: (row["labels"], row["labels_so_far"]) for row in rows}
    assert counts == {"teacher-rl": (6, 6), "warm-up": (0, 6), "opd": (0, 6), "held-out-rl": (6, 12), "raw-warm-up": (0, 0), "raw-opd": (0, 0),
                      "direct-rl": (12, 12), "opd-only": (0, 6), "teacher-sft": (0, 6), "warm-up-only": (0, 6), "replay-rl": (6, 6),
                      "teacher-rl-all": (8, 8), "warm-up-all": (0, 8), "opd-all": (0, 8)}, "2 steps of 4 prompts reach 6 of 6, and 8 of 12"
    table = H.workflow_table(rows, "chain_sum").splitlines()
    assert json.loads((folder / "workflow.json").read_text()) == rows
    for row in rows:
        line = next(line.split() for line in table if line.split()[:1] == [row["stage"]] and line.startswith("  "))
        assert line[3:6] == [str(row[key]) for key in ("steps", "labels", "labels_so_far")]
    low, high = H.wilson(sum(r for r, _ in rows[0]["after"].values()), 8)
    assert f"[{100 * low:4.1f}, {100 * high:4.1f}]" in table[5], "the interval of its accuracy stands beside it"


@pytest.mark.parametrize("method, part", [("grpo", "first"), ("grpo", "second"), ("forward-kl", "first"), ("reverse-kl", "all"),
                                          ("teacher-sft", "second"), ("rstg", "first"), ("sft", "second")])
def test_an_answer_that_is_not_counted_changes_no_weight_and_one_that_is_does(method, part, tmp_path, monkeypatch):
    config = H.Config(method=method, part=part, steps=2, train_prompts=12, prompts_per_step=3, eval_problems=0, out=str(tmp_path / "plain"),
                      **({} if method == "sft" else {"group_size": 4}), **({"teacher_samples": 2} if method in ("rstg", "sft") else {}))
    task = toy_tasks.TASKS["chain_sum"]
    spent, everything = H.labels_spent(config, task), task.problems("train", 12, 0)
    assert len(spent) == (0 if method in ("forward-kl", "reverse-kl", "teacher-sft") else 6) and spent <= set(H.part_of(everything, part))
    plain, truth = H.train(config)["run"].student, type(task).reward

    def trained_with_wrong(name, answers):
        monkeypatch.setattr(type(task), "reward", lambda self, problem, text: abs((problem in answers) - truth(self, problem, text)))
        student = H.train(dataclasses.replace(config, out=str(tmp_path / name)))["run"].student
        return all(torch.equal(a, b) for a, b in zip(plain.parameters(), student.parameters()))
    assert trained_with_wrong("others", set(everything) - spent)
    if spent:
        assert not trained_with_wrong("spent", spent)


def test_the_halves_of_the_prompts_share_none_and_are_the_whole():
    problems = list(range(7))
    assert H.part_of(problems, "first") + H.part_of(problems, "second") == H.part_of(problems, "all") == problems
    assert len(H.part_of(problems, "first")) == 4 and H.part_of([1], "first") == [1]
    with pytest.raises(H.UsageError, match="second half of the training prompts is empty"):
        H.part_of([1], "second")


def test_the_warm_up_descends_p_s_minus_p_t_on_the_teachers_tokens(monkeypatch):
    run, kept = make_run(method="forward-kl"), {}
    collect = H.collect
    monkeypatch.setattr(H, "collect", lambda *given: kept.setdefault("made", collect(*given)))
    found, _ = gradient(run)
    batch = kept["made"][0]
    run = make_run(method="forward-kl")                     # as it was before the step
    student, teacher = H.aligned_logits(run, batch, torch.arange(len(batch.mask)))
    mask = batch.mask[:, :student.shape[1], None]
    residual = ((student.softmax(-1) - teacher.softmax(-1)) / mask.sum(dim=1, keepdim=True) / len(mask)).masked_fill(~mask, 0.0)
    by_hand = torch.autograd.grad((student * residual.detach()).sum(), list(run.student.parameters()))
    assert close(found, torch.cat([g.flatten() for g in by_hand]).float(), 1e-4)
    torch.manual_seed(run.config.seed * 1_000_003)
    again = H.rollout(run.teacher, run.tokenizer, [run.task.prompt(p) for p in H.step_problems(run.problems, 0, 4, 0)], 4, temperature=1.0,
                      max_new_tokens=16, micro_batch=256)
    assert torch.equal(batch.completion_ids, again.completion_ids), "the tokens are the teacher's own"


@given(SEEDS)
def test_hard_labels_of_the_teacher_are_its_whole_distribution_in_expectation_and_noisier(seed):
    z, z_t = leaf(randn(seed, 1, 1, 5)), randn(seed + 1, 1, 1, 5)
    p_t = z_t.softmax(-1).flatten()
    of_label = [grad(H.sft_loss(z.log_softmax(-1)[..., y], torch.ones(1, 1).bool()), z) for y in range(5)]
    expected = sum(p * g for p, g in zip(p_t, of_label))
    same(expected, z.detach().softmax(-1) - z_t.softmax(-1), "E over y ~ p_T of p_S - e_y")
    same(expected, grad(H.forward_kl(z, z_t).sum(), z), "the gradient of forward KL")
    assert sum(p * (g - expected).square().sum() for p, g in zip(p_t, of_label)) > 1e-3, "one label alone is noise around it"


def test_a_step_of_teacher_sft_is_cross_entropy_on_the_teachers_samples(monkeypatch):
    run, kept, collect = make_run(method="teacher-sft"), {}, H.collect
    monkeypatch.setattr(H, "collect", lambda *given: kept.setdefault("made", collect(*given)))
    found, metrics = gradient(run)
    batch, run = kept["made"][0], make_run(method="teacher-sft")
    logp, _ = run.forward(run.student, batch, torch.arange(len(batch.mask)), H.score)
    loss = H.sft_loss(logp, batch.mask[:, :logp.shape[1]])
    by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.student.parameters()))])
    assert close(found, by_hand) and abs(metrics["loss"] - loss.item()) < 1e-5
    assert metrics["loss"] > 0 and "value -log p, not -1 as in the ratio form"


@pytest.mark.parametrize("stage, step", [("teacher-rl", 1), ("opd", 0), ("direct-rl", 3)])
def test_an_interrupted_workflow_goes_on_and_ends_as_the_other(stage, step, watched, tmp_path, monkeypatch, capsys):
    whole, train_step, seen = watched[1][:7], H.train_step, []

    def killed(run, number):
        if (Path(run.config.out).name, number) == (stage, step):
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append((Path(run.config.out).name, number))
        return train_step(run, number)
    monkeypatch.setattr(H, "train_step", killed)
    words = ["workflow", "--out", str(tmp_path / "w"), *(word for k, v in SHORT.items() for word in (H.flag_of(k), str(v)))]
    with pytest.raises(SystemExit) as stopped:
        H.main(words)
    assert stopped.value.code == 143 and f"workflow --resume --out {tmp_path / 'w'}" in capsys.readouterr().err
    monkeypatch.setattr(H, "train_step", lambda run, number: (seen.append((Path(run.config.out).name, number)), train_step(run, number))[1])
    assert H.main(["workflow", "--resume", "--out", str(tmp_path / "w")]) == 0
    assert json.loads((tmp_path / "w" / "workflow.json").read_text()) == whole
    assert len(seen) == len(set(seen)) == sum(row["steps"] for row in whole), "no step was taken twice"
    printed = capsys.readouterr().out
    assert all(row["stage"] in printed for row in whole)


@pytest.mark.parametrize("words, expected", [
    ("--controls most", "--controls most: must be one of few, all"), ("--opd-stepz 3", "did you mean --opd-steps?"), ("--method rstg", "unrecognized arguments: --method"),
    ("--teacher-steps 0", "--teacher-steps 0: must be >= 1"), ("--teacher nowhere", "--teacher nowhere: no such folder"), ("--student nowhere", "--student nowhere"),
    ("--select-share 20", "unrecognized arguments"), ("--resume", "--resume: needs --out"), ("--out {used}", "--overwrite to replace it"),
    ("--out {used} --resume --opd-steps 7", "--opd-steps 7: the run in --out {used} has --opd-steps 2"), ("--data {short}", "leave none for"), ("fast", "unexpected 'fast'"),
    ("--train-prompts 1", "the second half of the training prompts is empty"), ("--out {trained} --resume", "{trained}: holds a run of train"),
    ("--out {trained} --overwrite", "{trained}: holds a run of train"), ("train --out {used} --resume", "{used}: holds a run of workflow"),
    ("train --out {used} --overwrite", "{used}: holds a run of workflow")])
def test_bad_input_to_the_workflow_is_one_line_before_anything_loads(words, expected, watched, tmp_path, capsys, monkeypatch):
    def load(*_):
        raise AssertionError("a model was loaded")
    monkeypatch.setattr(H, "load_model", load)
    (tmp_path / "short.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/config.json").write_text('{"method": "grpo"}')
    places = {"used": watched[0], "short": tmp_path / "short.jsonl", "trained": tmp_path / "trained"}
    try:
        words = words.format(**places).split()
        code = H.main(words if words[0] == "train" else ["workflow", *words])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err.strip()
    assert code == 2 and len(error.splitlines()) == 1 and expected.format(**places) in error, error


def test_a_workflow_goes_on_wherever_its_folder_is_named_from_and_past_a_damaged_answer(watched, tmp_path, monkeypatch):
    whole, folder = watched[1][:7], tmp_path / "w"
    monkeypatch.chdir(tmp_path)
    short_workflow("w")
    (folder / "opd/evaluation.json").write_text('{"bef')
    shutil.rmtree(folder / "held-out-rl")
    assert H.main(["workflow", "--resume", "--out", str(folder)]) == 0
    assert json.loads((folder / "workflow.json").read_text()) == whole
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(H, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        short_workflow(folder, overwrite=True)
    assert not (folder / "workflow.json").exists() and not (folder / "opd").exists(), "what is replaced is gone before the first step"


def test_a_workflow_of_ones_own_models_and_questions_runs(tmp_path, capsys):
    lines = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(2, 8) for b in range(2, 8)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"workflow --data {tmp_path / 'q.jsonl'} --student {STUDENT} --teacher {TEACHER} --out {tmp_path / 'w'} --kl-coef 5e-4"
    assert H.main([*words.split(), *(word for k, v in SHORT.items() for word in (H.flag_of(k), str(v)))]) == 0
    assert "held-out-rl" in capsys.readouterr().out and (tmp_path / "w/held-out-rl/final/config.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# 13  The oracle
# ---------------------------------------------------------------------------------------------------------------------


@near_miss("logps_from_logits", "the log-sum-exp is that of the logits before the temperature", "temperature")
def lse_without_temperature(logits, ids, temperature=1.0):
    return H.logps_from_logits(logits, ids, temperature) | {"lse": logits.logsumexp(-1)}


def cold_gradient(function):
    """The right value; its gradient is not divided by the temperature, as when a kernel writes its backward pass by hand."""
    def wrong(logits, *others, temperature=1.0, **options):
        z = logits / temperature
        return function(z.detach() + logits.masked_fill(logits == -INF, 0.0) - logits.detach().masked_fill(logits == -INF, 0.0), *others, **options)
    wrong.__name__ = function.__name__ + "_with_cold_gradient"
    return wrong


def half_a_weight(function):
    """The right value; the weight's gradient holds the last chunk of rows only: it was assigned, not added."""
    def wrong(hidden, weight, *others, **options):
        return function(torch.cat([hidden[:2] @ weight.detach().T, hidden[2:] @ weight.T]), *others, **options)
    wrong.__name__ = function.__name__.replace("logits", "hidden") + "_with_half_a_weight"
    return wrong


for _loss in (H.logps_from_logits, H.grpo_loss_from_logits, H.opd_loss_from_logits):
    near_miss(_loss.__name__, "right value, but the gradient is not divided by the temperature", "temperature")(cold_gradient(_loss))
for _loss in (H.logps_from_logits, H.grpo_loss_from_logits, H.opd_loss_from_logits, H.jsd_loss_from_logits):
    near_miss(_loss.__name__.replace("logits", "hidden"), "right value, but the weight's gradient is that of the last chunk alone")(half_a_weight(_loss))


@near_miss("jsd_loss_from_logits", "the mean over all columns, padding included")
def jsd_over_padding(student_logits, teacher_logits, mask, *, teacher_share=0.5, temperature=1.0):
    return H.generalized_jsd(student_logits, teacher_logits, teacher_share, temperature).masked_fill(~mask, 0.0).mean()


@near_miss("jsd_loss_from_logits", "the teacher's half is detached, since the teacher is frozen: the mixture in it is not")
def jsd_with_detached_half(student_logits, teacher_logits, mask, *, teacher_share=0.5, temperature=1.0):
    s, t = (student_logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    m = (teacher_share * t.exp() + (1 - teacher_share) * s.exp()).log()
    jsd = teacher_share * (t.exp() * (t - m)).sum(-1).detach() + (1 - teacher_share) * (s.exp() * (s - m)).sum(-1)
    return H.aggregate(jsd, mask, "token_mean")


@near_miss("grpo_loss_from_logits", "multiplies by the mask instead of filling: one padded NaN is the loss of the batch: verl#785", "NaN")
def grpo_from_logits_by_product(logits, ids, *inputs, how=HOWS[0], length=None, empty_rows="skip", temperature=1.0):
    logp = H.logps_from_logits(logits, ids, temperature)["logp"]
    return grpo_by_product(logp, *inputs, how=how, length=length, empty_rows=empty_rows)


@near_miss("grpo_loss_from_hidden", "multiplies by the mask instead of filling: one padded NaN is the loss of the batch: verl#785", "NaN")
def grpo_from_hidden_by_product(hidden, weight, *inputs, how=HOWS[0], length=None, empty_rows="skip", temperature=1.0):
    return grpo_from_logits_by_product(hidden @ weight.T, *inputs, how=how, length=length, empty_rows=empty_rows, temperature=temperature)


# Honest versions: another order, another formula, another memory layout, the same mathematics.

HONEST: dict[str, tuple] = {}           # name: (public function, honest version)


def honest(function: str):
    def enter(version):
        HONEST[f"{function}: {version.__name__}"] = (function, version)
        return version
    return enter


def written_out(z):
    top = z.amax(-1, keepdim=True).detach()
    return top + (z - top).exp().sum(-1, keepdim=True).log()


def chunked(z):
    """Over the vocabulary, four at a time, with a running maximum"""
    top, total = z[..., :4].amax(-1, keepdim=True).detach(), 0.0
    for chunk in z.split(4, dim=-1):
        new = torch.maximum(top, chunk.amax(-1, keepdim=True)).detach()
        total, top = total * (top - new).exp() + (chunk - new).exp().sum(-1, keepdim=True), new
    return top + total.log()


def backwards(z):
    return z.flip(-1).logsumexp(-1, keepdim=True)


def kl_between(s, t, dead):
    return (s.exp() * (s - t).masked_fill(dead, 0.0)).flip(-1).sum(-1)


for _lse in (written_out, chunked, backwards):
    def _logp(logits, temperature, lse=_lse):
        z = logits.float() / temperature
        return z - lse(z)

    def _named(version, lse=_lse):
        version.__name__ = lse.__name__
        return version

    honest("token_logps")(_named(lambda logits, ids, temperature=1.0, f=_logp: f(logits[:, :-1], temperature).gather(-1, ids[:, 1:, None])[..., 0]))
    honest("token_entropy")(_named(lambda logits, temperature=1.0, f=_logp: (lambda p: -torch.where(p == -INF, 0.0, p.exp() * p.masked_fill(p == -INF, 0.0)).flip(-1).sum(-1))(f(logits, temperature))))
    honest("reverse_kl")(_named(lambda s, t, temperature=1.0, f=_logp: kl_between(f(s, temperature), f(t, temperature), s == -INF)))
    honest("forward_kl")(_named(lambda s, t, temperature=1.0, f=_logp: kl_between(f(t, temperature), f(s, temperature), t == -INF)))
    honest("grpo_loss_from_logits")(_named(lambda logits, ids, *rest, temperature=1.0, f=_logp, **options: H.grpo_loss(
        f(logits, temperature).gather(-1, ids[..., None])[..., 0], *rest, **options)))
    honest("grpo_loss_from_hidden")(_named(lambda hidden, weight, ids, *rest, temperature=1.0, f=_logp, **options: H.grpo_loss(
        torch.cat([f(h @ weight.T, temperature) for h in hidden.split(1)]).gather(-1, ids[..., None])[..., 0], *rest, **options)))


@honest("generalized_jsd")
def from_probabilities(student_logits, teacher_logits, teacher_share=0.5, temperature=1.0):
    s, t = (student_logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    never = (student_logits == -INF) & (teacher_logits == -INF)
    m = (teacher_share * t.exp() + (1 - teacher_share) * s.exp()).masked_fill(never, 1.0).log()
    return teacher_share * kl_between(t, m, teacher_logits == -INF) + (1 - teacher_share) * kl_between(s, m, student_logits == -INF)


@honest("policy_terms")
def by_cases(logp, logp_old, advantages, clip_low=0.2, clip_high=0.2):
    ratio = (logp - logp_old).exp()
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return -advantages * torch.where(clipped, ratio.detach().clamp(1 - clip_low, 1 + clip_high), ratio)


@honest("kl_terms")
def k3_without_expm1(logp, logp_ref):
    return (logp_ref - logp).exp() - 1 - (logp_ref - logp)


@honest("group_advantages")
def by_moments_of_the_centred(rewards, *, ddof=0, eps=1e-4):
    centred = rewards - rewards.flip(1).sum(1, keepdim=True) / rewards.shape[1]
    std = (centred.square().flip(1).sum(1, keepdim=True) / (rewards.shape[1] - ddof)).sqrt()
    return torch.where(rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True), 0.0, centred / (std + eps))


@honest("aggregate")
def one_row_after_another(terms, mask, how, length=None, empty_rows="skip"):
    weights = H.token_weights(mask, how, length, empty_rows).float()
    return sum((x[m] * w[m]).sum() for x, m, w in zip(terms.float(), mask, weights))


@honest("sft_loss")
def by_division_last(logp, mask):
    return -(logp.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum()


@honest("token_scores")
def one_minus_the_product(entropy, divergence, mask):
    low, high = ([x[mask].min(), x[mask].max()] for x in (entropy, divergence)), None
    h, d = ((x - a) / (b - a) for x, (a, b) in zip((entropy, divergence), low))
    return (1 - (1 - h) * (1 - d)).masked_fill(~mask, 0.0)


@honest("reward_residual")
def by_autograd(logits, ids, advantages):
    z = logits.detach().requires_grad_()
    with torch.enable_grad():
        loss = -(advantages * z.log_softmax(-1).gather(-1, ids[..., None])[..., 0]).sum()
    return torch.autograd.grad(loss, z)[0]


for _name in ("aggregate", "grpo_loss", "opd_loss", "sft_loss"):
    def upside_down(*inputs, of=getattr(H, _name), **options):
        turn = lambda x: x.flip(0, 1) if isinstance(x, torch.Tensor) else x
        return of(*map(turn, inputs), **{k: turn(x) for k, x in options.items()})
    honest(_name)(upside_down)


def compiled_versions() -> dict:
    """Losses fused by torch.compile, if it works here"""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    try:
        fused = {f.__name__: torch.compile(f, dynamic=True) for f in (H.generalized_jsd, H.kl_terms, H.grpo_loss)}
        plain = {"generalized_jsd": lambda s, t: fused["generalized_jsd"](s, t), "kl_terms": lambda p, q: fused["kl_terms"](p, q),
                 "grpo_loss": lambda p, old, a, mask: fused["grpo_loss"](p, old, a, mask)}
        H.check_conformance({"kl_terms": plain["kl_terms"]}, seeds=[0])
        return {f"{name}: torch.compile": (name, version) for name, version in plain.items()}
    except Exception as error:
        print(f"without torch.compile: {type(error).__name__}")
        return {}


def self_test(trials: int, seed: int = 0) -> int:
    """Judge the judge, for `check --self-test`: a trial is one version, all its cases, one seed."""
    began, versions = time.perf_counter(), list((HONEST | compiled_versions()).items())
    alarms, caught, named, gallery = [], 0, 0, [(name, *row) for name, row in NEAR_MISSES.items() if row[0] in H.SPEC]
    for trial in range(trials):
        name, (function, version) = versions[trial % len(versions)]
        finding = H.check_conformance({function: version}, seeds=[seed + trial]).findings[0]
        if finding.verdict != "conforms":
            alarms.append(f"{name}, seed {seed + trial}: {finding}")
        name, function, wrong, line = gallery[trial % len(gallery)]
        finding = H.check_conformance({function: wrong}, seeds=[seed + trial]).findings[0]
        caught += finding.verdict == "differs"
        named += finding.said == f"{name}: {line}"
    print(*alarms, f"{len(alarms)} false alarms in {trials} trials of {len(versions)} honest versions",
          f"{caught} of {trials} trials of {len(gallery)} near misses caught, {named} ({100 * named / trials:.1f} %) named, and named alone",
          f"{time.perf_counter() - began:.0f} s", sep="\n")
    return 0 if not alarms and caught == trials and named >= 0.95 * trials else 1

# TRL, verl and Liger as they are, behind our names: `python hybrid_rl.py check test_hybrid_rl:TRL --convention trl`.


def trl_grpo_loss(logp, logp_old, advantages, mask, loss_type="dapo"):
    from trl import GRPOTrainer, GRPOConfig
    default = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    here = types.SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0, loss_type=loss_type, epsilon_low=0.2, epsilon_high=0.2,
        use_vllm=False, model=torch.nn.Module().eval(), max_completion_length=default["max_completion_length"], _entropy_bonus_enabled=False, accelerator=here,
        current_gradient_accumulation_steps=1, args=types.SimpleNamespace(delta=None), _metrics=defaultdict(lambda: defaultdict(list)))
    ids = torch.zeros_like(mask, dtype=torch.long)
    return GRPOTrainer._compute_loss(trainer, None, {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask.long(),
                                                     "advantages": advantages, "old_per_token_logps": logp_old, "num_items_in_batch": mask.sum()})


def trl_jsd_loss(student_logits, teacher_logits, mask):
    from trl.experimental.gkd import GKDTrainer
    return GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, labels=torch.where(mask, 0, -100))


def verl_grpo_loss(logp, logp_old, advantages, mask, how="token-mean"):
    import verl.trainer.ppo.core_algos as C
    from verl.workers.config import ActorConfig
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return C.compute_policy_loss_vanilla(logp_old, logp, advantages.expand_as(logp), mask.to(logp.dtype), how, config)[0]


def verl_group_advantages(rewards):
    import numpy as np
    import verl.trainer.ppo.core_algos as C
    index = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    return C.compute_grpo_outcome_advantage(rewards.reshape(-1, 1).clone(), torch.ones(rewards.numel(), 1), index)[0].view_as(rewards)


def verl_kl_terms(logp, logp_ref):
    import verl.trainer.ppo.core_algos as C
    return C.kl_penalty(logp, logp_ref, "low_var_kl")


def liger_grpo_loss(hidden, weight, ids, logp_old, advantages, mask, loss_type="dapo"):
    only(advantages.shape[1] == 1)      # it takes one advantage a completion
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    fused = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False, loss_type=loss_type)
    return fused(hidden, weight, ids, mask.to(hidden.dtype), advantages[:, 0], old_per_token_logps=logp_old)[0]


def liger_jsd_loss(hidden, weight, teacher_logits, mask):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    fused = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False, chunk_size=8)
    as_weight = torch.eye(len(weight), dtype=hidden.dtype)      # the teacher's logits as hidden states of a unit head
    return fused(hidden.flatten(0, 1), weight, teacher_logits.flatten(0, 1), as_weight, torch.where(mask, 0, -100).flatten())


TRL = {"grpo_loss": trl_grpo_loss, "jsd_loss_from_logits": trl_jsd_loss}
TRL_GRPO = {"grpo_loss": functools.partial(trl_grpo_loss, loss_type="grpo")}
TRL_DR_GRPO = {"grpo_loss": functools.partial(trl_grpo_loss, loss_type="dr_grpo")}
VERL = {"grpo_loss": verl_grpo_loss, "group_advantages": verl_group_advantages, "kl_terms": verl_kl_terms}
VERL_SEQ = {"grpo_loss": functools.partial(verl_grpo_loss, how="seq-mean-token-mean")}
LIGER = {"grpo_loss_from_hidden": liger_grpo_loss, "jsd_loss_from_hidden": liger_jsd_loss}
LIGER_GRPO = {"grpo_loss_from_hidden": functools.partial(liger_grpo_loss, loss_type="grpo")}
AGREES = ("plain", "empty row", "one advantage a row", "no advantage", "of two", "of sixteen", "binary")      # the rest is in the README's table


@pytest.mark.parametrize("convention, package, theirs", [
    ("trl", "trl", TRL), ("trl-grpo", "trl", TRL_GRPO), ("trl-dr_grpo", "trl", TRL_DR_GRPO), ("verl", "verl", VERL),
    ("verl-seq-mean-token-mean", "verl", VERL_SEQ), ("liger", "liger_kernel", LIGER), ("liger-grpo", "liger_kernel", LIGER_GRPO)])
def test_installed_libraries_compute_what_their_convention_says(convention, package, theirs):
    pytest.importorskip(package, reason="judged only where it is installed", exc_type=ImportError)
    for name, function in theirs.items():
        for case in set(AGREES) & set(H.labels_of(name, {})) - ({"plain", "empty row"} if "grpo_loss_from" in name else set()):
            report = H.check_conformance({name: function}, conventions=convention, case=case)
            assert report.passed, f"{convention}, {case}:\n{report}"


def test_a_convention_is_not_another():
    as_trl = functools.partial(H.grpo_loss, how="token_mean")
    assert H.check_conformance({"grpo_loss": as_trl}, conventions="trl").passed
    for other in ("trl-grpo", "trl-dr_grpo", "verl", "verl-seq-mean-token-mean"):
        assert not H.check_conformance({"grpo_loss": as_trl}, conventions=other).passed, f"TRL's default passes as {other}"


# The judge.


def seeds_of(name: str, function, seeds=range(2), **options) -> H.Finding:
    return H.check_conformance({name: function}, seeds=seeds, **options).findings[0]


@pytest.mark.parametrize("name", [name for name, row in NEAR_MISSES.items() if row[0] in H.SPEC])
def test_every_near_miss_is_caught_at_its_case_and_named(name):
    function, wrong, line = NEAR_MISSES[name]
    for label in (label for label in H.labels_of(function) if MISSED_AT[name] in label and MISSED_AT[name]):
        verdicts = [seeds_of(function, wrong, [seed], case=label).verdict for seed in range(3)]
        assert "differs" in verdicts, f"{name} is not seen at {label}"
    finding = seeds_of(function, wrong, [0])
    assert finding.verdict == "differs" and finding.said == f"{name}: {line}", f"expected {name} alone to be named, got {finding}"


def test_every_function_has_a_near_miss_and_there_are_many():
    of = [function for function, _, _ in NEAR_MISSES.values()]
    assert set(of) == set(H.SPEC) | set(CASES) and len(of) >= 90, f"no near miss of {set(H.SPEC) - set(of)}, or of an unknown {set(of) - set(H.SPEC)}"
    for name, label in MISSED_AT.items():
        known = H.labels_of(NEAR_MISSES[name][0]) if NEAR_MISSES[name][0] in H.SPEC else CASES[NEAR_MISSES[name][0]]
        assert any(label in full for full in known), f"{name}: no case {label!r} among {list(known)}"


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_version_conforms(name):
    function, version = HONEST[name]
    finding = seeds_of(function, version)
    assert finding.verdict == "conforms", finding


def test_the_reference_conforms_in_every_dtype_and_says_no_more_than_it_knows():
    for dtype, verdict in ((torch.float32, "conforms"), (torch.bfloat16, "as accurate as the plain formula"), (torch.float16, "as accurate as the plain formula")):
        report = H.check_conformance(H, dtype=dtype, seeds=[0])
        assert report.passed and {f.verdict for f in report.findings} == {verdict} and {f.function for f in report.findings} == set(H.SPEC), report
    with pytest.raises(H.UsageError, match="float64 is the yardstick"):
        H.check_conformance(H, dtype=F64)


def right_value_wrong_gradient(logp, logp_old, advantages, mask, **options):
    return 2 * (loss := H.grpo_loss(logp, logp_old, advantages, mask, **options)) - loss.detach()


def the_judge_says_no() -> bool:
    """What a judge that is worth its name must do: refuse a wrong value, and a right value with a wrong gradient."""
    return all(not H.check_conformance({"grpo_loss": f}, seeds=[0]).passed for f in (grpo_with_token_mean, right_value_wrong_gradient))


def test_a_judge_that_always_passes_is_caught(monkeypatch):
    assert the_judge_says_no()
    monkeypatch.setattr(H, "gap", lambda found, expected: 0.0)
    assert not the_judge_says_no()


def test_a_judge_that_compares_a_thing_with_itself_is_caught(monkeypatch):
    real = H.judge
    monkeypatch.setattr(H, "judge", lambda name, tried, good: real(name, [(case, case.gold) for case, _ in tried], good))
    assert not the_judge_says_no()


def test_a_judge_that_ignores_gradients_is_caught(monkeypatch):
    real = H.judge
    blind = lambda found, gold: {stage: gold[stage] if "gradient" in stage else x for stage, x in found.items()}
    monkeypatch.setattr(H, "judge", lambda name, tried, good: real(name, [(case, blind(found, case.gold)) for case, found in tried], good))
    assert not the_judge_says_no()


def test_the_allowance_is_twice_the_plain_loss_and_four_roundings_of_a_typical_term():
    terms, mask = tensor([[1e4, -1e4 + 1, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    row = H.Spec(H.aggregate, "terms mask how", "terms", {"made": lambda d: {"terms": terms, "mask": mask, "how": "token_mean"}})
    H.SPEC["aggregate_here"] = row
    try:
        case = H.make_case("aggregate_here", "made", 0, "float32")
    finally:
        del H.SPEC["aggregate_here"]
    single = terms.float()
    plain = abs(H.aggregate(single, mask, "token_mean").item() - H.aggregate(single.double(), mask, "token_mean").item())
    expected = 2 * plain + 4 * 2**-23 * single.double().abs().mean().item()
    same(case.allowed["value"], expected, "allowed")
    assert case.allowed["value"] > 4 * 2**-23 * 1000, "the sum cancels to 2/3, its terms do not: the scale is theirs"


def test_where_the_plain_formula_is_too_inaccurate_there_is_no_verdict():
    copied = H.make_case("reverse_kl", "copied teacher", 0, "float32")
    assert copied.allowed["gradient of student_logits"] is None
    report = H.check_conformance(H, functions=["reverse_kl"], seeds=[0], case="copied teacher")
    assert "without verdict" in str(report)
    nothing = H.judge("reverse_kl", [(dataclasses.replace(copied, allowed=dict.fromkeys(copied.allowed)), copied.gold)], "conforms")
    assert nothing.verdict == "no verdict" and not H.Report([nothing]).passed and H.Report([nothing]).exit_code == 2


def test_a_number_that_is_not_finite_must_be_the_same_one_in_the_same_place():
    a = tensor([1.0, INF, -INF, NAN])
    assert H.gap(a.clone(), a) == 0
    for other in ([1.0, -INF, -INF, NAN], [1.0, INF, -INF, 0.0], [NAN, INF, -INF, NAN], [1.0, INF, -INF]):
        assert H.gap(tensor(other), a) == INF, f"{other} passes for {a.tolist()}"


def test_the_report_says_which_stage_which_case_which_mistake_and_how_to_see_it_again():
    report = H.check_conformance({"grpo_loss": right_value_wrong_gradient, "sft_loss": sft_with_flipped_sign}, seeds=[3])
    text = str(report)
    assert report.findings[0].stage == "gradient of logp" and report.findings[1].stage == "value", "the first stage that differs"
    assert "sft_with_flipped_sign: the likelihood instead of its negative" in text and "0 of 9 known mistakes fit" in text, text
    again = next(line for line in text.splitlines() if "again:" in line)
    assert re.search(r"check TARGET --function grpo_loss --case '.+' --seed 3 --seeds 1", again), again
    label = re.search(r"--case '(.+)' --seed", again)[1]
    assert seeds_of("grpo_loss", right_value_wrong_gradient, [3], case=label).verdict == "differs"


def test_what_a_candidate_lacks_is_said_and_what_it_has_is_judged():
    report = H.check_conformance({"grpo_loss": lambda logp, logp_old, advantages, mask: H.grpo_loss(logp, logp_old, advantages, mask)},
                                 functions=["grpo_loss", "sft_loss"], seeds=[0])
    loss, missing = report.findings
    assert loss.verdict == "conforms" and "dual_clip" in loss.lacking and "kl_coef" in loss.lacking and "not judged: " in str(report)
    assert missing.verdict == "missing" and report.exit_code == 2


def test_two_mistakes_that_look_alike_are_not_named(monkeypatch):
    twins = {name: ("sft_loss", sft_with_flipped_sign, line) for name, line in (("a", "one"), ("b", "another"))}
    monkeypatch.setattr(H, "spec_file", lambda: types.SimpleNamespace(NEAR_MISSES=twins))
    assert seeds_of("sft_loss", sft_with_flipped_sign).said == "2 of 2 known mistakes fit; a: one; b: another"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "test_hybrid_rl", None)
    finding = seeds_of("sft_loss", sft_with_flipped_sign)
    assert finding.verdict == "differs" and "cannot be loaded" in finding.said, "without the gallery the judge still judges"


def test_exactly_at_the_clip_the_gradient_is_whole():
    logp, a = leaf([[-1.0, -2.0]]), tensor([[1.5, -0.5]])
    same(grad(H.policy_terms(logp, logp.detach(), a, clip_low=0.0, clip_high=0.0).sum(), logp), -a, "at ratio 1 with no room on either side")


def test_cases_hold_what_kernels_get_wrong():
    far = H.make_case("grpo_loss", "far", 0, "float32").arguments
    assert ((far["logp"] - far["logp_old"]).abs() > 20).all()
    clip = H.make_case("grpo_loss", "exactly at the clip", 0, "bfloat16").arguments
    bit_equal(clip["logp"], clip["logp_old"], "ratio 1, clip 0")
    left = H.make_case("grpo_loss", "NaN on the left", 0, "float32").arguments
    assert left["logp"][~left["mask"]].isnan().all() and not left["mask"].any(1).all() and (~left["mask"])[:, 0].any()
    assert (H.make_case("grpo_loss", "one-token row", 0, "float32").arguments["mask"].sum(1) == 1).any()
    assert (H.make_case("opd_advantages", "sure teacher", 0, "float32").arguments["logp_teacher"] == 0).any()
    assert (H.make_case("opd_advantages", "teacher that cannot", 0, "float32").arguments["logp_teacher"] == -INF).any()
    assert {H.make_case("group_advantages", label, s, "float32").arguments["rewards"].shape[1] for s in range(90) for label in ("of two", "plain", "of sixteen")} == set(range(2, 17))
    one = H.make_case("grpo_loss", "one advantage a row", 0, "float32").arguments
    assert one["advantages"].shape == (len(one["logp"]), 1) and (H.make_case("token_logps", "student cannot", 0, "float32").arguments["logits"] == -INF).any()
    for name in H.SPEC:
        a, b, c = (H.make_case(name, H.labels_of(name)[0], seed, "float32").arguments for seed in (5, 5, 6))
        for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
            bit_equal(x.nan_to_num(7.0), y.nan_to_num(7.0), f"{name}, the same seed")

# Other languages, and the command line.

JAVASCRIPT = r"""
// Reads exported vectors, computes policy_terms, kl_terms and sft_loss with their gradients in float32, writes results.
const fs = require("fs"), f = Math.fround;
const [vectors, results, wrong] = process.argv.slice(2);
const number = v => typeof v === "string" ? {"nan": NaN, "inf": Infinity, "-inf": -Infinity}[v] : v;
const word = v => Number.isFinite(v) ? v : Number.isNaN(v) ? "nan" : v > 0 ? "inf" : "-inf";
const data = x => x.data.map(number);
const cotangent = i => 1 + (i % 7) / 8;
const answer = (shape, values) => ({shape: shape, data: values.map(word)});
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function policyTerms(inputs) {
  const p = data(inputs.logp), old = data(inputs.logp_old), a = data(inputs.advantages);
  const low = f(1 - (inputs.clip_low ?? 0.2)), high = f(1 + (inputs.clip_high ?? 0.2));
  const columns = inputs.logp.shape[1], wide = inputs.advantages.shape[1] === columns;
  const value = [], gradient = [];
  p.forEach((logp, i) => {
    const A = a[wide ? i : Math.floor(i / columns)], ratio = f(Math.exp(f(logp - old[i])));
    const clipped = (A > 0 && ratio > high) || (A < 0 && ratio < low);
    const term = f(-f((clipped ? clamp(ratio, low, high) : ratio) * A));
    value.push(wrong === "sign" ? -term : term);
    gradient.push(clipped ? 0 : f((wrong === "sign" ? 1 : -1) * ratio * A * cotangent(i)));
  });
  return {"value": answer(inputs.logp.shape, value), "gradient of logp": answer(inputs.logp.shape, gradient)};
}

function klTerms(inputs) {                       // k3, differentiated as it is
  const d = data(inputs.logp_ref).map((ref, i) => f(ref - data(inputs.logp)[i]));
  return {"value": answer(inputs.logp.shape, d.map(x => f(Math.expm1(x) - x))),
          "gradient of logp": answer(inputs.logp.shape, d.map((x, i) => f(-Math.expm1(x) * cotangent(i))))};
}

function sftLoss(inputs) {                       // the mean over completions of the mean over their tokens
  const logp = data(inputs.logp), mask = inputs.mask.data, [rows, columns] = inputs.mask.shape;
  const count = Array(rows).fill(0);
  mask.forEach((m, i) => { count[Math.floor(i / columns)] += m; });
  const live = count.filter(n => n > 0).length;
  const weight = mask.map((m, i) => m ? 1 / (live * count[Math.floor(i / columns)]) : 0);
  const total = logp.reduce((sum, x, i) => weight[i] ? sum - x * weight[i] : sum, 0);
  return {"value": answer([], [f(total)]), "gradient of logp": answer(inputs.logp.shape, weight.map(w => f(-w)))};
}

const mine = {policy_terms: [policyTerms, ["logp", "logp_old", "advantages", "clip_low", "clip_high"]],
              kl_terms: [klTerms, ["logp", "logp_ref"]], sft_loss: [sftLoss, ["logp", "mask"]]};
const file = JSON.parse(fs.readFileSync(vectors)), out = {};
for (const c of file.cases) {
  const [compute, takes] = mine[c.function] ?? [null, []];
  if (compute && c.dtype === "float32" && Object.keys(c.inputs).every(name => takes.includes(name))) out[c.id] = compute(c.inputs);
}
fs.writeFileSync(results, JSON.stringify({format: file.format, results: out}));
"""


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "vectors.json"
    assert H.main(["vectors", str(path)]) == 0
    return path


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_another_language_is_judged_without_python_on_its_side(vectors, tmp_path, capsys):
    (tmp_path / "port.js").write_text(JAVASCRIPT)
    for wrong, code in (("", 0), ("sign", 1)):
        results = tmp_path / f"results{wrong}.json"
        subprocess.run(["node", tmp_path / "port.js", vectors, results, wrong], check=True)
        assert len(json.loads(results.read_text())["results"]) > 10
        assert H.main(["check", "--results", str(results), "--vectors", str(vectors)]) == code
    printed = capsys.readouterr().out
    assert "terms_with_flipped_sign: the sign of the loss flipped" in printed and len(JAVASCRIPT.splitlines()) <= 62


def test_vectors_hold_every_function_in_every_dtype_with_all_digits(vectors):
    made = json.loads(vectors.read_text())
    assert made["format"] == H.FORMAT and made["spec_version"] == H.SPEC_VERSION
    assert {(c["function"], c["dtype"]) for c in made["cases"]} == set(itertools.product(H.SPEC, H.DTYPES))
    case = next(c for c in made["cases"] if c["id"] == "grpo_loss / NaN on the right / 0 / float32")
    again = H.make_case("grpo_loss", "NaN on the right", 0, "float32")
    assert case["inputs"]["logp"]["data"].count("nan") == int((~again.arguments["mask"]).sum())
    assert case["expected"]["value"]["data"] == [again.gold["value"].item()], "17 digits are the number itself"
    assert case["expected"]["value"]["allowed"] == again.allowed["value"]
    half = next(c for c in made["cases"] if c["function"] == "grpo_loss" and c["dtype"] == "bfloat16")
    logp = torch.tensor(half["inputs"]["logp"]["data"], dtype=F64)
    bit_equal(logp.bfloat16().double(), logp, "inputs are numbers of the dtype")


def run_check(text: str, folder: Path, capsys, *words: str) -> tuple[int, str, str]:
    (folder / "theirs.py").write_text(text)
    try:
        code = H.main(["check", *(words or [str(folder / "theirs.py")])])
    except SystemExit as leaving:
        code = leaving.code
    return code, *capsys.readouterr()


RIGHT = "from hybrid_rl import grpo_loss, sft_loss\n"
WRONG = """
import torch
def grpo_loss(logp, logp_old, advantages, mask, *, clip_low=0.2, clip_high=0.2):
    logp, logp_old, advantages = (x.masked_fill(~mask, 0.0) for x in (logp, logp_old, advantages.expand_as(logp)))
    ratio = torch.exp(logp - logp_old)
    terms = -torch.minimum(ratio * advantages, torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    return (terms * mask).sum() / mask.numel()
"""


def test_check_exits_0_1_or_2_and_names_the_mistake(tmp_path, capsys):
    assert run_check(RIGHT, tmp_path, capsys)[0] == 0
    code, printed, _ = run_check(RIGHT + WRONG, tmp_path, capsys)
    assert code == 1 and "grpo_over_padding: the mean over all columns, padding included" in printed and "sft_loss" in printed
    code, printed, _ = run_check("def sft_loss(logp): return logp.sum()", tmp_path, capsys)
    assert code == 2 and "wrong signature: it is called with logp, mask (too many positional arguments)" in printed
    code, printed, _ = run_check("def sft_loss(logp, mask): return logp.sum().nothing", tmp_path, capsys)
    assert code == 2 and "raises AttributeError in case 'plain', seed 0" in printed and "Traceback" not in printed


@pytest.mark.parametrize("words, expected", [
    ("no_such_module", "no_such_module: cannot be imported (ModuleNotFoundError"), ("json:nothing", "cannot be imported (AttributeError"),
    ("{theirs}", "cannot be imported (SyntaxError"), ("hybrid_rl --function grpo_los", "did you mean grpo_loss?"), ("hybrid_rl --convention trk", "--convention"),
    ("hybrid_rl --case nowhere --function sft_loss", "case 'nowhere': sft_loss has 'plain'"), ("json", "nothing to judge"), ("hybrid_rl --seeds 0", "must be >= 1"),
    ("hybrid_rl:upcast", "say which with --function NAME"), ("", "needs a TARGET"), ("--results {theirs}", "--results FILE together with --vectors FILE"),
    ("--results {theirs} --vectors {theirs}", "cannot be read as JSON"), ("--results {json} --vectors {json}", "needs \"format\""),
    ("hybrid_rl --dtype float64", "float64"), ("hybrid_rl another", "unexpected 'another'")])
def test_what_cannot_be_judged_is_one_line_with_exit_code_2(words, expected, tmp_path, capsys):
    (tmp_path / "some.json").write_text("{}")
    words = words.format(theirs=tmp_path / "theirs.py", json=tmp_path / "some.json").split()
    code, _, error = run_check("def broken(:", tmp_path, capsys, *(words or [""]))
    assert code == 2 and len(error.strip().splitlines()) == 1 and expected in error, f"expected one line with {expected!r}, got {error!r}"


def test_the_module_judged_by_itself_from_the_shell_conforms_within_twenty_seconds():
    began = sum(os.times()[2:4])                     # processor time of the children: a busy machine is not the oracle's fault
    done = subprocess.run([sys.executable, H.__file__, "check", "hybrid_rl"], capture_output=True, text=True,
                          cwd=Path(H.__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(H.SPEC) + 1, done.stdout + done.stderr
    assert sum(os.times()[2:4]) - began < 20


def test_the_self_test_counts_false_alarms_and_names(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "compiled_versions", dict)      # a minute of compiling: only in the command
    assert self_test(len(HONEST), seed=100) == 0
    printed = capsys.readouterr().out
    assert f"0 false alarms in {len(HONEST)} trials" in printed and f"{len(HONEST)} of {len(HONEST)} trials" in printed
    monkeypatch.setitem(HONEST, "sft_loss: wrong", ("sft_loss", sft_with_flipped_sign))
    assert self_test(len(HONEST), seed=100) == 1 and "1 false alarms" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# 14  Command line
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, expected", [
    ("--steps 0", "--steps 0: must be >= 1"), ("--group-size 1", "--group-size 1: must be >= 2"), ("--temperature 0", "--temperature 0.0: must be > 0"),
    ("--temperature nan", "--temperature nan: must be > 0"), ("--select-share 0", "in (0, 100]"), ("--select-share 101", "in (0, 100]"),
    ("--lr 5e-4x", "--lr: '5e-4x' is not a number, for instance 5e-4"), ("--steps 3.5", "not a whole number"), ("--lr -1", "--lr -1.0: must be > 0"),
    ("--no-sft False", "takes no value"), ("--stepz 3", "did you mean --steps?"), ("--method rtsg", "did you mean rstg?"), ("trian", "unexpected 'trian'"),
    ("--method grpo --select-share 20", "--method grpo does not read it; it belongs to rstg"), ("--method opd --kl-coef 0.1", "does not read it"),
    ("--probe 3 --steps 5", "--probe 3 says already how many"), ("--probe 3 --method grpo", "--method grpo does not read it"),
    ("--method m3-soft --updates 2", "--method m3-soft does not read it"), ("--method hybrid --teacher-share 1", "must be in [0, 1)"),
    ("--method grpo --diagnose", "--method grpo does not read it"), ("--method m3-soft --exact-gate True", "takes no value"),
    ("--opd-coef 0.01", "--opd-coef-floor 0.02: lies above"), ("--student nowhere", "--student nowhere: no such folder"), ("--student {empty}", "config.json is missing"),
    ("--teacher nowhere", "--teacher nowhere"), ("--teacher=", "--method rstg needs a teacher"), ("--device cuda", "--device cuda: this machine has none"), ("--device tpu", "one of auto, cpu, cuda"),
    ("--data nowhere.jsonl", "--data nowhere.jsonl: cannot be read"), ("--data {gold}", "line 2: answer is 'many'"), ("--data {json}", "line 2: not JSON"),
    ("--data {seven}", "seven.jsonl, line 7: not JSON"), ("--data {unanswered}", "line 2: answer is missing"),
    ("--data {twice}", "line 2: asks what line 1 asks"),
    ("--data {silent}", "line 2: messages hold no question"), ("--data {talk}", "line 2: messages must be a list of objects"),
    ("--reward exact", "--reward exact: belongs to --data"), ("--system Think", "--system Think: belongs to --data"),
    ("--data {plain} --reward nowhere:judge", "--reward nowhere:judge: ModuleNotFoundError"),
    ("--data {plain} --reward json:judge", "has no attribute 'judge'"),
    ("--data {plain} --reward last", "--reward last: "),
    ("--data {plain} --reward mine:ten", "it gave 10 for an empty completion"),
    ("--data {plain} --reward mine:broken", "ZeroDivisionError"), ("--resume", "--resume: needs --out"),
    ("--method m3-soft --gradient-checkpointing --exact-gate", "choose one"), ("--gradient-checkpointing yes", "takes no value"),
    ("--data {short}", "leave none for"), ("--data {void}", "0 questions leave none"), ("--out {used}", "--overwrite to replace it"),
    ("--out {empty}/file/x", "cannot be written"), ("--resume --out {empty}", "--resume: there is no run"), ("--max-new-tokens 4000", "window is 128")])
def test_bad_input_is_one_line_that_names_flag_value_and_cure_before_a_model_loads(words, expected, tmp_path, capsys, monkeypatch):
    files = {"empty": tmp_path / "empty", "used": tmp_path / "used"}
    for folder in files.values():
        folder.mkdir()
    (tmp_path / "used" / "config.json").write_text("{}")
    (tmp_path / "empty" / "file").write_text("")
    good = '{"prompt": "1 + 1 =", "answer": "2"}\n'
    plain = "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1}) + "\n" for n in range(30))
    more = {"plain": plain, "seven": "".join(plain.splitlines(keepends=True)[:6]) + "{'prompt': 7}\n" + plain,
            "unanswered": good + '{"prompt": "2 + 2 ="}', "twice": good + good.replace('"2"', '"3"'), 
            "talk": good + '{"messages": ["2 + 2?"], "answer": 4}',
            "silent": good + '{"messages": [{"role": "assistant", "content": "4"}]}'}
    (tmp_path / "mine.py").write_text("def ten(completion, answer): return 10\ndef broken(completion, answer): return 1 / 0\n")
    gold = good + '{"prompt": "2 + 2 =", "answer": "many"}'
    for name, text in {"gold": gold, "json": good + "{prompt: 2}", "short": good, "void": "", **more}.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text(text)
    if "window" not in expected:        # the one mistake that only the model can tell
        monkeypatch.setattr(H, "load_model", lambda *a: pytest.fail("a model was loaded before the mistake was found"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    try:
        code = H.main(words.format(**files).split())
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr().err.strip()
    assert code == 2 and len(printed.splitlines()) == 1 and expected in printed, f"expected one line with {expected!r}, got {printed!r}"


def test_a_refused_overwrite_leaves_the_earlier_run_as_it_was(tmp_path, capsys):
    run_small(tmp_path / "run", method="grpo", steps=1)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert H.main(["--out", str(tmp_path / "run"), "--overwrite", "--method", "grpo", "--student", str(broken)]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith(f"hybrid_rl.py: error: --student {broken}: does not load") and "Traceback" not in "".join(printed)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_models_of_different_tokens_are_refused_naming_both(tmp_path):
    from transformers import AutoTokenizer
    a = AutoTokenizer.from_pretrained(STUDENT)
    b = AutoTokenizer.from_pretrained(STUDENT)
    H.check_same_tokens(H.Config(), a, b)
    b.add_tokens(["new"])
    with pytest.raises(H.UsageError, match="'new' is 120 there and None here"):
        H.check_same_tokens(H.Config(), a, b)


def test_a_probe_reports_the_mean_kappa_of_the_naive_mix_and_calls_its_rule_a_heuristic(tmp_path, capsys):
    words = ["--prompts-per-step", "6", "--group-size", "4", "--train-prompts", "24", "--out", str(tmp_path / "probe")]
    assert H.main(["--probe", "2", *words]) == 0
    kappas = [line["kappa"] for line in metrics_of(tmp_path / "probe")]
    printed = capsys.readouterr().out
    assert len(kappas) == 2 and f"mean {sum(kappas) / 2:.4g}, median {max(kappas):.4g}, from {min(kappas):.4g} to {max(kappas):.4g} over 2 steps" in printed
    assert "rule of thumb" in printed and "else hybrid is enough): hybrid" in printed and "heuristic" in printed
    (tmp_path / "metrics.jsonl").write_text('{"kappa": null}\n')
    assert "No step had a reward gradient" in H.probe_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kappa": 900}\n{"kappa": 11000}\n')
    assert "m3-select is enough" not in H.probe_report(tmp_path) and ": m3-select\n" in H.probe_report(tmp_path)


def test_questions_from_a_file_train_like_a_task(tmp_path):
    task = toy_tasks.TASKS["chain_sum"]
    rows = [{"prompt": task.prompt(p), "answer": f"#### {task.answer(p)}"} for s in ("train", "eval") for p in task.problems(s, 20, 0)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    result = run_small(tmp_path / "run", data=str(tmp_path / "q.jsonl"), steps=1, eval_problems=20)
    assert result["after"]["all"][1] == 20 and H.results_table(result).count("all") == 1


def questions(tmp_path, count=40, **more):
    task = toy_tasks.TASKS["chain_sum"]
    problems = task.problems("train", count // 2, 0) + task.problems("eval", count // 2, 0)
    rows = [{"prompt": task.prompt(p), "answer": task.answer(p)} | more for p in problems]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return toy_tasks.Questions(tmp_path / "questions.jsonl")


def test_a_conversation_is_a_question_and_the_assistants_last_words_its_solution(tmp_path):
    user, says = (lambda text: {"role": "user", "content": text}), (lambda text: {"role": "assistant", "content": text})
    filler = [{"prompt": f"{n} + 2 =", "answer": float(n + 2)} for n in range(20)] + [{"prompt": "10^22 =", "answer": 1e22}]
    rows = [{"messages": [user("2 + 3 =")], "answer": "5"}, {"messages": [user("4 + 5 ="), says("4 and 5 are 9")]},
            {"messages": [user("1"), says("1"), user("6 + 7 =")], "answer": 13, "difficulty": 2}, *filler]
    (tmp_path / "q.jsonl").write_text("\r\n".join(map(json.dumps, rows)), encoding="utf-8-sig")        # as some editors save it
    task = toy_tasks.Questions(tmp_path / "q.jsonl")
    assert task.reward(task.rows[-1], "22") == 0 and task.reward(task.rows[-1], "1" + "0" * 22) == 1
    asked, worked, long = task.rows[:3]
    assert (asked[1], worked[1:3], long[1], long[3]) == ("5", ("4 and 5 are 9",) * 2, "13", "2")
    assert task.reward(worked, "that is 9") == 1 and task.reward(long, "12") == 0
    task.render(tokenizer_with(TURNS), system="9")
    expected = ["( 9 * 2 + 3 = =", "( 9 * 4 + 5 = =", "( 9 * 1 ) 1 * 6 + 7 = =", "( 9 * 0 + 2 = ="]
    assert [task.prompt(p) for p in task.rows[:4]] == expected
    picky = tokenizer_with("{{ raise_exception('no such role') }}")
    for tokenizer, system, expected in [(tokenizer_with(), "", "line 1: a conversation: the tokenizer of --student has no chat template"),
                                        (tokenizer_with(), "9", "--system: the tokenizer of --student has no chat template"),
                                        (picky, "", "line 1: the chat template refuses it (no such role)")]:
        refuses(expected, task.render, tokenizer, system)


def test_a_reward_may_be_exact_or_anyones_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "judges.py").write_text("def half(completion, answer): return 0.5 * (answer in completion) + 0.5 * (answer == completion)"
                                        "\ndef late(completion, answer): return 1.0 if not completion else None.real\n")
    monkeypatch.chdir(tmp_path)
    assert [toy_tasks.reward_function("exact")(c, "a b") for c in (" a b\n", "a  b", "a b.")] == [1, 0, 0]
    assert [toy_tasks.reward_function("judges:half")(c, "x") for c in ("x", "xy", "")] == [1, 0.5, 0]
    rows = [{"prompt": f"{n} + 1 =", "answer": "yes" if n % 2 else "no"} for n in range(40)]
    Path("words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_small(tmp_path / "run", data="words.jsonl", reward="exact", method="grpo", steps=1)
    run_small(tmp_path / "half", data="words.jsonl", reward="judges:half", method="grpo", steps=1)
    capsys.readouterr()
    assert H.main("--data words.jsonl --reward judges:late --method grpo --out late --eval-problems 4".split()) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and "--reward judges:late: AttributeError" in printed[0] and "of the completion" in printed[0]


def test_a_prompt_that_does_not_fit_the_window_is_refused_by_its_line(tmp_path, capsys):
    questions(tmp_path)
    lines = (tmp_path / "questions.jsonl").read_text().splitlines()
    lines[6] = json.dumps({"prompt": "1 + " * 60 + "1 =", "answer": 61})
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    assert H.main(["--data", str(tmp_path / "questions.jsonl"), "--method", "grpo", "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err.strip()
    assert "line 7: its prompt has 122 tokens, with --max-new-tokens 16 that is 138, and the model's window is 128" in printed
    assert "\n" not in printed


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma"])
@pytest.mark.parametrize("method", ["rstg", "m3-soft"])
def test_models_of_every_family_train_from_their_folders(family, method, tmp_path):
    tokenizer = tokenizer_with()
    tokenizer.pad_token = {"gpt2": None, "llama": tokenizer.eos_token}.get(family, tokenizer.pad_token)
    student, teacher = folder_of(tmp_path / "s", family, 121, tokenizer), folder_of(tmp_path / "t", family, 128, tokenizer)
    questions(tmp_path)
    settings = dict(method=method, student=student, teacher=teacher, data=tmp_path / "questions.jsonl", out=tmp_path / "run", micro_batch=5)
    assert H.main(["train", *words_of(SMALL | settings | dict(steps=2, prompts_per_step=4, train_prompts=8, eval_problems=4, max_new_tokens=8))]) == 0
    assert all(math.isfinite(line["loss"]) for line in metrics_of(tmp_path / "run")) and len(metrics_of(tmp_path / "run")) == 2
    H.load_model("--student", str(tmp_path / "run" / "final"), "cpu")


def test_a_folder_without_all_weights_or_of_another_family_is_refused_in_one_line(tmp_path, capsys):
    from safetensors.torch import load_file, save_file
    student = Path(folder_of(tmp_path / "s", "llama"))
    other = folder_of(tmp_path / "t", "llama", tokenizer=tokenizer_with())
    weights = load_file(student / "model.safetensors")
    for name, break_it in {"cut": lambda p: p.write_bytes(p.read_bytes()[:-100]), "absent": lambda p: p.unlink(),
                           "lacks": lambda p: save_file({k: v for k, v in weights.items() if "norm" not in k}, p, {"format": "pt"})
                           }.items():
        break_it(Path(folder_of(tmp_path / name, "llama")) / "model.safetensors")
        assert H.main(["--student", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
        printed = capsys.readouterr().err.strip().splitlines()
        assert printed[-1].startswith(f"hybrid_rl.py: error: --student {tmp_path / name}: does not load")
        assert "Traceback" not in "".join(printed)
    assert H.main(["--student", str(student), "--teacher", other, "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err.strip()
    assert f"--teacher {other}" in printed and str(student) in printed and "'<bos>'" in printed and len(printed.splitlines()) == 1


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, capsys, monkeypatch):
    import resource
    words, before = ["--method", "grpo", "--out", str(tmp_path / "run")], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert H.main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written (File too large)" in capsys.readouterr().err
    monkeypatch.setattr(H.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**5}))
    assert H.main(words) == 2
    printed = capsys.readouterr().err.strip()
    assert "0 MB are free there, and a checkpoint takes 1 MB" in printed and len(printed.splitlines()) == 1


def test_help_names_every_flag_with_its_default_and_every_method(capsys):
    with pytest.raises(SystemExit) as leaving:
        H.main(["train", "--help"])
    text = capsys.readouterr().out
    assert leaving.value.code == 0 and all(H.flag_of(field.name) in text for field in dataclasses.fields(H.Config))
    assert all(name in text for name in H.METHODS) and "default: 0.0005" in text


def test_importing_the_module_needs_torch_alone_and_does_nothing(tmp_path):
    code = ("import sys\nfor name in ('transformers', 'numpy', 'tqdm', 'tokenizers', 'toy_tasks'): sys.modules[name] = None\n"
            "import hybrid_rl, torch\nhybrid_rl.grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 1), torch.ones(2, 3).bool())")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(Path(H.__file__).parent)})
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr


def test_an_interval_covers_its_share_as_often_as_it_says():
    low, high = H.wilson(0, 100)
    assert low == 0 and abs(high - 0.037) < 1e-3, "Wilson at 0 of 100 reaches 3.7 %"
    share, n = 0.3, 50
    covered = sum(math.comb(n, k) * share**k * (1 - share)**(n - k) for k in range(n + 1) if H.wilson(k, n)[0] <= share <= H.wilson(k, n)[1])
    assert 0.93 < covered < 0.97


# ---------------------------------------------------------------------------------------------------------------------
# toy_tasks.show
# ---------------------------------------------------------------------------------------------------------------------


def looked(method, exact=False, **settings):
    """A run that nothing was written of, and what show sees of its first batch"""
    run, _, _ = H.prepare(H.Config(**(dict(method=method, prompts_per_step=12, train_prompts=64, max_new_tokens=8) | settings)), look=True)
    return run, toy_tasks.show.look(run, 0, exact)


def test_show_prints_a_line_a_token_for_every_kind_of_group_in_100_columns_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert toy_tasks.show.main("--prompts-per-step 24 --group-size 2 --search 0 --html page.html".split()) == 0
    text = capsys.readouterr().out
    assert all(f"-- {kind}, step" in text for kind in ("ALL WRONG", "MIXED", "ALL RIGHT")) and "\33" not in text
    assert max(map(len, text.splitlines())) <= 100 and len(re.findall(r"^<eos> +\d\.\d", text, re.M)) == 3
    assert re.search(r"Step 0: 24 groups, \d+ all wrong, \d+ mixed, \d+ all right; reward and teacher conflict", text)
    assert [p.name for p in tmp_path.rglob("*")] == ["page.html"], "no run folder"
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", page), "the page needs nothing from outside"
    assert "&lt;eos&gt;" in page and "<eos>" not in page and page.count("<table>") == 3


def test_a_kind_that_the_batch_lacks_is_looked_for_in_the_steps_that_the_run_would_take():
    run, _ = looked("opd", prompts_per_step=2, group_size=2, seed=1)
    assert toy_tasks.show.explain(run, 0, 0, False)[0][2] == "ALL RIGHT: no such group in step 0."
    panels, summary = toy_tasks.show.explain(run, 0, 4, False)
    later = panels[2]
    steps = int(re.fullmatch(r"step (\d), the first that has one, after \1 updates", later["when"])[1])
    other, _ = looked("opd", prompts_per_step=2, group_size=2, seed=1)
    for step in range(steps):
        H.train_step(other, step)
    batch = toy_tasks.show.look(other, steps)
    route = next(r for r, kind in toy_tasks.show.KINDS.items() if kind == later["kind"])
    assert later == toy_tasks.show.panel(other, batch, toy_tasks.show.pick(batch, other.config, route), later["when"])
    assert summary.startswith("Step 0: 2 groups")


@pytest.mark.parametrize("words, expected", [
    ("--step -1", "--step -1: must be >= 0"), ("--search x", "--search: 'x' is not a whole number"), ("--stepz 3", "did you mean --step?"),
    ("--steps 3", "--steps: belongs to a run"), ("--out x", "--out: belongs to a run"), ("train", "train: show takes no such word"),
    ("--method grpo --select-share 20", "it belongs to rstg"), ("--html no/page.html", "--html no/page.html: cannot be written"),
    ("--student nowhere", "--student nowhere: no such folder"), ("--method grpo --teacher=", "needs a teacher"), ("--data no.jsonl", "cannot be read"),
    ("--teacher-pool no.json", "--teacher-pool no.json: no such file")])
def test_bad_input_of_show_is_one_line_and_exit_code_2(words, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(H, "load_model", lambda *a: pytest.fail("a model was loaded before the mistake was found"))
    monkeypatch.chdir(tmp_path)
    assert toy_tasks.show.main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and expected in printed.err, printed.err


@pytest.mark.parametrize("method", ["grpo", "opd", "sft", "grpo+opd-failed", "rstg", "hybrid", "m3-select", "m3-soft", "m3-eg"])
def test_the_batch_and_the_streams_shown_are_those_that_the_step_trains_with(method, monkeypatch):
    run, seen = looked(method)
    kept, listen, streams = {}, H.listen, H.completion_streams
    def keep_listen(*given):
        kept["batch"], kept["signals"] = given[1], listen(*given)[0]
        return listen(*given)
    def keep_streams(run, batch, signals, index):
        out = streams(run, batch, signals, index)
        kept["gate"] = dict(zip([(int(b), t) for b in index for t in range(int(batch.mask[b].sum()))], out[1].get("gate", torch.zeros(0)).tolist()))
        kept["loud"] = {(int(b), t): out[0]["distillation"][0][i, t].item() < run.config.divergence_clip for i, b in enumerate(index)
                        for t in range(int(batch.mask[b].sum()))} if "distillation" in out[0] and not run.config.row.distillation == "pg" else {}
        return out
    monkeypatch.setattr(H, "listen", keep_listen)
    monkeypatch.setattr(H, "completion_streams", keep_streams)
    H.train_step(run, 0)
    if method == "sft":         # the step samples nothing, so nothing that is shown may be said to be trained
        assert {t["stream"][0] for b in range(len(seen.rollouts.mask)) for t in toy_tasks.show.tokens_of(seen, run.config, b)} == {"nobody"}
        return
    assert torch.equal(kept["batch"].completion_ids, seen.rollouts.completion_ids), "the batch is the step's own"
    gates = 0
    for b in range(len(seen.rollouts.mask)):
        for t, token in enumerate(toy_tasks.show.tokens_of(seen, run.config, b)):
            reward, teacher = (x[b, t].item() != 0 for x in (kept["signals"].reward, kept["signals"].distillation))
            teacher = teacher and kept["loud"].get((b, t), True) and kept["gate"].get((b, t), 1) > 0
            expected = {(True, True): "both", (True, False): "reward", (False, True): "teacher", (False, False): "nobody"}[reward, teacher]
            assert token["stream"][0] == expected and len(": ".join(token["stream"])) <= 31, f"row {b}, token {t}: {token}"
            if run.config.row.m3 and (b, t) in kept["gate"]:
                gates += 1
                assert abs(token["gate"] - kept["gate"][b, t]) < 1e-6
            if method == "rstg" and token["hears"]:
                assert token["selected"] == (kept["signals"].distillation[b, t].item() != 0)
    assert bool(gates) == run.config.row.m3


def test_the_numbers_of_a_token_are_those_of_two_plain_forward_passes():
    run, seen = looked("m3-soft", divergence_clip=0.7, temperature=0.8)
    b = toy_tasks.show.pick(seen, run.config, H.MIXED)
    prompt, ids = run.tokenizer(seen.prompts[b // 8]).input_ids, seen.rollouts.completion_ids[b].tolist()
    rewards = seen.rewards[b // 8].tolist()
    mean = sum(rewards) / 8
    a = (rewards[b % 8] - mean) / (math.sqrt(sum((r - mean) ** 2 for r in rewards) / 8) + 1e-4)
    for t, token in enumerate(toy_tasks.show.tokens_of(seen, run.config, b)):
        p, q = (twin_softmax(model(torch.tensor([prompt + ids[:t]])).logits[0, -1].tolist(), 0.8) for model in (run.student, run.teacher))
        d, r = [x - y for x, y in zip(p, q)], [-a * ((v == ids[t]) - x) for v, x in enumerate(p)]
        dot, norms = sum(x * y for x, y in zip(d, r)), (math.sqrt(sum(x * x for x in d)) + 1e-6) * (math.sqrt(sum(x * x for x in r)) + 1e-6)
        wanted = {"p_s": p[ids[t]], "p_t": q[ids[t]], "entropy": -sum(x * math.log(x) for x in p), "a_opd": math.log(q[ids[t]] / p[ids[t]]), "a_grpo": a,
                  "k_dr": dot, "cosine": dot / norms, "gate": 0.5 / (1 + math.exp(-dot / norms))}
        for name, value in wanted.items():
            assert abs(token[name] - value) < 1e-4 * max(1, abs(value)), f"token {t}, {name}: expected {value}, got {token[name]}"


def test_show_exact_gives_the_kernel_of_the_students_own_jacobian():
    run, seen = looked("opd", exact=True, prompts_per_step=4)
    b, parameters = toy_tasks.show.pick(seen, run.config, H.MIXED), list(run.student.parameters())
    for t, token in enumerate(toy_tasks.show.tokens_of(seen, run.config, b)):
        ids = torch.tensor([run.tokenizer(seen.prompts[b // 8]).input_ids + seen.rollouts.completion_ids[b, :t].tolist()])
        z, y = run.student(ids).logits[0, -1], seen.rollouts.completion_ids[b, t]
        p, q = z.softmax(-1).detach(), run.teacher(ids).logits[0, -1].softmax(-1)
        pull = lambda delta: torch.cat([g.flatten() for g in torch.autograd.grad(z, parameters, delta, retain_graph=True)])
        d, r = (pull(x / (x.norm() + 1e-6)) for x in (p - q, -token["a_grpo"] * (F.one_hot(y, len(p)) - p)))
        assert abs(token["k_dr"] - (d @ r).item()) <= 1e-4 * (d.norm() * r.norm()).item() + 1e-8
    assert "residual and exact K_DR have the same sign at" in seen.summary


def test_colour_is_for_terminals_alone_and_changes_no_letter(capsys, monkeypatch):
    run, seen = looked("rstg")
    parts = "title", [toy_tasks.show.panel(run, seen, b, "step 0") for b in (0, 90)], seen.summary, toy_tasks.show.legend(run.config, False)
    dull, gaudy = (toy_tasks.show.as_text(*parts, colour=colour) for colour in (False, True))
    assert "\33[" in gaudy and "\33" not in dull and re.sub(r"\x1b\[\d+m", "", gaudy).replace(" ", "") == dull.replace(" ", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, coloured in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", no_color)
        toy_tasks.show.main("--search 0 --prompts-per-step 2 --group-size 2".split())
        assert ("\33[" in capsys.readouterr().out) == coloured


def test_help_of_show_lists_its_flags_and_the_shared_ones_but_not_those_of_a_run(capsys):
    with pytest.raises(SystemExit) as leaving:
        toy_tasks.show.main(["--help"])
    text = capsys.readouterr().out
    assert leaving.value.code == 0 and all(word in text for word in ("--step", "--search", "--exact", "--html", "--method", "--temperature", "m3-soft"))
    assert "--resume" not in text and "SUPPRESS" not in text


def test_text_of_strangers_is_escaped_in_the_page_and_obeyed_by_no_terminal():
    evil = "</td><script>alert('&')</script> $title"
    panel = {"kind": "MIXED", "when": evil, "facts": [("prompt", evil)], "rows": [[(evil, "token")] + [("1", "plus s1")] * 11], "sentence": evil}
    page = toy_tasks.show.as_page(evil, [panel, evil], evil, [(evil, evil)] * 12)
    assert "<script" not in page and page.count("&lt;script&gt;") == 80 and "$title" in page
    assert toy_tasks.show.plain("a\33[31m\n\u202eb") == r"a\x1b[31m\n\u202eb"
    assert toy_tasks.show.fit("\u4e2d\u6587\u5b57", 5) == "\u4e2d\u6587~" and toy_tasks.show.fit("ab", 4) == "ab  "


def test_what_the_readme_prints_is_what_the_code_prints():
    failed, tried = doctest.testfile(str(Path(H.__file__).parent / "README.md"), module_relative=False)
    assert tried > 5 and failed == 0


def test_every_choice_names_a_test_that_exists():
    source, spec = Path(H.__file__).read_text(), Path(__file__).read_text()
    marked = re.findall(r"(?:CHOICE|DEVIATES): .*", source)
    assert marked[1:] and all(f"def {name}(" in spec for line in source.splitlines() if re.search(r"# (CHOICE|DEVIATES):", line)
                              for name in re.findall(r"test_\w+", line) or ["none is named"])


def paired_seeds(left, right, arms=("RSTG", "GRPO"), quantity="accuracy"):
    return {seed: {arms[0]: {quantity: a}, arms[1]: {quantity: b}} for seed, (a, b) in enumerate(zip(left, right))}


def test_an_interval_over_seeds_is_students_t_of_the_paired_differences():
    same(tensor(claims.interval([1.0, 2.0, 3.0, 4.0])), tensor([2.5, 2.5 - 3.182 * 0.645497, 2.5 + 3.182 * 0.645497]), "n 4, std 1.29, t 3.182", tol=1e-5)
    row = claims.judge(claims.Claim("", "", "RSTG", ">", "GRPO"), paired_seeds([50, 60, 70], [40, 51, 59]))
    same(tensor([row["difference"], row["low"], row["high"]]), tensor([10.0, 10 - 4.303 * 3**-0.5, 10 + 4.303 * 3**-0.5]), "paired", tol=1e-5)
    assert row["verdict"] == "holds", "the seeds differ by 10 among themselves, the pairs by 1: unpaired nothing would be decided"
    for n, t in ((2, 12.706), (5, 2.776), (8, 2.365), (20, 2.093)):
        assert claims.T_975[n - 2] == t


@pytest.mark.parametrize("sense, low, high, expected", [
    (">", 0.1, 9, "holds"), (">", -1, 9, "undecided"), (">", -9, 1.9, "does not hold"), (">", 0.5, 1.5, "holds"), ("<", -9, -0.1, "holds"),
    ("<", -1.9, 3, "does not hold"), ("<", -9, 1, "undecided"), (">=", -1.9, 5, "holds"), (">=", -5, 5, "undecided"), (">=", -1.5, -0.5, "does not hold"),
    ("<=", -5, 1.9, "holds"), ("<=", 0.5, 1.5, "does not hold"), ("<=", -5, 5, "undecided"), ("is near", -1.9, 1.9, "holds"), ("is near", 2.1, 5, "does not hold"),
    ("is near", 1, 3, "undecided"), ("differs from", 0.1, 1, "holds"), ("differs from", -3, -0.1, "holds"), ("differs from", -1, 1, "does not hold"),
    ("differs from", -1, 3, "undecided")])
def test_a_verdict_follows_from_the_interval_and_a_margin_of_two(sense, low, high, expected):
    assert claims.verdict(sense, low, high, 2.0) == expected


def test_a_collapse_that_never_came_was_not_avoided():
    collapse = next(claim for claim in claims.CLAIMS if claim.quantity == "collapsed")
    arms = (collapse.left, collapse.right)
    assert claims.judge(collapse, paired_seeds([0, 0, 0], [0, 0, 0], arms, "collapsed"))["verdict"] == "undecided"
    assert claims.judge(collapse, paired_seeds([0, 0, 0], [100, 100, 100], arms, "collapsed"))["verdict"] == "holds"
    assert claims.judge(collapse, paired_seeds([100, 100, 0], [100, 0, 100], arms, "collapsed"))["verdict"] == "undecided"


def test_every_claim_compares_arms_that_are_run_and_flags_that_exist():
    known = set(claims.ARMS) | set(H.STAGES)
    assert len(claims.CLAIMS) >= 16 and len(claims.SEEDS) >= 5
    for claim in claims.CLAIMS:
        assert claim.left in known and (isinstance(claim.right, float) or claim.right in known) and claim.quantity in claims.UNITS
    for arm, words in claims.ARMS.items():
        kind = H.WorkflowConfig if words.startswith("workflow") else H.Config
        kind(**vars(H.build_parser(kind).parse_args(words.removeprefix("workflow").split())))
    assert set(claims.LOOKED_INTO) <= set(claims.ARMS)
    assert any("is near" == claim.sense for claim in claims.CLAIMS)


def test_the_claims_table_the_readme_and_the_file_say_the_same():
    kept = json.loads((Path(claims.__file__).with_suffix(".json")).read_text())
    values = {int(seed): value for seed, value in kept["values"].items()}
    again = [claims.judge(claim, values) for claim in claims.CLAIMS]
    assert again == kept["claims"] and kept["arms"] == claims.ARMS and len(values) == len(kept["seeds"]) >= 5
    readme = (Path(H.__file__).parent / "README.md").read_text()
    assert claims.in_readme(readme, again) == readme, "python -m toy_tasks.claims writes both"
    other = dict(again[0], verdict="holds" if again[0]["verdict"] != "holds" else "undecided")
    assert claims.in_readme(readme, [other, *again[1:]]) != readme, "near miss: a verdict changed by hand"


def test_a_finished_run_of_the_claims_is_not_repeated_and_a_failed_one_is_told(tmp_path, monkeypatch):
    calls = []

    def fake(words, **_):
        calls.append(words)
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text('{"before": {}, "after": {"3": [1, 4], "4": [1, 1]}}')
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"reward_mean": r, "kappa": k, "conflict_rate_scored": 0.5}) + "\n"
                                                      for r, k in ((0.5, 10.0), (0.5, None), (0.5, 1000.0), (0.5, 100.0))))
        return types.SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(claims.subprocess, "run", fake)
    first, again = (claims.run("hybrid", 11, tmp_path) for _ in range(2))
    assert len(calls) == 1 and first == again == {"hybrid": {"accuracy": 40.0, "collapsed": 0.0, "log10 kappa": 2.0, "conflict": 50.0}}
    assert ["--seed", "11"] == calls[0][calls[0].index("--seed"):][:2] and "--diagnose" in calls[0]
    monkeypatch.setattr(claims.subprocess, "run", lambda *_, **__: types.SimpleNamespace(returncode=2, stderr="no room"))
    with pytest.raises(RuntimeError, match="RSTG, seed 10: exit code 2\nno room"):
        claims.run("RSTG", 10, tmp_path)


@pytest.mark.parametrize("words, expected", [
    ("--seeds 1", "--seeds 1: must be 2 to 20"), ("--quick --seeds 4", "choose one"), ("--judge-only --out {empty}", "0 seeds are complete"),
    ("--out {file}", "cannot be written"), ("--fast", "unrecognized arguments: --fast")])
def test_bad_input_to_the_claims_is_one_line(words, expected, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    words = words.format(empty=tmp_path / "empty", file=tmp_path / "file")
    monkeypatch.setattr(sys, "argv", ["claims", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        claims.main()
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and len(error.splitlines()) == 1 and error.startswith("python -m toy_tasks.claims: error") and expected in error


def test_a_student_that_is_the_teacher_overlaps_wholly_and_has_no_opd_advantage(tmp_path):
    model, tokenizer = H.load_model("--student", TEACHER, "cpu")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "final")
    seen = claims.of_two_models(tmp_path, 3)
    assert seen["overlap"] == 100.0 and seen["OPD advantage, positive"] == 0.0
    H.load_model("--student", STUDENT, "cpu")[0].save_pretrained(tmp_path / "final")
    seen = claims.of_two_models(tmp_path, 3)
    assert seen["overlap"] < 90 and seen["OPD advantage, negative"] < 0
