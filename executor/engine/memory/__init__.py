"""Pages of the KV cache and of recurrent states, the prefixes kept in them, and how memory is divided."""
