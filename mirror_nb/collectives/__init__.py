"""How replicas talk to each other: the process group, and the algorithms that reduce and broadcast on it."""
