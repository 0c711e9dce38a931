"""A CUDA GPU as a device."""
