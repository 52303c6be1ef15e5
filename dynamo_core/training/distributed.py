"""Ranks: sums, gathers and barriers that cost nothing with one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dynamo_core.config.base import Resources
from dynamo_core.errors import RecipeError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. `objects` is a gloo group: Python objects never travel through a GPU."""

    rank: int
    world_size: int
    device: torch.device
    objects: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        """True on the rank that writes files."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over all ranks."""
        if self.world_size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self.objects)
        return [float(value) for value in total]

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks of a tensor on the CPU, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.objects)
        return values

    def gather(self, value: T | None) -> list[T]:
        """The values of all ranks that have one, in rank order, on every rank."""
        if self.world_size == 1:
            return [] if value is None else [value]
        gathered: list[T | None] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.objects)
        return [item for item in gathered if item is not None]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self.objects)


def choose_device(resources: Resources) -> torch.device:
    """The device of this rank.

    Raises:
        RecipeError: CUDA is asked for and absent.
    """
    if resources.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("resources.device is 'cuda' but no GPU is visible", "use 'auto' or 'cpu'")
    if resources.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def start(resources: Resources, *, always_group: bool = False) -> Iterator[Ranks]:
    """Set threads, choose the device and join the process group; leaves the others at the end.

    Args:
        always_group: make a process group for a single process too (DeepSpeed needs one). It lives in memory and
            takes no port.
    """
    torch.set_num_threads(resources.threads)
    device = choose_device(resources)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    backend = "gloo" if device.type == "cpu" else "nccl"
    joined = not dist.is_initialized() and (world_size > 1 or always_group)
    if joined and world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif joined:
        dist.init_process_group(backend)
    objects = dist.new_group(backend="gloo") if world_size > 1 else None
    try:
        yield Ranks(rank, world_size, device, objects)
    finally:
        # The group of a single process stays: DeepSpeed keeps references to it, and it holds no port.
        if joined and world_size > 1:
            dist.destroy_process_group()
