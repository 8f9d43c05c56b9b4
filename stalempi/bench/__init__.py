"""Holds the stalempi-bench command: one file a subcommand."""
