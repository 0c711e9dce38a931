"""One run of one case: launching its ranks, the runner, and what it leaves behind."""
