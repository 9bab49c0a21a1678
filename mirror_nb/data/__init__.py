"""Input: global batches, the share of each that a replica loads, and what that weighs in its gradients."""
