"""The side of the server that clients see: HTTP, the APIs of OpenAI and Anthropic, metrics and a live page."""
