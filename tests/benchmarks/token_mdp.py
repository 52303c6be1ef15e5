"""A token MDP small enough that every prompt's success probability and its gradient are exact.

A response is T tokens of V, drawn by a linear softmax whose parameters all prompts share:
    pi(v | x, t, u) = softmax_v(sum_f theta[t, f, v] phi_f(x) + theta[t, F + u, v]),   u the token before (0 at t = 0).
It is right when each of its tokens is accepted at its place. So p(x) and grad p(x) follow by dynamic programming over
(place, previous token):
    value_t(u) = sum_v pi(v | t, u) q_t(v),   q_t(v) = accepted_t(v) value_{t+1}(v),   value_T = 1,   p = value_0(0)
    d p / d logit[t, u, v] = reach_t(u) pi(v | t, u) (q_t(v) - value_t(u)),
    reach_t(u) = P(all accepted before t, u last).

Shapes: N prompts, F features, K = F + V inputs, U = V previous tokens, B rollouts, J rollouts of each prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenMDP:
    """The prompts: what the policy sees of each, and which tokens are accepted at each place."""

    features_NF: Floats
    accepted_NTV: npt.NDArray[np.bool_]

    @property
    def theta_shape(self) -> tuple[int, int, int]:
        """(T, K, V)."""
        _, places, tokens = self.accepted_NTV.shape
        return places, self.features_NF.shape[1] + tokens, tokens


@dataclass(frozen=True)
class Exact:
    """Success probability of every prompt and its gradient."""

    p_N: Floats
    gradient_NTKV: Floats


def difficulty_classes(
    seed: int, *, prompts: int, features: int, places: int, tokens: int, accepted: tuple[int, ...]
) -> TokenMDP:
    """Prompts in equal classes, class c accepting the `accepted[c]` tokens a hidden linear teacher ranks first.

    Few accepted tokens make a hard class: an untrained policy succeeds with probability (accepted / tokens)^T.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    features_NF = generator.standard_normal((prompts, features)) / np.sqrt(features)
    teacher_TFV = generator.standard_normal((places, features, tokens))
    score_NTV = np.einsum("nf,tfv->ntv", features_NF, teacher_TFV)
    place_NTV = np.argsort(np.argsort(-score_NTV, axis=-1), axis=-1)
    accepted_N = np.asarray(accepted)[np.arange(prompts) % len(accepted)]
    return TokenMDP(features_NF, place_NTV < accepted_N[:, None, None])


def policy(mdp: TokenMDP, theta_TKV: Floats) -> Floats:
    """pi [N, T, U, V]."""
    features = mdp.features_NF.shape[1]
    prompt_NTV = np.einsum("nf,tfv->ntv", mdp.features_NF, theta_TKV[:, :features])
    logit_NTUV = prompt_NTV[:, :, None, :] + theta_TKV[None, :, features:]
    weight_NTUV = np.exp(logit_NTUV - logit_NTUV.max(-1, keepdims=True))
    return np.asarray(weight_NTUV / weight_NTUV.sum(-1, keepdims=True))


def exact(mdp: TokenMDP, pi_NTUV: Floats) -> Exact:
    """p and grad p of every prompt (module docstring)."""
    prompts, places, tokens, _ = pi_NTUV.shape
    advantage_NTUV = np.empty_like(pi_NTUV)
    value_NU = np.ones((prompts, tokens))
    for t in reversed(range(places)):
        q_NV = mdp.accepted_NTV[:, t] * value_NU
        value_NU = np.einsum("nuv,nv->nu", pi_NTUV[:, t], q_NV)
        advantage_NTUV[:, t] = q_NV[:, None, :] - value_NU[:, :, None]
    reach_NTU = np.zeros((prompts, places, tokens))
    reach_NTU[:, 0, 0] = 1
    for t in range(places - 1):
        reach_NTU[:, t + 1] = np.einsum("nu,nuv->nv", reach_NTU[:, t], pi_NTUV[:, t]) * mdp.accepted_NTV[:, t]
    slope_NTUV = reach_NTU[..., None] * pi_NTUV * advantage_NTUV
    by_feature_NTFV = mdp.features_NF[:, None, :, None] * slope_NTUV.sum(2)[:, :, None, :]
    return Exact(value_NU[:, 0], np.concatenate([by_feature_NTFV, slope_NTUV], axis=2))


def ascend(mdp: TokenMDP, steps: int, rate: float) -> list[Floats]:
    """Parameters [T, K, V] after 0..steps steps of exact gradient ascent on J = mean p, from the uniform policy."""
    thetas = [np.zeros(mdp.theta_shape)]
    for _ in range(steps):
        thetas.append(thetas[-1] + rate * exact(mdp, policy(mdp, thetas[-1])).gradient_NTKV.mean(0))
    return thetas


def sample(mdp: TokenMDP, pi_NTUV: Floats, uniform_NJT: Floats) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Tokens [N, J, T], drawn with the given uniform numbers, and which responses are right [N, J]."""
    prompts, places = pi_NTUV.shape[:2]
    below_NTUV = np.cumsum(pi_NTUV, axis=-1)[..., :-1]
    token_NJT = np.zeros(uniform_NJT.shape, dtype=np.int64)
    right_NJ = np.ones(uniform_NJT.shape[:2], dtype=bool)
    prompt_N1 = np.arange(prompts)[:, None]
    previous_NJ = np.zeros(uniform_NJT.shape[:2], dtype=np.int64)
    for t in range(places):
        below_NJV = below_NTUV[prompt_N1, t, previous_NJ]
        previous_NJ = token_NJT[:, :, t] = (uniform_NJT[:, :, t, None] > below_NJV).sum(-1)
        right_NJ &= mdp.accepted_NTV[prompt_N1, t, previous_NJ]
    return token_NJT, right_NJ


def score_gradients(
    mdp: TokenMDP, pi_NTUV: Floats, prompt_B: Ints, token_BT: Ints, coefficient_CBT: Floats
) -> Floats:
    """sum_bt coefficient[c, b, t] grad log pi(token_bt), [C, T, K, V], for C sets of coefficients at once."""
    places, _, tokens = mdp.theta_shape
    previous_BT = np.concatenate([np.zeros_like(token_BT[:, :1]), token_BT[:, :-1]], axis=1)
    one_hot_VV = np.eye(tokens)
    score_BTV = one_hot_VV[token_BT] - pi_NTUV[prompt_B[:, None], np.arange(places), previous_BT]
    features_BTF = np.repeat(mdp.features_NF[prompt_B][:, None], places, axis=1)
    inputs_TKB = np.concatenate([features_BTF, one_hot_VV[previous_BT]], axis=-1).transpose(1, 2, 0)
    weighted_CTBV = coefficient_CBT.transpose(0, 2, 1)[..., None] * score_BTV.transpose(1, 0, 2)
    return np.asarray(inputs_TKB @ weighted_CTBV)
