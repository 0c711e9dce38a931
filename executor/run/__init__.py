"""What one run of a case needs and writes: prompts, plans of memory and time, its report and pictures."""
