"""What this process may use of the machine: cores, memory, files without a name. Without torch."""
