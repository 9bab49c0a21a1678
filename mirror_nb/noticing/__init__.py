"""What values hold, and that somebody has changed them in place since. Knows no replicas."""
