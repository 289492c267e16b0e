"""One trace of a user's function, and what is recorded and kept out while it runs."""
