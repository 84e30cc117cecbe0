"""The state of an optimizer: where it is read, what of it a loop writes, how it leaves the daemon and comes back."""
