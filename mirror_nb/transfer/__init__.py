"""Objects to bytes and back, whatever they are: torch's, Keras's, the user's own."""
