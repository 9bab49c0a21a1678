"""Steps of a replica: what is recorded of each, and Stop and Pause, which are obeyed where one ends."""
