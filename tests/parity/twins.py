"""Slow twins: every vectorised formula once more, with plain Python loops and numbers.

Written from the equations, not from the code under test; nothing here is fast or shared with it.
Arrays are nested lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Matrix = list[list[float]]

# --- token statistics and modulation ------------------------------------------------------------


def token_statistics(logits: Sequence[float], action: int) -> tuple[float, float, float, float]:
    """(log p_a, H, bracket, p_a Lambda_a) from the whole distribution."""
    top = max(logits)
    log_z = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    log_p = [z - log_z for z in logits]
    p = [math.exp(value) for value in log_p]
    entropy = -math.fsum(pk * lk for pk, lk in zip(p, log_p, strict=True) if pk > 0)
    centred = [value + entropy if value > -math.inf else 0.0 for value in log_p]
    expectation = math.fsum(pk * pk * lam for pk, lam in zip(p, centred, strict=True))
    pi_lambda = p[action] * centred[action]
    return log_p[action], entropy, pi_lambda - expectation, pi_lambda


def xi(lp: float, old: float, advantage: float, eps_low: float, eps_high: float) -> float:
    ratio = math.exp(lp - old)
    if advantage > 0 and ratio <= 1 + eps_high:
        return ratio * advantage
    if advantage < 0 and ratio >= 1 - eps_low:
        return ratio * advantage
    return 0.0


def entropy_change(
    logits: Any, actions: Any, old: Any, advantages: Any, mask: Any, *,
    eps_low: float, eps_high: float, expectation: str, weight: Any = None,
) -> Matrix:  # fmt: skip
    result = []
    for b, row in enumerate(mask):
        tokens = [t for t, m in enumerate(row) if m]
        stats = {t: token_statistics(logits[b][t], actions[b][t]) for t in tokens}
        mean = math.fsum(stats[t][3] for t in tokens) / max(len(tokens), 1)
        out = [0.0] * len(row)
        for t in tokens:
            lp, _, bracket, pi_lambda = stats[t]
            inner = bracket if expectation == "vocabulary" else pi_lambda - mean
            w = 1.0 if weight is None else weight[b][t]
            out[t] = -w * xi(lp, old[b][t], advantages[b][t], eps_low, eps_high) * inner
        result.append(out)
    return result


def _masked(values: Any, mask: Any) -> list[float]:
    return [v for row, ms in zip(values, mask, strict=True) for v, m in zip(row, ms, strict=True) if m]


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def modulate(advantages: Any, entropy: Any, change: Any, mask: Any, config: Any) -> Matrix:
    inside = _masked(entropy, mask)
    low, high = min(inside), max(inside)
    moved = [abs(value) for value in _masked(change, mask)]
    scale = max(moved) if config.normaliser == "max" else quantile(moved, config.normaliser)
    result = []
    for b, row in enumerate(mask):
        out = []
        for t, m in enumerate(row):
            value = advantages[b][t] if m else 0.0
            if m and config.compensation and value > 0:
                value *= 1 + config.alpha * (high - entropy[b][t]) / (high - low + 1e-8)
            if m and config.stabilisation:
                x = abs(change[b][t]) / (scale + 1e-8)
                lam = config.lambda_min
                steep = min(config.gamma * (x - config.tau), 700.0)
                value *= lam + (1 - lam) / (1 + math.exp(steep))
            out.append(value)
        result.append(out)
    return result


# --- advantages ---------------------------------------------------------------------------------


def group_advantage(rewards: Sequence[float], group: Sequence[int], kind: str) -> list[float]:
    result = []
    for r, g in zip(rewards, group, strict=True):
        members = [x for x, h in zip(rewards, group, strict=True) if h == g]
        n = len(members)
        if max(members) == min(members):
            result.append(0.0)
            continue
        mean = math.fsum(members) / n
        squares = math.fsum((x - mean) ** 2 for x in members)
        result.append({
            "rloo": r - (math.fsum(members) - r) / (n - 1),
            "dr_grpo": r - mean,
            "grpo_ddof1": (r - mean) / (math.sqrt(squares / (n - 1)) + 1e-6),
            "grpo_ddof0": (r - mean) / (math.sqrt(squares / n) + 1e-6),
        }[kind])  # fmt: skip
    return result


def gae(rewards: Any, values: Any, mask: Any, gamma: float, lam: float, bootstrap: Any = None) -> Matrix:
    """sum_l (gamma lam)^l delta_{t+l} over the row's masked tokens, directly."""
    result = []
    for b, row in enumerate(mask):
        tokens = [t for t, m in enumerate(row) if m]
        end = 0.0 if bootstrap is None else bootstrap[b]
        following = [*(values[b][t] for t in tokens[1:]), end][: len(tokens)]
        deltas = [rewards[b][t] + gamma * after - values[b][t] for t, after in zip(tokens, following, strict=True)]
        out = [0.0] * len(row)
        for i, t in enumerate(tokens):
            out[t] = math.fsum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas)))
        result.append(out)
    return result


def whiten(values: Any, mask: Any, weight: Any = None) -> Matrix:
    inside = _masked(values, mask)
    if weight is None:
        mean = math.fsum(inside) / len(inside)
        variance = math.fsum((v - mean) ** 2 for v in inside) / (len(inside) - 1)
    else:
        w = _masked(weight, mask)
        mean = math.fsum(a * b for a, b in zip(w, inside, strict=True)) / math.fsum(w)
        variance = math.fsum(a * (b - mean) ** 2 for a, b in zip(w, inside, strict=True)) / math.fsum(w)
    scale = math.sqrt(variance + 1e-8)
    return [
        [(v - mean) / scale if m else 0.0 for v, m in zip(row, ms, strict=True)]
        for row, ms in zip(values, mask, strict=True)
    ]


# --- losses -------------------------------------------------------------------------------------


def aggregation(mask: Any, group: Sequence[int], name: str, horizon: float) -> Matrix:
    """The weight of one token at a time."""
    lengths = [sum(bool(m) for m in row) for row in mask]
    rows = [b for b, length in enumerate(lengths) if length]
    prompts = {group[b] for b in rows}

    def weight(b: int) -> float:
        siblings = [r for r in rows if group[r] == group[b]]
        return {
            "token-mean": 1 / sum(lengths),
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / (len(rows) * lengths[b]),
            "seq-mean-token-sum-norm": 1 / (len(rows) * horizon),
            "official-seq-mean-token-sum-norm(no batch mean)": 1 / len(mask[b]),
            "prompt-mean-seq-mean-token-mean": 1 / (len(prompts) * len(siblings) * lengths[b]),
            "prompt-mean-token-mean": 1 / (len(prompts) * sum(lengths[r] for r in siblings)),
            "prompt-mean-token-sum-norm": 1 / (len(prompts) * len(siblings) * horizon),
        }[name]

    return [[weight(b) if m else 0.0 for m in row] for b, row in enumerate(mask)]


def surrogate(lp: float, old: float, advantage: float, eps_low: float, eps_high: float, dual: float | None) -> float:
    ratio = math.exp(min(max(lp - old, -20.0), 20.0))
    clipped = min(max(ratio, 1 - eps_low), 1 + eps_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss


def weighted_sum(weights: Any, token: Callable[[int, int], float]) -> float:
    return math.fsum(w * token(b, t) for b, row in enumerate(weights) for t, w in enumerate(row) if w)


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    top = max(logits)
    e = [math.exp((z - top) / temperature) for z in logits]
    return [value / math.fsum(e) for value in e]


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jsd(p: Sequence[float], q: Sequence[float], beta: float) -> float:
    """p the teacher, q the student."""
    if beta == 0:
        return kl(p, q)
    if beta == 1:
        return kl(q, p)
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


# --- preference ---------------------------------------------------------------------------------


def dpo(
    chosen: Sequence[float], rejected: Sequence[float], reference: Sequence[float], other: Sequence[float],
    weights: Sequence[float], *, beta: float, smoothing: float,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Loss and metrics, pair by pair."""
    loss = 0.0
    metrics = dict.fromkeys(("margin", "accuracy", "chosen_reward", "rejected_reward"), 0.0)
    for c, r, ref_c, ref_r, w in zip(chosen, rejected, reference, other, weights, strict=True):
        better, worse = beta * (c - ref_c), beta * (r - ref_r)
        right, wrong = 1 / (1 + math.exp(worse - better)), 1 / (1 + math.exp(better - worse))
        loss -= w * ((1 - smoothing) * math.log(right) + smoothing * math.log(wrong))
        found = {"margin": better - worse, "accuracy": better > worse, "chosen_reward": better}
        for name, value in {**found, "rejected_reward": worse}.items():
            metrics[name] += w * value
    return loss, metrics


# --- evaluation ---------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - prod_{i<k} (n - c - i) / (n - i): k draws without replacement do not all fail."""
    failure = Fraction(1)
    for i in range(k):
        failure *= Fraction(max(n - c - i, 0), n - i)
    return float(1 - failure)
