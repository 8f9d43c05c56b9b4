"""Builds networks by name."""

from stalempi.train.models.build import MODELS, build_model, check_model_name

__all__ = ["MODELS", "build_model", "check_model_name"]
