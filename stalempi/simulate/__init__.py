"""Runs the same policies under a virtual clock: without gradients (timing) or with them (learning)."""
