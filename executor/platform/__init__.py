"""A device with its memory, collectives, graphs and ops, and what else is particular to it: one folder for each."""
