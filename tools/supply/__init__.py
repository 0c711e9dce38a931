"""What Umbra is built from: locked packages with their hashes, a bill of materials, an audit, and a proof that the
native module builds the same twice."""
