"""Casts of the model itself, and the FP32 masters behind it."""
