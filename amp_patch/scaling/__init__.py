"""The loss scale, the gradients and the step."""
