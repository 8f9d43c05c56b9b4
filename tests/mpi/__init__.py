"""Runs whole jobs on real MPI."""
