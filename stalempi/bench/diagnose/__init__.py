"""Looks for what is wrong with a machine, an MPI and a launch, before a job finds out."""
