"""What clients see: HTTP, the APIs of OpenAI and Anthropic, metrics and a live page."""
