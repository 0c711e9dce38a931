"""Every key that a case may have, with its default and meaning; `rules.py` has the rules between keys.

Imports nothing heavy: the launcher checks a case in milliseconds. `docs/config.md` is generated from this file.
"""

from dataclasses import dataclass
from typing import TypeVar

from umbra.cpu_offload.planner.hits import CURVES
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.schema import OPEN, OPEN_OR_NONE, key, section
from umbra.models.registry import FAMILIES, conventions
from umbra.ops.formats import GROUP_SIZES
from umbra.ops.parallel.partitions import ParallelSizes

T = TypeVar("T")
EXE_MODES = tuple(dict.fromkeys(mode for facts in PLATFORMS.values() for mode in facts.exe_modes))
PAGE_SIZES = ", ".join(f"{facts.page_size} on {name}" for name, facts in PLATFORMS.items())

MOST_DRAFTING = 16  # sequences of a data-parallel group that get drafts; steps of more read most weights anyway
LOOKUP_TOKENS, MODEL_TOKENS = 7, 3  # guessed tokens of a sequence in a step, unless the case says how many


@dataclass(frozen=True)
class ModelSettings:
    with_ckpt: bool = key(
        True, "load the checkpoint; false: random weights of the shapes in `config.json`, for benchmarks"
    )
    dtype: str = key(
        "bfloat16",
        "type of weights, activations and KV cache",
        choices=("bfloat16", "float16", "float32"),
        elsewhere=("dtype",),
    )
    tokenizer_mode: str = key(
        "default", "`chat` puts each prompt through the checkpoint's chat template", choices=("default", "chat")
    )
    chat_template: str = key(
        "",
        "file with the chat template, in Jinja, to use in place of the checkpoint's; empty: the checkpoint's",
        elsewhere=("chat_template", "chat_template_file"),
    )
    output_format: str = key(
        "auto",
        "how the model marks reasoning and tool calls in its answers (docs/text.md). auto: as its chat "
        "template says; none: answers are plain text",
        choices=lambda: ("auto", *conventions().formats, "none"),
    )
    reasoning: str = key(
        "split",
        "split: reasoning is separated from the answer's content; inline: it stays in the content, after "
        "`<think>`, for clients that cannot give it back separately",
        choices=("split", "inline"),
    )
    enable_cache_compile: bool = key(
        False, "keep compiled graphs in `compile_cache/CASE` for the next start (graph modes only)"
    )
    enable_profiler: bool = key(
        False, "write traces of the first prefill and decode steps next to the report (open in Perfetto)"
    )


@dataclass(frozen=True)
class DataSettings:
    prompts: tuple[str, ...] = key(
        (),
        "the prompts of `run`, which a server, a chat and `LLM` do not need; with `with_ckpt: false` and none, "
        "`batch_size` random ones are made",
    )
    max_model_len: int | None = key(
        None,
        "most tokens of a prompt and its answer together; `input_max_len` is then what `max_new_tokens` leaves "
        "of them, which may be half at most. 0: the sum of the two",
        means=OPEN,
        minimum=0,
        maximum=1 << 21,
        elsewhere=("max_model_len", "context_length", "ctx_size", "n_ctx"),
    )
    input_max_len: int = key(1024, "most tokens of a prompt", minimum=1, maximum=1 << 20)
    long_prompts: str = key(
        "error",
        "what to do with a prompt longer than `input_max_len`: refuse it, or keep its last `input_max_len` tokens",
        choices=("error", "truncate"),
    )
    max_new_tokens: int = key(
        32, "most tokens generated for a prompt", minimum=1, maximum=1 << 20, elsewhere=("max_tokens", "n_predict")
    )
    batch_size: int = key(
        1,
        "most sequences that run together; a waiting prompt takes the place of a finished one",
        minimum=1,
        maximum=4096,
        elsewhere=("max_num_seqs", "max_running_requests", "parallel"),
    )
    chunked_prefill_size: int | None = key(
        None,
        "most prompt tokens of one prefill step of a data-parallel group; longer prompts take several; 0: no limit "
        "or, where experts are copied to a device's own memory for each step, the largest that fits",
        means=OPEN,
        minimum=0,
        elsewhere=("chunked_prefill_size",),
    )
    mixed_prefill_size: int | None = key(
        256,
        "the same for a step in which other sequences decode; a smaller limit slows them down less while a long "
        "prompt is prefilled; 0: no limit",
        means=OPEN,
        minimum=0,
    )
    warm_up: bool = key(True, "run the first prompts once for two tokens before anything is timed")


@dataclass(frozen=True)
class DraftSettings:
    method: str = key(
        "none",
        "speculative decoding: how a decode step drafts further tokens of each sequence, which the next step checks, "
        "so that the tokens stay the same. lookup: those that followed the same tokens before, in the prompt or the "
        "answer; mtp: those that the model's own layer for multi-token prediction predicts, eagle3: those of the head "
        "in `model_path`, made for the model; with both, where the same tokens came before, what followed them",
        choices=("none", "lookup", "mtp", "eagle3"),
        elsewhere=("speculative_algorithm",),
        bare=False,
    )
    model_path: str = key(
        "",
        "folder of an EAGLE3 head, or its name on a hub; a relative path starts at the project's root",
        elsewhere=("speculative_draft_model_path",),
        bare=False,
    )
    tokens: int | None = key(
        None,
        "most drafted tokens of a sequence in a step, which has only as many as are measured to pay, while at "
        f"most {MOST_DRAFTING} sequences of a group decode; auto: {LOOKUP_TOKENS}, or {MODEL_TOKENS} without lookup",
        means={"auto": None},
        minimum=1,
        maximum=15,
        elsewhere=("num_speculative_tokens",),
    )

    @property
    def most(self) -> int:
        """Most guessed tokens of a sequence in a step; 0: none are."""
        default = {"none": 0, "lookup": LOOKUP_TOKENS}.get(self.method, MODEL_TOKENS)
        return default and (self.tokens or default)


@dataclass(frozen=True)
class SamplingSettings:
    temperature: float = key(
        0.0,
        "divides the logits before sampling; 0: always take the most probable token",
        minimum=0.0,
        maximum=100.0,
        elsewhere=("temperature", "temp"),
    )
    top_k: int | None = key(
        None, "sample among the k likeliest tokens; 0: all", means=OPEN, minimum=0, elsewhere=("top_k",)
    )
    top_p: float = key(
        1.0,
        "sample among the fewest tokens whose probabilities reach p",
        minimum=0.0,
        maximum=1.0,
        elsewhere=("top_p",),
    )
    min_p: float = key(
        0.0,
        "sample among tokens at least this share as probable as the most probable one",
        minimum=0.0,
        maximum=1.0,
        elsewhere=("min_p",),
    )
    repetition_penalty: float = key(
        1.0,
        "divides positive logits of tokens of the prompt or the answer, multiplies others",
        minimum=0.01,
        maximum=100.0,
        elsewhere=("repetition_penalty", "repeat_penalty"),
    )
    generation_config: str = key(
        "auto",
        "auto: `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty`, where the case does not say "
        "them, are those of the checkpoint's generation_config.json; none: they are the defaults of these keys",
        choices=("auto", "none"),
        elsewhere=("generation_config",),
    )
    seed: int = key(
        0, "prompt i draws its random numbers from the seed `seed` + i", minimum=0, maximum=1 << 62, elsewhere=("seed",)
    )
    ignore_eos: bool = key(
        False, "end-of-sequence tokens do not end a sequence, so `max_new_tokens` are generated; for benchmarks"
    )


@dataclass(frozen=True)
class ParallelSettings:
    attn_tp_size: int = key(
        0,
        "ranks that share one attention layer; the ranks left over are data-parallel groups "
        "(attn_dp = world_size / attn_tp_size), each with its own sequences; 0: world_size",
        minimum=0,
    )
    moe_tp_size: int = key(
        0,
        "ranks that share one expert; the ranks left over split the experts "
        "(moe_ep = world_size / moe_tp_size); 0: world_size",
        minimum=0,
    )
    expert_slots: int = key(
        0,
        "experts of each layer that a rank holds; above experts / moe_ep there is room for copies of those that get "
        "the most tokens. Experts are then placed over ranks by their use (docs/cluster.md). 0: each has one place, in "
        "order. Needs attn_tp_size: 1 and moe_tp_size: 1. Never tried on hardware",
        minimum=0,
        maximum=1024,
    )
    rebalance_steps: int | None = key(
        1000,
        "steps between two placements of the experts in `expert_slots`, by the tokens that each got meanwhile; "
        "0: the first placement stays",
        means=OPEN,
        minimum=0,
    )
    embed_tp_size: int = key(0, "ranks that share the embedding table; 0: attn_tp_size", minimum=0)
    lmhead_tp_size: int = key(0, "ranks that share the output head; 0: attn_tp_size", minimum=0)
    sequence_parallel_tokens: int | None = key(
        None,
        "fewest tokens of each data-parallel group in prefill steps that are sequence-parallel: each rank "
        "computes a share of the rows of residuals, norms and routers, with reduce-scatters and all-gathers in place "
        "of all-reduces. Steps below about 1000 tokens lose by it (others' experience); never tried on hardware "
        "here; 0: no step is",
        means=OPEN,
        minimum=0,
    )
    comm_timeout_s: int = key(
        1800, "a collective that waits longer than this ends the job with an error", minimum=1, maximum=86400
    )
    node_timeout_s: int = key(
        15,
        "on several nodes: a node whose launcher has not answered the others for so long is lost, and the job ends "
        "(docs/cluster.md)",
        minimum=2,
        maximum=86400,
    )
    join_timeout_s: int = key(
        600, "on several nodes: how long a launcher waits for those of the other nodes", minimum=1, maximum=86400
    )

    def sequence_parallel(self, tokens: int) -> bool:
        """Returns whether a prefill step is sequence-parallel if the smallest data-parallel group has `tokens` tokens
        in it."""
        return self.sequence_parallel_tokens is not None and tokens >= self.sequence_parallel_tokens


@dataclass(frozen=True)
class QuantizationSettings:
    method: str = key(
        "auto",
        "how linear layers and experts are kept. auto: as they are in the checkpoint, bit for bit, if it is "
        "quantised and the platform supports its format; else like none. none: in `dtype`. q8, q4: quantised to 8 or "
        "4 bits while the checkpoint is read, unless it has that many bits already; the output head gets 8 bits in "
        "groups of 32 on cpu. The router and the embedding keep `dtype`",
        choices=("auto", "none", "q8", "q4"),
        elsewhere=("quantization",),
    )
    rest: str = key(
        "none",
        "beside weights kept as in the checkpoint: its other linear layers and the output head. none: in "
        "`dtype`, but the head in 8 bits on cpu unless the format is for experts alone (MXFP4). q8: in 8 "
        "bits in groups of 32; cpu only",
        choices=("none", "q8"),
    )
    group_size: int = key(
        32, "columns of a row that share a scale: 32, 64 or 128", minimum=GROUP_SIZES[0], maximum=GROUP_SIZES[-1]
    )
    keep_packed: bool = key(
        True,
        "keep quantised weights in `packed_cache/`, as large as they are in memory, so that the next start "
        "maps them instead of packing again",
    )
    zero_points: bool = key(False, "a zero point for each group as well, as AWQ checkpoints have; q4 only")


@dataclass(frozen=True)
class CacheSettings:
    page_size: int = key(
        0,
        f"tokens in one page of the KV cache; 0: the platform's choice, {PAGE_SIZES}",
        minimum=0,
        maximum=4096,
        elsewhere=("block_size", "page_size"),
    )
    kv_dtype: str = key(
        "auto",
        "type of cached keys and values; auto: model_config.dtype; int8: half of bfloat16's bytes, with a "
        "scale for each token and head",
        choices=("auto", "bfloat16", "float16", "float32", "int8"),
        elsewhere=("kv_cache_dtype", "cache_type_k"),
    )
    disk_path: str = key(
        "",
        "folder in which a server keeps prefixes for later starts (docs/serving.md); a relative path starts at the "
        "project's root; empty: none are kept",
    )
    disk_gb: float = key(
        16.0, "most GB of the files in `disk_path`, of all ranks of a machine together", minimum=0.001, maximum=1e6
    )
    disk_salted_only: bool = key(
        False,
        "keep only prefixes of requests with an API key or a `cache_salt`: for a server without keys that has "
        "several users behind a proxy",
    )
    state_checkpoints: int = key(
        4,
        "with the prefix cache, and recurrent states: sets of states for which there is room beyond those of "
        "running sequences, to keep after prompts and answers",
        minimum=0,
        maximum=4096,
    )


@dataclass(frozen=True)
class OffloadSettings:
    mode: str = key(
        "none",
        "where experts are kept. none: all are on the device, without shadows. In the other modes the CPU has "
        "a shadow of every expert and computes, inside the decode graph, those that are not resident in the arena. "
        "resident: all experts are resident; fixed: `slots` experts are; elastic: as many as the KV cache leaves room "
        "for",
        choices=("none", "resident", "fixed", "elastic"),
    )
    start_layer: int = key(
        0, "first layer with shadows; experts of earlier layers stay on the device, outside the arena", minimum=0
    )
    slots: int | None = key(
        None,
        "mode fixed: number of resident experts on each rank, in all layers together; 0: the planner's choice; "
        "-1: none, the CPU computes all experts",
        means=OPEN_OR_NONE,
        minimum=-1,
    )
    arena_mb: float | None = key(
        None,
        "size in MB of the arena, the buffer that expert slots and KV pages share on each rank; 0: room for all "
        "experts (mode fixed: for `slots`) and for a full batch of the longest sequences",
        means=OPEN,
        minimum=0,
        maximum=1 << 24,
    )
    shadow_threads: int | None = key(
        None,
        "threads of the pool that computes shadows on each rank. They have cores of their own if enough cores are left "
        "besides `threads`. 0: the planner's choice, together with `threads` if that is 0 too",
        means=OPEN,
        minimum=0,
        maximum=1024,
    )
    interval: int = key(1, "decode steps between two decisions on which experts are resident", minimum=1)
    max_swaps: int | None = key(
        None,
        "most experts that become resident at one decision; 0: the planner's choice; -1: none, residents never change",
        means=OPEN_OR_NONE,
        minimum=-1,
    )
    stream_tokens: int | None = key(
        None,
        "fewest tokens of a step in which the device computes experts that are not resident too: on `cpu` in place, "
        "else the copied ones; 0: the planner's choice; -1: never",
        means=OPEN_OR_NONE,
        minimum=-1,
    )
    measure_s: float = key(
        1.2, "about how many seconds the planner measures synthetic experts before weights are loaded", minimum=0
    )
    hits: str = key(
        "even",
        f"hit rates of residents that the planner expects, as SHARE:RATE,... of earlier runs, or by name: "
        f"{', '.join(CURVES)}",
    )
    timeout_s: int = key(30, "most seconds that a step waits for shadow experts before it ends in an error", minimum=1)


@dataclass(frozen=True)
class ServeSettings:
    host: str = key(
        "127.0.0.1",
        "address that the server listens on; one that others can reach needs `api_key_file`",
        elsewhere=("host",),
    )
    port: int = key(8000, "port that the server listens on", minimum=1, maximum=65535, elsewhere=("port",))
    api_key_file: str = key(
        "",
        "file with one API key a line; clients must send one of them; empty: none is needed",
        elsewhere=("api_key_file",),
    )
    ssl_certfile: str = key(
        "",
        "PEM file with the server's certificate and its chain, for TLS; empty: none",
        elsewhere=("ssl_certfile", "ssl_cert_file"),
    )
    ssl_keyfile: str = key(
        "",
        "PEM file with the certificate's private key, without a password; empty: it is in `ssl_certfile`",
        elsewhere=("ssl_keyfile", "ssl_key_file"),
    )
    served_model_name: str = key(
        "",
        "the model's name in the API, or several with spaces between, of which answers have the first; empty: the "
        "case's name",
        elsewhere=("served_model_name", "alias"),
    )
    cors_origins: tuple[str, ...] = key(
        (),
        "origins whose pages may use the server from a browser, such as http://localhost:3000; `*`: all",
        elsewhere=("allowed_origins",),
    )
    request_log: bool = key(
        True, "print a line for each request when it has ended: id, model, tokens, first token, rate and reason"
    )
    max_queue: int | None = key(
        None, "most requests that wait; further ones get status 429; 0: four times `batch_size`", means=OPEN, minimum=0
    )
    target_ttft_s: float = key(
        30.0,
        "a request whose first token would take longer than this, by the tokens that wait before it and the "
        "measured rate, gets status 429",
        minimum=0.1,
    )
    queue_timeout_s: float = key(60.0, "a request that waits longer than this gets status 503", minimum=0.1)
    reserve: int | None = key(
        256,
        "most tokens beyond its prompt that a request is promised when it starts; more are given while there is "
        "memory, and then the youngest request is preempted: it waits and is computed again; -1: all of its "
        "`max_tokens`, so that nothing is ever preempted",
        means={-1: None},
        minimum=-1,
    )
    prefix_cache: bool = key(True, "keep the KV pages of requests that have ended, for later prompts that begin alike")
    prefix_floor: int = key(2048, "tokens of kept prefixes that are dropped only after all experts", minimum=0)
    prefill_pause_ms: int = key(
        200, "prompts are prefilled in chunks that keep running requests waiting about this long", minimum=1
    )
    drain_s: float = key(30.0, "most seconds that running requests have to end when the server is asked to", minimum=0)
    step_timeout_s: float = key(
        60.0, "ranks that have not finished a step after this many seconds are ended, with the cause named", minimum=1
    )
    restarts: int = key(0, "how often ranks that died are started again while the port stays open", minimum=0)


def with_sections_of_devices(case: type[T]) -> type[T]:
    """Gives the class of cases the sections that devices contribute, after its own."""
    for facts in PLATFORMS.values():
        for name, kind in facts.sections.items():
            case.__annotations__[name] = kind
            setattr(case, name, section(kind))
    return case


@dataclass(frozen=True)
@with_sections_of_devices
class Case:
    name: str = ""  # the YAML file's name, not a key
    description: str = key("", "one line for `bash infer.sh --list`")
    model_name: str = key(
        next(iter(FAMILIES)), "the architecture; must be the checkpoint's `model_type`", choices=lambda: tuple(FAMILIES)
    )
    model_path: str = key("", "folder or GGUF file of the checkpoint; a relative path starts at the project's root")
    platform: str = key("cpu", "where the model runs", choices=tuple(PLATFORMS), elsewhere=("device",))
    exe_mode: str = key(
        "eager",
        "how the decode step runs: op by op, or captured once for each batch size and replayed",
        choices=EXE_MODES,
    )
    world_size: int = key(
        1, "number of ranks", minimum=1, maximum=4096, elsewhere=("tensor_parallel_size", "tp_size", "tp")
    )
    instruction_set: str = key(
        "auto",
        "instruction set of the CPU's kernels; auto: the best that this machine has",
        choices=(
            "auto",
            "generic",
            "avx2",
            "avx_vnni",
            "avx512_vnni",
            "avx512_bf16",
            "amx",
            "neon_dotprod",
            "neon_i8mm",
        ),
    )
    threads: int | None = key(
        None,
        "CPU threads of each rank, spread over its NUMA nodes; 0: the fewest that read memory at nearly full speed, "
        "measured at start; with several ranks on a machine, its physical cores divided by them; the planner of "
        "`offload_config` may leave some to the shadow pool",
        means=OPEN,
        minimum=0,
        maximum=1024,
        elsewhere=("threads",),
    )
    verbose: bool = key(False, "print what the planner of shadow experts has measured, not its choices alone")
    strict: bool = key(
        False,
        "a fallback that would be silent (an operator without a converter, eager in place of a graph) and "
        "versions that were not tested together are errors, not warnings",
    )
    model_config: ModelSettings = section(ModelSettings)
    data_config: DataSettings = section(DataSettings)
    draft_config: DraftSettings = section(DraftSettings)
    sampling_config: SamplingSettings = section(SamplingSettings)
    parallel_config: ParallelSettings = section(ParallelSettings)
    quantization: QuantizationSettings = section(QuantizationSettings)
    cache_config: CacheSettings = section(CacheSettings)
    offload_config: OffloadSettings = section(OffloadSettings)
    serve_config: ServeSettings = section(ServeSettings)

    def of_device(self, kind: type[T]) -> T:
        """The section of this type, which a device contributes."""
        return next(value for value in vars(self).values() if isinstance(value, kind))

    @property
    def max_sequence_length(self) -> int:
        return self.data_config.input_max_len + self.data_config.max_new_tokens

    @property
    def decode_rows(self) -> int:
        """Most rows of a decode step, in all data-parallel groups: one for each sequence and each drafted token."""
        groups, data = self.attn_dp_size, self.data_config
        sequences = data.batch_size // groups
        return groups * max(sequences, min(sequences, MOST_DRAFTING) * (1 + self.draft_config.most))

    @property
    def parallel_sizes(self) -> ParallelSizes:
        sizes = self.parallel_config
        return ParallelSizes(
            self.world_size,
            sizes.attn_tp_size,
            sizes.moe_tp_size,
            sizes.embed_tp_size,
            sizes.lmhead_tp_size,
            sizes.expert_slots,
        )

    @property
    def attn_dp_size(self) -> int:
        return self.parallel_sizes.attn_dp

    @property
    def prefill_tokens(self) -> int:
        """Most prompt tokens of a data-parallel group in one step."""
        data = self.data_config
        tokens = data.batch_size // self.attn_dp_size * data.input_max_len
        return min(tokens, data.chunked_prefill_size or tokens)
