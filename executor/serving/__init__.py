"""The server: a front process that speaks HTTP, and ranks that run the engine's loop on its requests."""
