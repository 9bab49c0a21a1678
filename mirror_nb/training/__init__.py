"""The high-level way: compile, fit, evaluate, predict, save and load, with Keras's names."""
