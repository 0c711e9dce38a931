"""The front door: the command line, and later `LLM` for scripts. It holds nothing but calls into executor/."""
