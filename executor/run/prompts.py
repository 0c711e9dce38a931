"""The prompts of a case as token ids."""

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.text.tokenizer import Tokenizer


def encode_prompts(case: Case, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of the case, none empty and none too long."""
    data, encoded = case.data_config, []
    for i, prompt in enumerate(data.prompts):
        ids = tokenizer.encode(prompt, case.model_config.tokenizer_mode == "chat")
        if not ids:
            raise UserError(f"data_config.prompts: prompt {i} ({prompt!r:.40}) has no tokens")
        if len(ids) > data.input_max_len:
            if data.long_prompts == "error":
                raise UserError(
                    f"data_config.prompts: prompt {i} ({prompt!r:.40}) has {len(ids)} tokens, input_max_len is "
                    f"{data.input_max_len}: raise it, or set long_prompts: truncate"
                )
            ids = ids[-data.input_max_len :]
        encoded.append(ids)
    return encoded
