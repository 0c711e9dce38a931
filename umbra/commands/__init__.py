"""What commands of `umbra` do, where it is more than one call."""
