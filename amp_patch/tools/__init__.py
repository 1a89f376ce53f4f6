"""See what mixed precision does to a training run."""
