"""Plans of a run, made before a device is opened: sizes, memory, and the choices that follow from them."""
