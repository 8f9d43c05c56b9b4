"""Trains a model that is cut into blocks, each on a rank of its own.

actions.py      schedules.py        runner.py           link.py
F5 <B3 ...  <── what comes next ──> carries it out ──>  activations up, error gradients down
                                    block.py: forward, recompute, backward, update
"""
