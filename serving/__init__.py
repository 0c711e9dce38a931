"""The server: a front process that speaks HTTP (api/), and ranks that run the engine on its requests (ranks/)."""
