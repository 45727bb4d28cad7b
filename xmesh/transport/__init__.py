"""Transports: how bytes get from one rank to another."""
