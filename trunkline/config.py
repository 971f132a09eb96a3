"""Settings, frozen and composed: each part is handed its own piece, never the whole."""

import difflib
import math
import os
from typing import Any, TypedDict, Unpack

import msgspec

from trunkline.errors import ConfigError

POLICIES = ("window", "fcfs", "lpm", "dfs-weight", "shortest", "priority", "throughput", "latency")
EVICTION_POLICIES = ("lru", "lfu", "slru", "priority")
PREEMPTION_MODES = ("auto", "recompute", "swap")
CACHE_SHARING = ("key", "all")
LOG_FORMATS = ("text", "json")
GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar", "outlines")
GRAMMAR_BACKEND_ALIASES = {"guidance": "llguidance"}  # vLLM's names -> ours
UNSUPPORTED_POLICIES = ("error", "validate")
MAX_SPECULATIVE_TOKENS = 64
POOLINGS = ("mean", "last")  # how the hidden states of a text become one: their mean, or that of its last token
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("auto", "none", "gguf", "awq", "gptq", "bitsandbytes", "fp8", "int8")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's names -> ours
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"  # where clients look for a server
API_KEY_VARIABLE = "TRUNKLINE_API_KEY"  # in the environment: the key where --api-key is not given
ADMIN_API_KEY_VARIABLE = "TRUNKLINE_ADMIN_API_KEY"  # and --admin-api-key


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the checkpoint is and how to read it."""

    path: str  # a Hugging Face folder or a GGUF file; or a name on the hub, until models.hub.with_files has made a path of it
    revision: str | None = None  # of such a name: a branch, a tag or a commit; None: main
    download_dir: str | None = None  # where it is downloaded to; None: the cache of huggingface_hub
    load_format: str = "auto"  # one of LOAD_FORMATS
    dtype: str = "auto"  # storage of weights; one of DTYPES. Arithmetic is float32 on a CPU
    quantization: str = "auto"  # storage of matrices, if in fewer bits; one of QUANTIZATIONS, see workers.weight_format
    max_model_len: int | None = None  # None: the model's own
    seed: int = 0  # of dummy weights


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pages and the tree over them."""

    block_size: int = 16  # tokens per page
    enable_prefix_caching: bool = True
    kv_cache_memory: int | None = None  # bytes; None: see workers.memory
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES; auto: as the weights are stored. fp8 is fp8_e4m3
    num_pages: int | None = None  # overrides kv_cache_memory
    eviction_policy: str = "lru"  # one of EVICTION_POLICIES
    host_cache_memory: int | None = None  # bytes of the tier in host memory; None: what the disk tier needs, else none
    disk_cache_dir: str | None = None  # folder of the tier on disk; None: no such tier
    disk_cache_size: int = 10 * 2**30  # bytes
    tenant_cache_share: float = 1.0  # of the pages: more than this of one tenant is evicted first
    max_pinned_share: float = 0.25  # of the pages: what one tenant may pin; all together twice that


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Order and size of the work."""

    policy: str = "window"  # one of POLICIES
    max_num_seqs: int = 256  # requests in one step
    max_num_batched_tokens: int = 512  # tokens in one step: what a long prompt may hold up running streams by
    window_seconds: float = 20.0  # W: nobody is overtaken by a request that arrived more than this later
    window_gamma: float = 50.0  # seconds of queue order per second of uncached prefill
    fairness: bool = True  # between tenants, by the uncached tokens each was served
    target_token_seconds: float | None = None  # wanted longest time between tokens of running streams; None: no target
    max_waiting_requests: int = 4096  # more are refused with 429
    max_waiting_tokens: int = 16 * 2**20  # prompt tokens of all waiting requests; more are refused with 429
    preemption_mode: str = "auto"  # one of PREEMPTION_MODES; auto: what is cheaper
    num_speculative_tokens: int = 8  # drafts a request may have in one step; 0: no speculation


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Compiling what texts must follow."""

    compile_seconds: float = 5.0  # wall time for one grammar; what takes longer is refused
    cache_bytes: int = 256 * 2**20  # of compiled grammars
    compile_threads: int = 2
    forced_tokens: bool = True  # tokens that the grammar leaves no choice about are computed together


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The device."""

    device: str = "auto"  # one of DEVICES
    threads: int | None = None  # CPU threads; None: all cores
    gpu_memory_utilization: float = 0.9  # of the card's memory: what weights, steps and KV pages take together
    enforce_eager: bool = False  # True: no CUDA graphs
    tensor_parallel_size: int = 1  # processes, each with a device of its own, that hold the model together


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process needs."""

    model: ModelSource
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    grammar: GrammarConfig = GrammarConfig()
    log_stats_seconds: float = 10.0  # a status line this often while busy; 0: never


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the HTTP process needs."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()  # any of them is wanted of every request to /v1; none: everything is open
    admin_api_key: str | None = None  # may do what any of them may, and see and flush what belongs to others
    cache_sharing: str = "key"  # one of CACHE_SHARING: who finds whose cached prefixes
    chat_template: str | None = None  # path of a Jinja file, or the template itself; None: the model's own
    tool_call_parser: str = "auto"  # how the model writes tool calls: a dialect; "auto": what its template teaches
    reasoning_parser: str = "none"  # how it writes its thoughts: a family of models; "none": they stay in the text
    pooling: str = "auto"  # what embeddings are made of: one of POOLINGS; auto: what the checkpoint says
    generation_config: str = "auto"  # whose sampling defaults: the checkpoint's ("auto"), ours ("vllm"), or a folder's
    max_body_bytes: int = 32 * 2**20
    dashboard: bool = True  # the page at / and what it is fed with
    strict_params: bool = False  # True: a field that nobody knows is refused, not ignored
    log_format: str = "text"  # one of LOG_FORMATS; of all processes
    enable_log_requests: bool = True  # a line of the log for each that generates, or is refused
    otlp_endpoint: str | None = None  # URL of a collector of traces; None: there are none
    grammar_backend: str = "auto"  # one of GRAMMAR_BACKENDS, of requests that name none
    grammar_unsupported: str = "error"  # one of UNSUPPORTED_POLICIES, of requests that name none
    close_on_length: bool = False  # of requests that do not say
    max_stored_responses: int = 4096  # of /v1/responses, kept to be read again and continued; 0: none
    stored_responses_memory: int = 64 * 2**20  # bytes of them

    @property
    def has_keys(self) -> bool:
        """False: everything is open."""
        return bool(self.api_keys) or self.admin_api_key is not None


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One server."""

    engine: EngineConfig
    api: ApiConfig


class EngineFlags(TypedDict, total=False):
    """The engine's settings, flat, by the names of the command line's flags."""

    revision: str | None
    download_dir: str | None
    load_format: str
    dtype: str
    quantization: str
    max_model_len: int | None
    seed: int
    block_size: int
    enable_prefix_caching: bool
    kv_cache_memory: int | None
    kv_cache_dtype: str
    num_pages: int | None
    eviction_policy: str
    host_cache_memory: int | None
    disk_cache_dir: str | None
    disk_cache_size: int | None
    tenant_cache_share: float
    max_pinned_share: float
    scheduling_policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    fairness: bool
    target_token_seconds: float | None
    max_waiting_requests: int
    max_waiting_tokens: int
    preemption_mode: str
    num_speculative_tokens: int
    grammar_compile_seconds: float
    grammar_compile_threads: int
    grammar_cache_size: int
    grammar_forced_tokens: bool
    device: str
    threads: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    tensor_parallel_size: int
    log_stats_seconds: float


def address(text: str) -> str:
    """The URL of a server as people write it: without a scheme, "localhost:8000", it is HTTP."""
    return text if "://" in text else f"http://{text}"


def engine_config(model: str | os.PathLike[str], **flags: Unpack[EngineFlags]) -> EngineConfig:
    """The composed settings of flat flags; those left out have the defaults above.

    engine_config("path/to/model", max_num_seqs=8).scheduler.max_num_seqs    # 8

    Raises ConfigError, naming the flag, for an unknown flag and for a value that makes no sense whatever the model.
    """
    parts: dict[type[msgspec.Struct], dict[str, Any]] = {part: {} for part in _PARTS}
    parts[ModelSource]["path"] = _model_path(model)
    for flag, value in flags.items():
        if flag not in _PLACES:
            near = difflib.get_close_matches(flag, _PLACES, n=1)
            raise ConfigError(f"There is no setting {flag!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        if flag == "dtype":
            value = DTYPE_ALIASES.get(str(value), value)
        _check(flag, value)
        part, field = _PLACES[flag]
        if not (flag == "disk_cache_size" and value is None):  # as if left out
            parts[part][field] = value
    if flags.get("disk_cache_size") is not None and flags.get("disk_cache_dir") is None:
        raise ConfigError("--disk-cache-size is given, but no folder to keep files in; add --disk-cache-dir FOLDER.")
    if (size := flags.get("tensor_parallel_size", 1)) > 1 and flags.get("disk_cache_dir") is not None:
        raise ConfigError(
            f"--disk-cache-dir is given, but with --tensor-parallel-size {size} no process holds whole pages to write there;"
            " leave one of them out. --host-cache-memory works with both."
        )
    return EngineConfig(
        model=ModelSource(**parts[ModelSource]),
        cache=CacheConfig(**parts[CacheConfig]),
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        worker=WorkerConfig(**parts[WorkerConfig]),
        grammar=GrammarConfig(**parts[GrammarConfig]),
        **parts[EngineConfig],
    )


_PARTS = (ModelSource, CacheConfig, SchedulerConfig, WorkerConfig, GrammarConfig, EngineConfig)
_RENAMED = {
    "policy": "scheduling_policy",
    "compile_seconds": "grammar_compile_seconds",
    "compile_threads": "grammar_compile_threads",
    "cache_bytes": "grammar_cache_size",
    "forced_tokens": "grammar_forced_tokens",
}
# flag -> the part and the field of it that it sets
_PLACES: dict[str, tuple[type[msgspec.Struct], str]] = {
    flag: (part, field)
    for part in _PARTS
    for field in part.__struct_fields__
    if (flag := _RENAMED.get(field, field)) in EngineFlags.__annotations__
}
_CHOICES = {
    "load_format": LOAD_FORMATS,
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "scheduling_policy": POLICIES,
    "eviction_policy": EVICTION_POLICIES,
    "preemption_mode": PREEMPTION_MODES,
    "fairness": (True, False),
    "grammar_forced_tokens": (True, False),
    "device": DEVICES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "enforce_eager": (True, False),
    "enable_prefix_caching": (True, False),
}
_AT_LEAST_ONE = (
    "max_model_len",
    "block_size",
    "kv_cache_memory",
    "num_pages",
    "max_num_seqs",
    "max_num_batched_tokens",
    "threads",
    "tensor_parallel_size",
    "host_cache_memory",
    "disk_cache_size",
    "max_waiting_requests",
    "max_waiting_tokens",
    "grammar_compile_threads",
    "grammar_cache_size",
)
_SHARES = ("tenant_cache_share", "max_pinned_share", "gpu_memory_utilization")
_SECONDS = ("target_token_seconds", "grammar_compile_seconds")
_NOT_ON_THE_COMMAND_LINE = ("num_pages", "log_stats_seconds")
_TEXTS = {
    "revision": "a branch, a tag or a commit",
    "download_dir": "the path of a folder",
    "disk_cache_dir": "the path of a folder",
}
_MAY_BE_NONE = (
    "revision",
    "download_dir",
    "max_model_len",
    "kv_cache_memory",
    "num_pages",
    "threads",
    "host_cache_memory",
    "disk_cache_dir",
    "disk_cache_size",
    "target_token_seconds",
)


def _model_path(model: Any) -> str:
    """An empty name is most likely a variable that was never set: it is neither the current folder nor the built-in model."""
    path = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(
            f"The model is {model!r}; give the path of a folder or a GGUF file, a name on the Hugging Face hub, or none for the built-in model."
        )
    return path


def _check(flag: str, value: Any) -> None:
    if value is None and flag in _MAY_BE_NONE:
        return
    name = flag if flag in _NOT_ON_THE_COMMAND_LINE else f"--{flag.replace('_', '-')}"
    shown = f"{name} is {value!r}"
    if flag in _CHOICES and value not in _CHOICES[flag]:
        raise ConfigError(f"{shown}; allowed is one of {', '.join(map(str, _CHOICES[flag]))}.")
    if flag in _AT_LEAST_ONE and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63):
        raise ConfigError(f"{shown}; allowed is an integer of at least 1.")
    if flag == "seed" and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63):
        raise ConfigError(f"{shown}; allowed is an integer from 0 to {2**63 - 1}.")
    if flag == "num_speculative_tokens" and (type(value) is not int or not 0 <= value <= MAX_SPECULATIVE_TOKENS):
        raise ConfigError(f"{shown}; allowed is an integer from 0 to {MAX_SPECULATIVE_TOKENS}.")
    if flag in _SHARES and not (type(value) in (int, float) and 0 < value <= 1):
        raise ConfigError(f"{shown}; allowed is a share above 0 and up to 1.")
    if flag in _SECONDS and not (type(value) in (int, float) and 0 < value < math.inf):
        raise ConfigError(f"{shown}; allowed is a number of seconds above 0.")
    if flag in _TEXTS and (not isinstance(value, str) or not value or "\0" in value):
        raise ConfigError(f"{shown}; allowed is {_TEXTS[flag]}.")
    if flag == "log_stats_seconds" and not (isinstance(value, int | float) and value >= 0):
        raise ConfigError(f"{shown}; allowed is a number of seconds, or 0 for never.")
