"""Which experts are worth a slot on the device."""
