"""Ranks in threads of this process: real gloo groups, without the seconds that new processes take."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trunkline.kernels.collectives import Collectives, connect


def on_ranks(size: int, folder: Path, work: Callable[[Collectives], Any]) -> list[Any]:
    """What `work` returned on each rank. An error on one is raised here; the others' connections to it are closed, so they end, too."""
    folder.mkdir(parents=True)

    def run(rank: int) -> Any:
        ranks = connect(folder, rank=rank, size=size, device=torch.device("cpu"))
        try:
            return work(ranks)
        finally:
            ranks.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
