"""The text that a chat model reads and writes: tokenizers, chat templates, parsers of answers, and sandboxes for
them."""
