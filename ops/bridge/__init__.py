"""The host's part of the bridges between a device's streams and the threads that compute experts on the CPU."""
