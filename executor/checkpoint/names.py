"""The names of a checkpoint's files. Imports nothing heavy: the launcher looks for them too."""

SINGLE = "model.safetensors"  # all tensors in one file
INDEX = "model.safetensors.index.json"  # which file each tensor is in
