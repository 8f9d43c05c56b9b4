"""Keeps these tests to one core."""

import torch

torch.set_num_threads(1)
