"""Equal gradients on every replica: what is reduced, with what, and in whose memory."""
