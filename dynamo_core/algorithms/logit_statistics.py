"""Log-prob, entropy and entropy-change bracket of a token from four sums over the vocabulary.

With u_k = z_k - m (m the running maximum) and e_k = exp(u_k), the sums
    S = sum e,  S_u = sum e u,  Q = sum e^2,  Q_u = sum e^2 u
give, in one pass over chunks of the vocabulary and with ubar = S_u / S,
    log p_a = u_a - log S                 H = log S - ubar
    p_a Lambda_a = p_a (u_a - ubar)       E_vocab = Q_u / S^2 - ubar Q / S^2
since Lambda_k = log p_k + H is the centred logit z_k - sum p z. The bracket is p_a Lambda_a -
E_vocab. Sums are float32 or float64, whatever the logits are: half-precision sums cost 1e-2
absolute.

Shapes: ... any leading axes (tokens), V vocabulary, C a chunk of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from dynamo_core.algorithms.checks import at_least_float32, fail, whole, zero_outside

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
LOWEST: Final = -1e4  # its exp is exactly 0, in float64 too: impossible tokens add nothing, not -inf * 0

_CACHED: Final = 1 << 19  # logits worked on at once: 2 MiB in float32, with as much scratch


class TokenStatistics(NamedTuple):
    """All [...]: `bracket` = p_a Lambda_a - E_vocab, `pi_lambda` = p_a Lambda_a."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    bracket: torch.Tensor
    pi_lambda: torch.Tensor


class _State(NamedTuple):
    """The running maximum and the four sums, all [...]."""

    maximum: torch.Tensor
    s: torch.Tensor
    su: torch.Tensor
    q: torch.Tensor
    qu: torch.Tensor


class LogitSums:
    """The four sums, fed with one vocabulary chunk after another.

    Differentiable in the logits, unless `overwrite`: then `update` works in the logits' own memory,
    a few rows at a time so that they stay in the processor's cache.
    """

    def __init__(self, *, overwrite: bool = False) -> None:
        self._overwrite = overwrite
        self._state: _State | None = None

    def update(self, logits_C: torch.Tensor) -> None:
        """Add the logits [..., C] of a chunk; -inf marks tokens that cannot occur."""
        z = at_least_float32(logits_C)
        maximum = z.detach().amax(-1)
        if self._state is not None:
            maximum = torch.maximum(maximum, self._state.maximum)
        # a maximum of -inf (nothing possible so far) must not turn u into NaN
        safe = zero_outside(maximum != -torch.inf, maximum)
        sums = _sums_in_place(z, safe) if self._overwrite else _sums(z, safe)
        new = _State(maximum, *sums)
        self._state = new if self._state is None else _merged(self._state, new, safe)

    def log_normaliser(self) -> torch.Tensor:
        """log sum exp of all logits, [...].

        Raises:
            AlgorithmError: no chunk was added.
        """
        state = self._added()
        return state.maximum + state.s.log()

    def _added(self) -> _State:
        if self._state is None:
            fail("LogitSums", "empty", "updated with at least one chunk")
        return self._state

    def statistics(self, action_logit: torch.Tensor) -> TokenStatistics:
        """The statistics, given the logit z_a of the token that was taken, [...].

        Raises:
            AlgorithmError: no chunk was added.
        """
        maximum, s, su, q, qu = self._added()
        u_a = at_least_float32(action_logit) - maximum
        log_s, mean_u = s.log(), su / s
        log_prob = u_a - log_s
        p_a = log_prob.exp()
        pi_lambda = torch.where(p_a > 0, p_a * (u_a - mean_u), torch.zeros_like(p_a))
        expectation = (qu - mean_u * q) / (s * s)
        return TokenStatistics(log_prob, log_s - mean_u, pi_lambda - expectation, pi_lambda)


def _sums(z: torch.Tensor, maximum: torch.Tensor) -> Sums:
    """(S, S_u, Q, Q_u) of logits z [..., C] relative to `maximum` [...]."""
    u = (z - maximum.unsqueeze(-1)).clamp(min=LOWEST)
    e = u.exp()
    eu = e * u
    return e.sum(-1), eu.sum(-1), (e * e).sum(-1), (e * eu).sum(-1)


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Slices of so few rows that several passes over them stay in the processor's cache."""
    step = max(1, _CACHED // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _sums_in_place(z: torch.Tensor, maximum: torch.Tensor) -> Sums:
    """`_sums` in the memory of the logits."""
    rows = z.view(-1, z.shape[-1])
    sums = z.new_empty(4, len(rows))
    scratch = torch.empty_like(rows[: max(1, _CACHED // max(z.shape[-1], 1))])
    for block in row_blocks(*rows.shape):
        out = sums[:, block]
        u = rows[block].sub_(maximum.view(-1, 1)[block]).clamp_(min=LOWEST)
        e = torch.exp(u, out=scratch[: len(u)])
        torch.sum(e, -1, out=out[0])
        torch.sum(u.mul_(e), -1, out=out[1])
        torch.sum(u.mul_(e), -1, out=out[3])
        torch.sum(e.mul_(e), -1, out=out[2])
    s, su, q, qu = sums.view(4, *maximum.shape)
    return s, su, q, qu


def _merged(old: _State, new: _State, maximum: torch.Tensor) -> _State:
    """The sums of both, `old` moved to the new maximum (given with -inf replaced)."""
    known = old.maximum != -torch.inf
    drop = zero_outside(known, old.maximum - maximum)  # <= 0
    scale = zero_outside(known, drop.exp())
    square = scale * scale
    return _State(
        new.maximum,
        scale * old.s + new.s,
        scale * (old.su + drop * old.s) + new.su,
        square * old.q + new.q,
        square * (old.qu + drop * old.q) + new.qu,
    )


def logit_statistics(
    logits: torch.Tensor, actions: torch.Tensor, *, chunk: int = 16384
) -> TokenStatistics:
    """(log_prob, entropy, bracket, pi_lambda) of `actions` [...] under `logits` [..., V].

    The logits are read in chunks of the vocabulary, so that no float32 copy of [..., V] exists.
    Divide logits by the rollout temperature before.

    Raises:
        AlgorithmError: shapes that do not match, chunk < 1.
    """
    whole("chunk", chunk, 1)
    if logits.shape[:-1] != actions.shape or logits.ndim == 0:
        fail("actions", f"of shape {tuple(actions.shape)}", f"{tuple(logits.shape[:-1])}")
    sums = LogitSums()
    for start in range(0, logits.shape[-1], chunk):
        sums.update(logits[..., start : start + chunk])
    return sums.statistics(logits.gather(-1, actions.unsqueeze(-1)).squeeze(-1))
