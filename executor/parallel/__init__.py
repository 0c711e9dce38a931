"""Which ranks work together: the partitions of a world, the groups a model talks to, how processes join."""
