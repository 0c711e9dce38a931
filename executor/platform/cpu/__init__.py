"""The CPU as a device: its engine, its graphs and its shadow experts."""
