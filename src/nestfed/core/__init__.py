"""The vocabulary: settings, rows, states, a client's view of the others, tasks. Nothing here knows an engine."""
