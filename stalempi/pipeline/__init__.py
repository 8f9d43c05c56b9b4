"""Trains a model that is cut into blocks, each pinned to a rank."""
