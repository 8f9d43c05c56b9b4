"""Keeps these tests to one core, so that equal runs are equal bit for bit."""

import torch

torch.set_num_threads(1)
