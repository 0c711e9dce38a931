"""The inputs and outputs of one run of a case: prompts, plans of memory and time, its report and pictures."""
