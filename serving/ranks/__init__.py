"""The ranks of a server, their supervisor, and the messages between them and the front."""
