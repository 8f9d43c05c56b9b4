"""Moves bytes between ranks: base says what, message how it is labelled, mpi and inproc do it."""
