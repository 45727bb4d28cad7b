"""A U-shaped network in NumPy that denoises images, in pipeline stages; see train.py."""
