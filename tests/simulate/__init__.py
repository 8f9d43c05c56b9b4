"""Tests of runs under a virtual clock, and of the traces that real and simulated runs share."""
