"""Objects that exist on both sides of the channel, by reference: whose copy each is, and what it holds."""
