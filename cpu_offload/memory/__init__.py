"""The arena that experts and KV pages share."""
