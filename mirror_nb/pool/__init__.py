"""Replica processes: their life, and requests to them. One abstract pool, one local, one in this process."""
