"""Builds networks by name."""

from stalempi.train.models.build import MODELS, TEXT_MODELS, build_model, check_model_name

__all__ = ["MODELS", "TEXT_MODELS", "build_model", "check_model_name"]
