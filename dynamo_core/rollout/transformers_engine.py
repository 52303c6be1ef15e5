"""Rollouts with any transformers causal language model.

Each prompt is prefilled once and its cache shared by its rollouts, whose number differs by prompt; finished rows
leave the batch, so that time goes to unfinished ones.
Letters: P prompts, R rollouts, B rows in the batch (not yet removed), L tokens so far, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from dynamo_core.algorithms.logit_statistics import logit_statistics
from dynamo_core.data.batching import left_pad
from dynamo_core.errors import AlgorithmError
from dynamo_core.rollout.sampling import draw_tokens, stream_keys, uniforms
from dynamo_core.types import FinishReason, Rollout, RolloutRequest, Sampling, Segment

COMPACT_BELOW = 0.8
"""Finished rows are removed once fewer than this share of the rows is still decoding: amortises the cache copy."""


@dataclass(frozen=True)
class _Record:
    """What was drawn so far; column t holds the t-th new token."""

    tokens_RT: npt.NDArray[np.int64]
    scores_RT: npt.NDArray[np.float32]  # [3, R, T]: log-prob, entropy, bracket
    near_edge_R: npt.NDArray[np.int64]
    length_R: npt.NDArray[np.int64]
    ended_R: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, rows: int, max_new_tokens: int) -> _Record:
        return cls(
            tokens_RT=np.zeros((rows, max_new_tokens), dtype=np.int64),
            scores_RT=np.zeros((3, rows, max_new_tokens), dtype=np.float32),
            near_edge_R=np.zeros(rows, dtype=np.int64),
            length_R=np.zeros(rows, dtype=np.int64),
            ended_R=np.zeros(rows, dtype=np.bool_),
        )


class TransformersEngine:
    """Samples from `model`, whose weights may change between calls; `weight_version` says which they are."""

    def __init__(self, model: PreTrainedModel, *, eos_token_ids: Sequence[int], batch_tokens: int) -> None:
        """Args:
        eos_token_ids: every one of them ends a rollout.
        batch_tokens: bound on rows x (prompt + new tokens) decoded at once.
        """
        self._model = model
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._batch_tokens = batch_tokens
        self.weight_version = 0

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            AlgorithmError: the requests do not share one way of sampling.
        """
        if len({request.sampling for request in requests}) > 1:
            raise AlgorithmError("requests answered together must share one Sampling")
        training = self._model.training
        self._model.eval()
        finished = {
            (index, rollout.rollout): rollout
            for batch in self._batches(requests)
            for (index, _), group in zip(batch, self._decode([request for _, request in batch]), strict=True)
            for rollout in group
        }
        self._model.train(training)
        return [
            finished[index, rollout]
            for index, request in enumerate(requests)
            for rollout in range(request.first_rollout, request.first_rollout + request.n)
        ]

    def _batches(self, requests: Sequence[RolloutRequest]) -> list[list[tuple[int, RolloutRequest]]]:
        """Requests of similar length together, each batch within the token budget; a large group is split."""
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_token_ids))
        batches: list[list[tuple[int, RolloutRequest]]] = [[]]
        rows = 0
        for index in order:
            request = requests[index]
            longest = len(request.prompt_token_ids) + request.sampling.max_new_tokens
            allowed = max(1, self._batch_tokens // longest)
            start = 0
            while start < request.n:
                if rows >= allowed:
                    batches.append([])
                    rows = 0
                count = min(request.n - start, allowed - rows)
                part = replace(request, n=count, first_rollout=request.first_rollout + start)
                batches[-1].append((index, part))
                rows += count
                start += count
        return [batch for batch in batches if batch]

    def _decode(self, requests: list[RolloutRequest]) -> list[list[Rollout]]:
        """The rollouts of each request, decoded together."""
        sampling, device = requests[0].sampling, self._model.device
        keys_R = np.concatenate(
            [
                stream_keys(r.sampling.seed, r.step, r.prompt_id, range(r.first_rollout, r.first_rollout + r.n))
                for r in requests
            ]
        )
        record = _Record.empty(len(keys_R), sampling.max_new_tokens)
        cache, logits_BV, mask_BL = self._prefill(requests)
        alive_B = np.arange(len(keys_R))
        for position in range(sampling.max_new_tokens):
            tokens_B = self._draw(record, alive_B, logits_BV, keys_R=keys_R, position=position, sampling=sampling)
            keep_B = ~record.ended_R[alive_B]
            if position + 1 == sampling.max_new_tokens or not keep_B.any():
                break
            # Rows that ended stay until enough of them can leave together; what they compute meanwhile is ignored.
            if keep_B.mean() < COMPACT_BELOW:
                chosen = torch.from_numpy(np.flatnonzero(keep_B)).to(device)
                cache.batch_select_indices(chosen)
                mask_BL, tokens_B, alive_B = mask_BL[chosen], tokens_B[chosen], alive_B[keep_B]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(alive_B), 1)], dim=1)
            logits_BV = self._forward(tokens_B.unsqueeze(1), mask_BL, cache)
        return self._collect(requests, record)

    def _prefill(self, requests: list[RolloutRequest]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Run each prompt once, then hand its cache, last logits and mask to all its rows."""
        device = self._model.device
        tokens_PL, mask_PL = left_pad([request.prompt_token_ids for request in requests])
        mask_PL = mask_PL.to(device)
        cache = DynamicCache(config=self._model.config)
        logits_PV = self._forward(tokens_PL.to(device), mask_PL, cache)
        prompt_of_row = torch.tensor([i for i, request in enumerate(requests) for _ in range(request.n)], device=device)
        cache.batch_select_indices(prompt_of_row)
        return cache, logits_PV[prompt_of_row], mask_PL[prompt_of_row]

    def _forward(self, tokens_BL: torch.Tensor, mask_BL: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits of the last position, float32."""
        # Left padding needs explicit positions, else log-probs differ from training's (OpenRLHF#217).
        positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -tokens_BL.shape[1] :]
        output = self._model(
            input_ids=tokens_BL,
            attention_mask=mask_BL,
            position_ids=positions_BL,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _draw(
        self,
        record: _Record,
        alive_B: npt.NDArray[np.int64],
        logits_BV: torch.Tensor,
        *,
        keys_R: npt.NDArray[np.uint64],
        position: int,
        sampling: Sampling,
    ) -> torch.Tensor:
        """One token for every row of the batch, recorded on the rows that had not ended."""
        going_B = ~record.ended_R[alive_B]
        going_R = alive_B[going_B]
        if sampling.temperature == 0:
            tokens_B = logits_BV.argmax(-1)
        else:
            logits_BV = logits_BV / sampling.temperature
            draws_B = torch.from_numpy(uniforms(keys_R[alive_B], position)).to(logits_BV.device)
            tokens_B, near_B = draw_tokens(logits_BV, draws_B)
            record.near_edge_R[going_R] += near_B.cpu().numpy()[going_B]
        scores_B = torch.stack(logit_statistics(logits_BV, tokens_B)[:3]).cpu().numpy()
        tokens = tokens_B.cpu().numpy()[going_B]
        record.tokens_RT[going_R, position] = tokens
        record.scores_RT[:, going_R, position] = scores_B[:, going_B]
        record.length_R[going_R] = position + 1
        record.ended_R[going_R] = np.isin(tokens, self._eos)
        return tokens_B

    def _collect(self, requests: list[RolloutRequest], record: _Record) -> list[list[Rollout]]:
        groups: list[list[Rollout]] = []
        row = 0
        for request in requests:
            group = [self._rollout(request, record, row + i, request.first_rollout + i) for i in range(request.n)]
            groups.append(group)
            row += request.n
        return groups

    def _rollout(self, request: RolloutRequest, record: _Record, row: int, rollout: int) -> Rollout:
        length = int(record.length_R[row])
        log_probs, entropies, brackets = record.scores_RT[:, row, :length].copy()
        segment = Segment(
            token_ids=tuple(record.tokens_RT[row, :length].tolist()),
            loss_mask=np.ones(length, dtype=np.bool_),
            log_probs=log_probs,
            entropies=entropies,
            brackets=brackets,
        )
        return Rollout(
            prompt_id=request.prompt_id,
            rollout=rollout,
            prompt_token_ids=request.prompt_token_ids,
            segments=(segment,),
            finish_reason=FinishReason.EOS if record.ended_R[row] else FinishReason.LENGTH,
            weight_version=self.weight_version,
            near_edge_draws=int(record.near_edge_R[row]),
        )
