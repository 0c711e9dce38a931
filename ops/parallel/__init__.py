"""How a model is split over ranks: sizes of the splits, rank groups, and how processes join the groups."""
