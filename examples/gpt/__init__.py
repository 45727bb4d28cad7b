"""A small GPT in NumPy, trained data, tensor and pipeline parallel; see README.md."""
