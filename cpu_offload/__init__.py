"""Shadow experts: all experts have their weights in host memory, and some are resident on the device as well."""
