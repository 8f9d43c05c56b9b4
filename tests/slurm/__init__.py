"""Whole batch jobs on a real Slurm."""
