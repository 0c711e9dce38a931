"""The fields of requests that chats and completions share, checked."""

import difflib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.engine.schedule.request import LARGEST_SEED, Grammar, SamplingParams
from umbra.serving.api.errors import ApiError, invalid, of_validation
from umbra.serving.ranks.messages import Ready

DEEPEST = 64  # levels of a request's JSON
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings of a request, and characters of one
LARGEST_PRIORITY = 1 << 31
MOST_CHOICES = 64  # answers to one request
MOST_LISTED = 4096  # entries of a list or mapping of token ids in a request's settings
IGNORED = "this server has no such thing, so it is ignored"
ALIKE = 0.88  # two names are one from this share of characters on: max_token and max_tokens, not top_a and top_k


@dataclass(frozen=True)
class KnownFields:
    """Fields of an API that nothing reads. Values at which a field asks for nothing stand beside its name."""

    harmless: frozenset[str]  # they do not change an answer
    ignored: Mapping[str, tuple[object, ...]]  # what they ask for is left out, which the answer's header says
    refused: Mapping[str, tuple[object, ...]]  # without what they ask for, the answer would be another one

    def __contains__(self, name: str) -> bool:
        return name in self.harmless or name in self.ignored or name in self.refused


HARMLESS = frozenset(
    [
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
    ]
)
KNOWN = KnownFields(
    harmless=HARMLESS,
    ignored={
        "moderation": (),
        "prediction": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
        "guided_decoding_backend": ("auto",),
    },
    refused={
        "best_of": (1,),
        "suffix": ("",),
        "audio": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "spaces_between_special_tokens": (True, False),
        "prompt_logprobs": (),
        "documents": ([],),
        "chat_template": (),
        "guided_whitespace_pattern": (),
        "structural_tag": (),
        "bad_words": ([],),
        "allowed_token_ids": ([],),
        "logits_processors": ([],),
        "return_tokens_as_token_ids": (False,),
        "return_token_ids": (False,),
        "kv_transfer_params": (),
        "mm_processor_kwargs": ({},),
        # Names by which other engines constrain an answer, which must not vanish in silence.
        "ebnf": (),
        "grammar": (),
        "grammar_lazy": (False,),
        "lora": ([],),
        "lora_path": (),
        "lora_request": (),
        "adapter_id": (),
        "logit_processors": ([],),
        "custom_logit_processor": (),
        "custom_params": ({},),
        "stop_regex": ("", []),
        "allowed_tokens": ([],),
        "bad_words_ids": ([],),
        "guided_json_object": (False,),
        "response_schema": (),
        "max_new_tokens": (),
        "n_predict": (-1,),
        "num_predict": (-1,),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "guided_structural_tag": (),
        "format": (),
        "options": ({},),
        "repeat_penalty": (1.0,),
        "mirostat": (0,),
        "dry_multiplier": (0.0,),
        "stop_words": ([],),
        "lora_adapters": ([],),
        "thinking_token_budget": (),
        "sampling_seed": (),
        "typical_p": (1.0,),
        "no_repeat_ngram_size": (0,),
    },
)
INSTEAD = {
    "ebnf": "write the grammar in Lark, as guided_grammar",
    "grammar": "write the grammar in Lark, as guided_grammar",
    "response_schema": "give it as guided_json",
    "guided_json_object": 'give response_format: {"type": "json_object"}',
    "bad_words": "give logit_bias for their tokens",
    "lora_path": "merge the adapter into the checkpoint",
    "previous_response_id": "responses are not kept, so send the whole conversation in input",
    "output_format": "give output_config.format",
    "lora": "merge the adapter into the checkpoint",
    "repeat_penalty": "give repetition_penalty",
    "sampling_seed": "give seed",
    "stop_words": "give stop",
} | dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "give max_tokens")


Struct = TypeVar("Struct", bound=msgspec.Struct)
AnyFields = TypeVar("AnyFields", bound="Fields")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Structured(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The pattern that an answer must match, by vLLM's names; one of them."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Fields(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang's names of two of them
    json_schema: Any = None
    truncate_prompt_tokens: int | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Says whether every event of the stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def converted(kind: type[Struct], data: Any, known: KnownFields, note: Callable[[str], None]) -> Struct:
    """The request in `data`, which was read from JSON. Raises ApiError for fields of wrong types, and for those of
    `known` that are refused. `note` is told of those that are ignored."""
    if not isinstance(data, dict):
        raise ApiError(400, "the request's body must be a JSON object")
    for name, value in data.items():
        idle = known.ignored.get(name, known.refused.get(name))
        if idle is None or value is None or name in kind.__struct_fields__ or any(value == v for v in idle):
            continue
        if name in known.ignored:
            note(f"{name}: {IGNORED}")
        else:
            said = f"this field is not supported{f': {INSTEAD[name]}' if name in INSTEAD else ''}"
            raise invalid(name, said, "unsupported_parameter")
    return typed(kind, data)


def typed(kind: type[Struct], data: Any) -> Struct:
    """`data` as a struct of this kind. Raises ApiError for fields of wrong types."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error) from None


def read(kind: type[AnyFields], data: Any, note: Callable[[str], None]) -> AnyFields:
    """The chat or completion that `data` asks for, as `converted`, with its counts checked."""
    request = converted(kind, data, KNOWN, note)
    if not 1 <= request.choices <= MOST_CHOICES:
        raise invalid("n", f"{request.choices} must be from 1 to {MOST_CHOICES}")
    if len(request.stops) > MOST_STOPS or not all(1 <= len(stop) <= LONGEST_STOP for stop in request.stops):
        raise invalid("stop", f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters are allowed")
    if not -LARGEST_PRIORITY <= (request.priority or 0) <= LARGEST_PRIORITY:
        raise invalid("priority", f"must be from -{LARGEST_PRIORITY} to {LARGEST_PRIORITY}")
    if request.stream_options and not request.stream:
        raise invalid("stream_options", "it is only for requests with stream: true")
    return request


def unknown(kind: type[msgspec.Struct], data: dict[str, Any], known: KnownFields) -> list[str]:
    """The fields of `data` that are neither of `kind` nor `known`; they are ignored."""
    return [name for name in data if name not in kind.__struct_fields__ and name not in known]


def meant_by(name: str, kind: type[msgspec.Struct]) -> str:
    """The field of `kind` that `name`, which is none, is a slip of the pen for; empty: it is another engine's."""
    plain = {field.replace("_", ""): field for field in kind.__struct_fields__}
    close = difflib.get_close_matches(name[:64].replace("_", "").replace("-", "").lower(), plain, 1, ALIKE)
    return plain[close[0]] if close else ""


def check_depth(data: Any) -> None:
    level = [data]
    for _ in range(DEEPEST):
        nested = [v for v in level if isinstance(v, (dict, list))]
        level = [w for v in nested for w in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return
    raise ApiError(400, f"the request's body is nested more than {DEEPEST} levels deep")


def sampling_of(
    fields: Fields, case: Case, ready: Ready, max_tokens: int, grammar: Grammar | None, logprobs: int | None
) -> SamplingParams:
    """Returns the sampling parameters of this request. Fields that are absent are as `sampling_config` of the case
    says."""
    default = case.sampling_config
    if any(not 0 <= id < ready.vocabulary for id in fields.stop_token_ids or []):
        raise invalid("stop_token_ids", f"must be token ids below {ready.vocabulary}")
    bias = _biases(fields.logit_bias or {}, ready.vocabulary)
    for name, values in (("stop_token_ids", fields.stop_token_ids or []), ("logit_bias", bias)):
        if len(values) > MOST_LISTED:
            raise invalid(name, f"{len(values)} entries are more than {MOST_LISTED}")
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=default.temperature if fields.temperature is None else fields.temperature,
            top_k=default.top_k if fields.top_k is None else _top_k(fields.top_k, ready.vocabulary),
            top_p=default.top_p if fields.top_p is None else fields.top_p,
            min_p=default.min_p if fields.min_p is None else fields.min_p,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=(
                default.repetition_penalty if fields.repetition_penalty is None else fields.repetition_penalty
            ),
            logit_bias=bias,
            seed=secrets.randbits(62) if fields.seed is None else fields.seed & LARGEST_SEED,
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=bool(fields.ignore_eos),
            min_tokens=fields.min_tokens or 0,
            logprobs=logprobs,
            grammar=grammar,
        )
    except UserError as error:
        param, _, message = str(error).partition(": ")
        known = param in SamplingParams.__struct_fields__
        raise (invalid(param, message) if known else ApiError(400, str(error))) from None


def _top_k(given: int, vocabulary: int) -> int | None:
    """-1, 0 and the whole vocabulary are no limit."""
    return None if given in (-1, 0) or given >= vocabulary else given


def _biases(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    biases = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocabulary):
            raise invalid("logit_bias", f"{name:.40} is no token id below {vocabulary}")
        biases[int(name)] = bias
    return biases


def truncated(fields: Fields, ids: list[int]) -> list[int]:
    """The prompt `ids`, or the last `truncate_prompt_tokens` of them."""
    most = fields.truncate_prompt_tokens
    if most is None or most == -1:
        return ids
    if most < 1:
        raise invalid("truncate_prompt_tokens", f"{most} must be at least 1, or -1 for all")
    return ids[-most:]


def length_of_answer(given: int | None, name: str, prompt: int, where: str, longest: int) -> int:
    """Most tokens of an answer to a prompt of `prompt` tokens: `given`, or as many as fit, whichever is less. Raises
    ApiError if not even one fits, or if `given` is less. `name` and `where` are the fields of answer and prompt."""
    if given is not None and given < 1:
        raise invalid(name, f"{given} must be at least 1")
    if prompt >= longest:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens, and prompt and answer together can have at most {longest}: shorten it",
            where,
            "context_length_exceeded",
        )
    return min(longest - prompt, longest if given is None else given)
