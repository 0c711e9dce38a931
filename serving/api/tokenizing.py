"""POST /tokenize and /detokenize: text to token ids and back, in the shapes of vLLM's server."""

from typing import Any

import msgspec

from umbra.base.errors import UserError
from umbra.serving.api.errors import invalid
from umbra.serving.api.fields import typed
from umbra.serving.api.front import Front
from umbra.serving.api.jobs import check_length
from umbra.serving.api.openai_chat import ChatRequest, TemplateKwargs, messages_of, of_chat, settings_of
from umbra.text.chat import Chat


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(front: Front, data: Any) -> dict[str, Any]:
    ready, text = front.check_serving()
    request = typed(TokenizeRequest, data)
    front.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    messages = None if request.messages is None else messages_of(request.messages, front.note)
    settings = settings_of(ChatRequest(chat_template_kwargs=request.chat_template_kwargs), text, front.note)

    def encoded() -> list[int]:
        try:
            if messages is not None:
                return text.tokenizer.encode_chat(Chat(messages, request.tools or [], settings))
            check_length(request.prompt or "", "prompt", text, ready)
            return text.tokenizer.encode(request.prompt or "", False, request.add_special_tokens is not False)
        except UserError as error:
            raise (invalid("prompt", str(error)) if messages is None else of_chat(error)) from None

    ids = await front.work(encoded)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": ready.longest, "tokens": ids}
    if request.return_token_strs:
        body["token_strs"] = [text.tokenizer.backend.id_to_token(id) for id in ids]
    return body


async def detokenize(front: Front, data: Any) -> dict[str, Any]:
    ready, text = front.check_serving()
    request = typed(DetokenizeRequest, data)
    front.check_model(request.model)
    if wrong := [id for id in request.tokens if not 0 <= id < ready.vocabulary]:
        raise invalid("tokens", f"{wrong[0]} is outside the vocabulary of {ready.vocabulary}")
    try:
        return {"prompt": await front.work(lambda: text.tokenizer.whole_text(request.tokens))}
    except UserError as error:
        raise invalid("tokens", str(error)) from None
