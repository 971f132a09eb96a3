"""What of loading a model can go on while torch is imported: the kernels are compiled, if they are not yet. Never imports torch."""

from trunkline.config import WorkerConfig
from trunkline.gpu_driver import num_gpus
from trunkline.kernels.build import build_ahead


def begin(config: WorkerConfig) -> None:
    """Return at once. What goes wrong is told when the model is loaded."""
    if config.device == "cpu" or (config.device == "auto" and not num_gpus()):
        build_ahead()
