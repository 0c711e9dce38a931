"""Coverage-guided fuzzing of everything that reads what others wrote: docs/reliability.md."""
