"""Sites that do not trust each other: one worker per site, one coordinator, and whatever carries letters between them.

link         what a framework must do: carry bytes. Standard library only, for it also runs where there is no JAX
"""
