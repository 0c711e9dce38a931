"""Which ranks share what: the sizes of every split, the rank groups they make, and how processes join them."""
