"""The critic: a model of its own that says what a rollout is worth so far.

V_t is read at the position that predicts token t: the value before the token is seen. Values are never divided by the
rollout temperature. The head starts at zero, so that training begins from V = 0 and not from noise (OpenRLHF#186).
Letters: B rows, L tokens of a row, N prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from dynamo_core.algorithms import losses
from dynamo_core.algorithms.checks import at_least_float32
from dynamo_core.config.method import Critic as CriticConfig
from dynamo_core.data.batching import TokenRow, micro_batches
from dynamo_core.data.packing import LaidOut, lay_out
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import merged
from dynamo_core.training.policy import positions
from dynamo_core.training.policy_update import PolicyBatch
from dynamo_core.training.scoring import score_rows


class Critic(nn.Module):
    """A backbone with a `value_head`."""

    def __init__(self, policy: PreTrainedModel) -> None:
        """Start from a copy of the policy's backbone.

        Frozen weights are shared, not copied: a policy with adapters gets a critic with adapters of its own over the
        same base, as a critic that trains whole would need the memory that adapters are there to save.
        """
        super().__init__()
        self.backbone = copy.deepcopy(
            policy.base_model, {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
        )
        parameter = next(self.backbone.parameters())
        width = policy.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, token_ids_BL: torch.Tensor, position_BL: torch.Tensor | None = None) -> torch.Tensor:
        """The value after each token of right-padded or packed rows, [B, L], float32 or better."""
        hidden_BLH = self.backbone(input_ids=token_ids_BL, use_cache=False, **positions(position_BL)).last_hidden_state
        return at_least_float32(self.value_head(hidden_BLH).squeeze(-1))

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass."""
        cast(PreTrainedModel, self.backbone).gradient_checkpointing_enable({"use_reentrant": False})

    def save(self, folder: Path) -> None:
        """Write the backbone as a model folder, adapters merged, and the head beside it."""
        backbone = merged(cast(PreTrainedModel, self.backbone))
        backbone.config.name_or_path = ""
        backbone.save_pretrained(folder, safe_serialization=True)
        save_file({name: tensor.contiguous() for name, tensor in self.value_head.state_dict().items()},
                  folder / "value_head.safetensors")  # fmt: skip


@dataclass(frozen=True)
class Values:
    """What the critic says of a step's rollouts."""

    values_BL: torch.Tensor  # before each token; zero outside the policy's own tokens
    after_B: torch.Tensor  # after the last token of each rollout


def before_tokens(states_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """The values before each token, from those after it: moved by one, zero outside the mask."""
    values_BL = torch.zeros_like(states_BL)
    values_BL[:, 1:] = states_BL[:, :-1]
    return torch.where(mask_BL, values_BL, 0.0)


class ValueLearner:
    """The critic under its engine: it scores rollouts and prompts, and learns from returns."""

    def __init__(self, engine: TrainingEngine, config: CriticConfig, ranks: Ranks, *, size: int, packed: bool) -> None:
        """
        Args:
            size: rows of a micro-batch.
            packed: how they stand in it.
        """
        self.engine = engine
        self.config = config
        self._ranks = ranks
        self._size = size
        self._packed = packed

    def values(self, batch: PolicyBatch) -> Values:
        """The values of all rollouts of a step, on every rank."""
        states_BL = self._states(batch.rows)
        last_B = torch.tensor([len(row.token_ids) - 1 for row in batch.rows])
        return Values(before_tokens(states_BL, batch.mask_BL), states_BL.gather(1, last_B.unsqueeze(-1)).squeeze(-1))

    def prompt_values(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """V at the end of each prompt, [N]: a guess of its success rate before any rollout."""
        rows = [TokenRow(tuple(prompt), (False,) * len(prompt)) for prompt in prompts]
        states_BL = self._states(rows)
        return np.array([states_BL[index, len(row.token_ids) - 1] for index, row in enumerate(rows)], dtype=np.float64)

    def _states(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        return score_rows(self._after, rows, self._size, self._ranks, packed=self._packed)

    def _after(self, batch: LaidOut) -> torch.Tensor:
        after_PC: torch.Tensor = self.engine.forward(batch.token_ids_PC, batch.position_PC)
        return after_PC

    def fit(
        self,
        batch: PolicyBatch,
        values: Values,
        returns_BL: torch.Tensor,
        parts: Iterable[npt.NDArray[np.int64]],
    ) -> dict[str, float]:
        """One optimizer step a mini-batch, and what there is to report.

        Every token weighs the same: targets are noisiest where rollouts are many.

        Args:
            parts: row indices of each mini-batch.

        Raises:
            NumericalFailure: a non-finite loss or gradient.
        """
        totals = {"critic/loss": 0.0, "critic/grad_norm": 0.0, "critic/lr": 0.0}
        used = [part for part in parts if batch.mask_BL[part].any()]
        for part in used:
            weights_BL = torch.zeros_like(returns_BL)
            weights_BL[part] = batch.mask_BL[part].to(returns_BL.dtype) / batch.mask_BL[part].sum()
            loss = 0.0
            for chosen in micro_batches(
                batch.lengths[part].tolist(), self._size, self._ranks.rank, self._ranks.world_size
            ):
                loss += self._micro_step(batch, values.values_BL, returns_BL, weights_BL, part[chosen])
            done = self.engine.step(loss)
            (total,) = self._ranks.sum([loss])
            for name, value in zip(totals, (total, done.grad_norm, done.lr), strict=True):
                totals[name] += value / len(used)
        explained = losses.explained_variance(values.values_BL, returns_BL, batch.mask_BL)
        if torch.isfinite(explained):  # equal returns have nothing to explain
            totals["critic/explained_variance"] = float(explained)
        return totals

    def _micro_step(
        self,
        batch: PolicyBatch,
        old_BL: torch.Tensor,
        returns_BL: torch.Tensor,
        weights_BL: torch.Tensor,
        picked: npt.NDArray[np.int64],
    ) -> float:
        """Forward and backward of some rows; no rows: one with weight 0 keeps the ranks' collectives symmetric."""
        index = picked if picked.size else np.array([0], dtype=np.int64)
        device = self.engine.device
        laid_out = lay_out([batch.rows[row] for row in index], packed=self._packed).to(device)
        width = laid_out.token_ids_PC.shape[1]
        old_bL, returns_bL, mask_bL, weights_bL = (
            part[index, :width].to(device) for part in (old_BL, returns_BL, batch.mask_BL, weights_BL)
        )
        values_BL = before_tokens(laid_out.by_sequence(self._after(laid_out)), mask_bL)
        loss = losses.value_loss(
            values_BL, old_bL, returns_bL, weights_bL * float(picked.size > 0), clip=self.config.value_clip
        )
        self.engine.accumulate(loss, {"value": loss}, batch.prompts_of(picked))
        return float(loss.detach())
