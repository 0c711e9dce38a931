"""The split of a model over ranks: sizes of the splits, rank groups, and how processes join the groups."""
