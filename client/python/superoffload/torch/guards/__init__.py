"""What finds code of a training loop that would get something else than it expects of gradients and parameters."""
