"""What a run of a case needs, counted before a device is opened: sizes, memory, and the choices that follow."""
