"""A model under DeepSpeed: accumulate backward passes, then take one optimizer step.

The caller's loss terms already carry their share of one global denominator (all rows, all ranks), so gradients are
*summed*: nothing is divided by the number of micro-batches or ranks (verl#5366, transformers#34191).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynamo_core.algorithms.schedules import factor
from dynamo_core.config.base import Engine as EngineConfig
from dynamo_core.config.base import Optimizer as OptimizerConfig
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.guard import Guard, check_weights


def _load_deepspeed(device: torch.device) -> Any:
    """Import deepspeed quietly, set up for `device`."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on a launcher's variable, even for one process
    import deepspeed  # noqa: PLC0415  (5 s; only training stages pay for it)
    from deepspeed import ops  # noqa: PLC0415
    from deepspeed.utils import logger  # noqa: PLC0415

    logger.setLevel("ERROR")
    if device.type == "cpu":
        # Else DeepSpeed compiles a shared-memory collective for a minute at first use; gloo gives the same numbers.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


_TAG = "engine"
PERSISTENT_ELEMENTS = 10_000
"""ZeRO 3 keeps parameters up to this size whole: gathering them costs more than it saves."""
_PROBED: Final = 1024
"""Entries of each parameter that are looked at to see whether it moves."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    update_rms: float
    """Root mean square of what weights moved by, over some entries of every parameter."""


class TrainingEngine:
    """One trainable module under DeepSpeed. `module` is called through `forward`, its gradients go to `step`."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        optimizer: OptimizerConfig,
        engine: EngineConfig,
        total_steps: int,
        optimizer_class: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """Args:
        total_steps: optimizer steps of the whole stage, for the schedule.
        optimizer_class: tests may swap AdamW for an optimizer whose updates are linear in the gradient.
        """
        self._config = optimizer
        self._zero = engine.zero_stage
        self._ranks = ranks
        self._total_steps = total_steps
        self._steps = 0
        self.device = ranks.device
        module.train()  # every dropout is 0; gradient checkpointing only works in this mode
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._guard = Guard(module, ranks)
        self._inner = (optimizer_class or self._adamw)(parameters)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*collective.*|.*is deprecated.*")
            deepspeed = _load_deepspeed(ranks.device)
            deepspeed.init_distributed(dist_backend="nccl" if ranks.device.type == "cuda" else "gloo", verbose=False)
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=module, optimizer=self._inner, config=self._deepspeed_config(engine)
            )
        if engine.zero_stage == 3:
            self._register_external_parameters()
        if ranks.world_size == 1 and not engine.zero_stage:
            # One process has nothing to reduce: saves a copy of all gradients a step, and lets float64 models train.
            self._engine.enable_backward_allreduce = False

    def _register_external_parameters(self) -> None:
        """Parameters that a module uses without calling the module that owns them (the output layer's weight)."""
        from deepspeed import zero  # noqa: PLC0415

        module = self.module
        for parameter in getattr(module, "external_parameters", list)():
            zero.register_external_parameter(module, parameter)

    def _adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        config = self._config
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )

    def _deepspeed_config(self, engine: EngineConfig) -> dict[str, Any]:
        # train_batch_size only feeds DeepSpeed's own throughput counters here.
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # backward() only accumulates and step() is the boundary: no fixed accumulation window (open-instruct#1498).
            "managed_gradient_accumulation": False,
            "steps_per_print": None,
            "wall_clock_breakdown": False,
            "zero_allow_untested_optimizer": True,
            # ZeRO clips inside its own step; at stage 0 the norm is also needed for the non-finite guard (see step).
            "gradient_clipping": self._config.grad_clip if engine.zero_stage else 0.0,
        }
        if engine.zero_stage:
            config["zero_optimization"] = self._zero_config(engine)
            config["zero_force_ds_cpu_optimizer"] = False  # its own Adam is compiled at first use
        if engine.precision == "bfloat16":
            config["bf16"] = {"enabled": True}
        return config

    @staticmethod
    def _zero_config(engine: EngineConfig) -> dict[str, Any]:
        config: dict[str, Any] = {"stage": engine.zero_stage, "overlap_comm": False}
        if engine.zero_stage == 3:
            config["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
        if engine.offload == "cpu":
            config["offload_optimizer"] = {"device": "cpu"}
            if engine.zero_stage == 3:
                config["offload_param"] = {"device": "cpu"}
        return config

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it every rank sees whole parameters, to read and save them. Entered by all ranks."""
        if self._zero < 3:
            yield
            return
        from deepspeed import zero  # noqa: PLC0415

        with zero.GatheredParameters(list(self.module.parameters())):
            yield

    def copy_into(self, copy: nn.Module) -> None:
        """Bring a copy of the module up to date, one parameter at a time. Called by all ranks."""
        from deepspeed import zero  # noqa: PLC0415

        for source, target in zip(self.module.parameters(), copy.parameters(), strict=True):
            with zero.GatheredParameters([source]), torch.no_grad():
                target.copy_(source)

    @property
    def module(self) -> nn.Module:
        """The module itself, for generation and saving."""
        module: nn.Module = self._engine.module
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with DeepSpeed's hooks in place."""
        return self._engine(*args, **kwargs)

    def accumulate(
        self, loss: torch.Tensor, terms: Mapping[str, torch.Tensor] | None = None, prompt_ids: Sequence[str] = ()
    ) -> None:
        """Backward pass of one micro-batch's share of the loss.

        DeepSpeed averages gradients over ranks; multiplying by their number makes that a sum.

        Args:
            terms: the parts of the loss by name, and
            prompt_ids: of the rows: named if something of this pass is not finite.
        """
        self._engine.backward(loss * self._ranks.world_size, scale_wrt_gas=False)
        self._guard.observe({"loss": loss} if terms is None else terms, prompt_ids)

    def step(self, loss: float) -> StepReport:
        """Reduce over ranks, check, clip and update.

        Args:
            loss: this step's loss on this rank, already read; it is checked on all ranks before anything moves.

        Raises:
            NumericalFailure: a non-finite loss, gradient or weight, on all ranks alike. Of the first two, no weight
                has moved.
        """
        step = self._steps + 1
        self._guard.check(loss, step)
        lr = self._config.lr * factor(
            self._config.schedule, self._steps, total=self._total_steps, warmup=self._config.warmup_steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        before = self._probe()
        norm = self._update(step)
        moves = self._probe() - before
        squares, count = self._ranks.sum([float(moves.square().sum()), float(moves.numel())])
        moved = math.sqrt(squares / count)
        self._steps = step
        self._guard.step_is_over()
        if not math.isfinite(moved):
            self.check_weights()
        return StepReport(grad_norm=norm, lr=lr, update_rms=moved)

    @torch.no_grad()
    def _probe(self) -> torch.Tensor:
        """Some entries of every parameter that trains, evenly spread; of this rank's shards under ZeRO 3."""
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        flat = [getattr(parameter, "ds_tensor", parameter).detach().reshape(-1) for parameter in trained]
        return torch.cat([values[:: max(1, len(values) // _PROBED)] for values in flat]).float()

    def check_weights(self) -> None:
        """Called before anything is saved.

        Raises:
            NumericalFailure: a weight is not finite, on all ranks alike.
        """
        with self.gathered():
            check_weights(self.module, self._ranks, self._steps)

    def save(self, folder: Path) -> None:
        """Write this rank's part of trained weights and optimizer, if all is finite.

        Frozen weights are where they came from.
        """
        self.check_weights()
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, client_state={"steps": self._steps}, save_latest=False,
            exclude_frozen_parameters=True,
        )  # fmt: skip

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote with the same number of ranks."""
        whole = all(parameter.requires_grad for parameter in self._engine.module.parameters())
        _, client = self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=whole)
        self._steps = client["steps"]

    def _update(self, step: int) -> float:
        """Take the step; returns the gradient norm, which was finite before a weight moved."""
        norms: list[float] = []

        def look(*_: object) -> None:
            """Runs after gradients are summed over ranks and before the optimizer touches a weight."""
            if self._zero:  # it clips by itself
                norms.append(float(self._engine.optimizer._global_grad_norm))
            else:
                parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
                norms.append(float(nn.utils.clip_grad_norm_(parameters, self._config.grad_clip, foreach=False)))
            self._guard.check_norm(norms[-1], step)

        hook = self._inner.register_step_pre_hook(look)
        try:
            self._engine.step()
        finally:
            hook.remove()
        if not norms:  # ZeRO in float32 passes over a step whose norm is not finite
            self._guard.check_norm(float(self._engine.get_global_grad_norm()), step)
        return norms[0]
