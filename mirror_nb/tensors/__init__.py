"""What tensors are made of: blocks of memory, their checksums, and parts of which each replica has its own.

And what batch norms make of the shares of a batch, and torch of one without examples.
"""
