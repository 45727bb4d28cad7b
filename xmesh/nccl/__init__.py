"""Transfers as NCCL operations: broadcasts and grouped sends between GPUs."""
