"""Quantises a checkpoint: to 4 bits (AWQ, or MXFP4 of fused experts) or to FP8 in blocks."""
