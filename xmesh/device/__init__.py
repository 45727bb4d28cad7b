"""Arrays in GPU memory: what they look like, how regions of them are copied, and when."""
