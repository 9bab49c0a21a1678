"""What replicas measure, and what is made of it: rings, samples, timelines, findings. Without torch and Jupyter."""
