"""Tests of cutting a model and training it in blocks."""
