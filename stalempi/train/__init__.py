"""Holds what a user trains with: data, models, learning-rate schedules; import each from its own module.

datasets    load_dataset(name) -> train and test images
sampler     which samples a worker takes, in which order
loader      batches from a data set and a sampler, safe under MPI
models      build_model(name) -> a network that fits the data
schedule    the learning rate as a function of global samples
"""
