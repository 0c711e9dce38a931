"""The arena, memory that experts and KV pages share."""
