"""What tensors are made of: blocks of memory, their checksums, and parts of which each replica has its own."""
