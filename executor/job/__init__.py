"""One run of one case: the launcher of its ranks, the runner, and the files that a run writes."""
