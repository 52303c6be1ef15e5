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

from typing import NamedTuple

import torch

from dynamo_core.algorithms.checks import at_least_float32, fail, whole, zero_outside


class TokenStatistics(NamedTuple):
    """All [...]: `bracket` = p_a Lambda_a - E_vocab, `pi_lambda` = p_a Lambda_a."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    bracket: torch.Tensor
    pi_lambda: torch.Tensor


class LogitSums:
    """The four sums, fed with one vocabulary chunk after another; differentiable in the logits."""

    def __init__(self) -> None:
        self._maximum: torch.Tensor | None = None
        self._sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def update(self, logits_C: torch.Tensor) -> None:
        """Add the logits [..., C] of a chunk; -inf marks tokens that cannot occur."""
        z = at_least_float32(logits_C)
        maximum = z.detach().amax(-1)
        if self._maximum is not None:
            maximum = torch.maximum(maximum, self._maximum)
        # a maximum of -inf (nothing possible so far) must not turn u into NaN
        safe = torch.where(maximum == -torch.inf, torch.zeros_like(maximum), maximum)
        u = z - safe.unsqueeze(-1)
        possible = u != -torch.inf
        u = zero_outside(possible, u)
        e = zero_outside(possible, u.exp())
        eu = e * u
        new = (e.sum(-1), eu.sum(-1), (e * e).sum(-1), (e * eu).sum(-1))
        self._sums = new if self._sums is None else self._merged(safe, new)
        self._maximum = maximum

    def _merged(
        self, maximum: torch.Tensor, new: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Earlier sums moved to the new maximum, plus the new ones."""
        assert self._sums is not None
        assert self._maximum is not None
        s, su, q, qu = self._sums
        known = self._maximum != -torch.inf
        drop = zero_outside(known, self._maximum - maximum)  # <= 0
        scale = zero_outside(known, drop.exp())
        square = scale * scale
        return (
            scale * s + new[0],
            scale * (su + drop * s) + new[1],
            square * q + new[2],
            square * (qu + drop * q) + new[3],
        )

    def statistics(self, action_logit: torch.Tensor) -> TokenStatistics:
        """The statistics, given the logit z_a of the token that was taken, [...].

        Raises:
            AlgorithmError: no chunk was added.
        """
        if self._sums is None or self._maximum is None:
            fail("LogitSums", "empty", "updated with at least one chunk")
        s, su, q, qu = self._sums
        u_a = at_least_float32(action_logit) - self._maximum
        log_s, mean_u = s.log(), su / s
        log_prob = u_a - log_s
        p_a = log_prob.exp()
        pi_lambda = torch.where(p_a > 0, p_a * (u_a - mean_u), torch.zeros_like(p_a))
        expectation = (qu - mean_u * q) / (s * s)
        return TokenStatistics(log_prob, log_s - mean_u, pi_lambda - expectation, pi_lambda)


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
