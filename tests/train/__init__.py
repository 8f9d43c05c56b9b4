"""Tests what a user trains with."""
