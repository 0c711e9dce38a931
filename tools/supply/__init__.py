"""Umbra's packages as locked files with hashes, and a proof that the native module builds the same twice."""
