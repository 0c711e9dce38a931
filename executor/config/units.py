"""The units of case keys that end in `_mb` and `_gb`, in bytes."""

MB, GB = 1 << 20, 1 << 30
