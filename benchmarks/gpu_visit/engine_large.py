"""The engine end to end, in Llama-3.1-8B's shape."""

from benchmarks.gpu_visit import engine
from benchmarks.gpu_visit.part import Visit


def run(visit: Visit) -> None:
    engine.measure(visit, "Llama-3.1-8B's shape", engine.LLAMA_8B)
