"""Measurements of amp_patch beside plain PyTorch and `torch.autocast`. Run from the source tree."""
