"""Runs the same policies under a virtual clock; import each part from its own module.

workload, scenarios   how long workers compute, and who dies
network               how long messages take, and where they queue
agenda                what is still to be sent
timing                simulate(policy, workload): who waits, how large the gaps are; no gradients
virtual, learning     learn(policy, workload, recipe): the product's own server and workers, real gradients
figures, sweep        a run in a row; many policies and seeds
predict               a run's wall time from a recorded one
clairvoyant           what no capped policy can beat
"""
