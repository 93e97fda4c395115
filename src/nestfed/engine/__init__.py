"""The engine of simulation: how a round is laid out, compiled and run."""
