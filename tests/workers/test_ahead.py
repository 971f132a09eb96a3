"""What begins before torch is imported."""

import pytest

from trunkline.config import WorkerConfig
from trunkline.workers import ahead


@pytest.mark.parametrize(
    ("device", "gpus", "compiles"), [("auto", 0, True), ("auto", 1, False), ("cpu", 1, True), ("cuda", 0, False)]
)
def test_kernels_are_compiled_where_the_cpu_computes(
    device: str, gpus: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []
    monkeypatch.setattr(ahead, "num_gpus", lambda: gpus)
    monkeypatch.setattr(ahead, "build_ahead", lambda: begun.append(None))
    ahead.begin(WorkerConfig(device=device))
    assert bool(begun) == compiles
