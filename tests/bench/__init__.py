"""Tests of the stalempi-bench command, without MPI."""
