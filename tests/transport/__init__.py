"""Holds every transport to one contract."""
