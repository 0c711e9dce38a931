"""The CPU platform's ops (ops.py), over a native module (csrc/)."""
